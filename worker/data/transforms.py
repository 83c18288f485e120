"""Transforms of a data set's values when it is registered: a fixed list, by name and numbers.

A transform takes an array of samples [n, ...] and returns one of as many. Cells of a table arrive as
text (dtype object) and become numbers at the first step that needs them. What does not fit raises
``BadValue`` with its place in the array; the reader of the file knows which line or row that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

MAX_RANK = 8
MAX_SAMPLE_ELEMENTS = 1 << 28
MAX_CLASSES = 100_000
DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""Dtypes of stored fields: those that both numpy and the op-DAG know."""
EXACT_FLOAT = 2**53  # whole numbers up to here survive a float64


class BadValue(Exception):
    """A value that cannot be used; ``at`` is its index in the array of samples, () for none."""

    def __init__(self, why: str, at: Sequence[int] = ()) -> None:
        super().__init__(why)
        self.at = tuple(int(i) for i in at)


@dataclass(frozen=True, slots=True)
class Transform:
    """A step by name; ``numbers`` and ``words`` are its arguments, checked as it was parsed."""

    name: str
    numbers: tuple[tuple[float, ...], ...] = ()
    words: tuple[str, ...] = ()

    def apply(self, array: Array) -> Array:
        """The samples after this step. BadValue where one cannot take it."""
        return _KINDS[self.name].apply(array, self)

    @property
    def first(self) -> float:
        return self.numbers[0][0]


@dataclass(frozen=True, slots=True)
class Kind:
    """Form and meaning of a transform of ``least`` to ``most`` numbers."""

    apply: Callable[[Array, Transform], Array]
    form: str
    meaning: str
    least: int = 0
    most: int = 0
    words: bool = False  # its arguments are words, kept as written
    whole: bool = False  # its numbers are whole and >= 0


def parse_transform(field: str, text: str) -> Transform:
    """'scale:1/255' -> Transform; UsageError names the field and the right form."""
    name, _, rest = (part.strip() for part in text.partition(":"))
    kind = _KINDS.get(name)
    if kind is None:
        raise UsageError(f"field {field!r}: no transform {name[:40]!r}; there are {', '.join(_KINDS)}")
    parts = [part.strip() for part in rest.split(",")] if rest else []
    wrong = UsageError(f"field {field!r}: {text[:80]!r}; write {kind.form}: {kind.meaning}")
    if not kind.least <= len(parts) <= kind.most or not all(parts):
        raise wrong
    if kind.words:
        if len(set(parts)) != len(parts) or (name == "cast" and parts[0] not in DTYPES):
            raise wrong
        return Transform(name, words=tuple(parts))
    if name == "reshape":
        parse_shape(field, rest)
    try:
        numbers = tuple(tuple(_number(word) for word in part.split()) for part in parts)
    except ValueError:
        raise wrong from None
    flat = [value for group in numbers for value in group]
    if not all(isfinite(value) for value in flat):
        raise wrong
    if kind.whole and (any(value < 0 or value != int(value) for value in flat) or len(flat) != len(parts)):
        raise wrong
    if name == "normalise" and (min(numbers[1]) <= 0 or len({len(numbers[0]), len(numbers[1])} - {1}) > 1):
        raise wrong
    return Transform(name, numbers)


def parse_shape(field: str, text: str) -> tuple[int, ...]:
    """'1,28,28' -> (1, 28, 28), '' -> (); UsageError out of bounds."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    shape = tuple(int(part) for part in parts if part.isdecimal() and len(part) < 12)
    if len(shape) != len(parts) or len(shape) > MAX_RANK or not 0 < prod(shape) <= MAX_SAMPLE_ELEMENTS:
        raise UsageError(
            f"field {field!r}: shape [{text[:60]}]; give up to {MAX_RANK} sizes above 0, "
            f"{MAX_SAMPLE_ELEMENTS:,} elements at most"
        )
    return shape


def settle(array: Array, dtype: str, shape: tuple[int, ...] | None) -> Array:
    """The samples as what their field is declared to be; "" and None leave it as it is.

    BadValue for what is not finite, not whole, or out of the dtype's range; UsageError for another shape.
    """
    if array.dtype == object or (array.dtype.name not in DTYPES and not dtype):
        dtype = dtype or "float32"  # as nets are trained in
    array = numbers_of(array) if array.dtype == object else array
    if array.dtype.kind == "f":
        refuse(~np.isfinite(array), array, "is not a finite number")
    array = _converted(array, dtype or array.dtype.name)
    if shape is not None:
        array = _reshaped(array, shape)
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def numbers_of(cells: Array) -> Array:
    """Text cells as float64."""
    try:
        return cells.astype(np.float64)
    except (TypeError, ValueError):
        pass
    for at, cell in np.ndenumerate(cells):
        try:
            float(cell)
        except ValueError:
            what = f"{str(cell)[:40]!r} is not a number" if str(cell).strip() else "the cell is empty"
            raise BadValue(f"{what}; mend it, or use missing:VALUE or classes:A,B", at) from None
    raise BadValue("a cell is not a number")


def refuse(wrong: Array, array: Array, why: str) -> None:
    """BadValue at the first element where ``wrong`` holds."""
    if wrong.any():
        at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        raise BadValue(f"{array[at]} {why}", [int(i) for i in at])


def _converted(array: Array, dtype: str) -> Array:
    wanted = np.dtype(dtype)
    if wanted == array.dtype:
        return array
    if wanted.kind == "f":
        with np.errstate(over="ignore"):
            found: Array = array.astype(wanted)
        refuse(~np.isfinite(found), array, f"does not fit into {dtype}")
        return found
    if array.dtype.kind == "f":
        refuse(~np.isfinite(array), array, "is not a finite number")
        refuse(array != np.rint(array), array, f"is not a whole number, and the field is {dtype}")
        refuse(np.abs(array) > EXACT_FLOAT, array, "is too large to be read exactly as a number")
    low, high = (0, 1) if wanted.kind == "b" else (np.iinfo(wanted).min, np.iinfo(wanted).max)
    if array.dtype.kind != "b":
        refuse((array < low) | (array > high), array, f"does not fit into {dtype}, {low} to {high}")
    return array.astype(wanted)


def _reshaped(array: Array, shape: tuple[int, ...]) -> Array:
    if prod(array.shape[1:]) != prod(shape):
        raise UsageError(
            f"a sample has shape {list(array.shape[1:])}, {prod(array.shape[1:])} elements; declared is "
            f"{list(shape)}, {prod(shape)} elements"
        )
    return array.reshape(len(array), *shape)


def _floating(array: Array) -> Array:
    """Convert to a float that holds the values: float32 for short integers, as nets are trained in."""
    array = numbers_of(array) if array.dtype == object else array
    if array.dtype.kind == "f":
        return array
    return array.astype(np.float32 if array.dtype.itemsize <= 2 else np.float64)


def _scale(array: Array, step: Transform) -> Array:
    array = _floating(array)
    return np.asarray(array * array.dtype.type(step.first))


def _normalise(array: Array, step: Transform) -> Array:
    array = _floating(array)
    mean, std = (np.asarray(group, array.dtype) for group in step.numbers)
    channels = max(len(mean), len(std))
    if channels > 1:
        if array.ndim < 2 or array.shape[1] != channels:
            raise UsageError(f"normalise has {channels} channels, a sample has shape {list(array.shape[1:])}")
        tail = (1,) * (array.ndim - 2)
        mean, std = mean.reshape(-1, *tail), std.reshape(-1, *tail)
    return np.asarray((array - mean) / std, array.dtype)


def _clip(array: Array, step: Transform) -> Array:
    array = _floating(array)
    return np.clip(array, step.numbers[0][0], step.numbers[1][0])


def _reshape(array: Array, step: Transform) -> Array:
    return _reshaped(array, tuple(int(group[0]) for group in step.numbers))


def _transpose(array: Array, step: Transform) -> Array:
    axes = [int(group[0]) for group in step.numbers]
    if sorted(axes) != list(range(array.ndim - 1)):
        raise UsageError(f"transpose:{','.join(map(str, axes))} of samples of shape {list(array.shape[1:])}")
    return array.transpose(0, *[axis + 1 for axis in axes])


def _crop(array: Array, step: Transform) -> Array:
    length = int(step.first)
    start = int(step.numbers[1][0]) if len(step.numbers) > 1 else 0
    if array.ndim < 2 or array.shape[1] < start + length or not length:
        raise UsageError(
            f"crop:{length},{start} needs {start + length} along the first axis of a sample, "
            f"its shape is {list(array.shape[1:])}"
        )
    return array[:, start : start + length]


def _pad(array: Array, step: Transform) -> Array:
    length = int(step.first)
    value = int(step.numbers[1][0]) if len(step.numbers) > 1 else 0
    if array.ndim < 2 or array.shape[1] > length or length > MAX_SAMPLE_ELEMENTS:
        raise UsageError(f"pad:{length} of samples of shape {list(array.shape[1:])}; crop first, or pad more")
    array = numbers_of(array) if array.dtype == object else array
    widths = [(0, 0), (0, length - array.shape[1]), *[(0, 0)] * (array.ndim - 2)]
    return np.pad(array, widths, constant_values=value)


def _cast(array: Array, step: Transform) -> Array:
    return _converted(numbers_of(array) if array.dtype == object else array, step.words[0])


def _classes(array: Array, step: Transform) -> Array:
    numbers = {word: at for at, word in enumerate(step.words)}
    found = np.empty(array.shape, np.int64)
    for at, cell in np.ndenumerate(array):
        word = str(cell).strip()
        if word not in numbers:
            known = ", ".join(step.words[:8]) + (", ..." if len(step.words) > 8 else "")
            raise BadValue(f"{word[:40]!r} is not one of the classes {known}", at)
        found[at] = numbers[word]
    return found


def _missing(array: Array, step: Transform) -> Array:
    if array.dtype == object:
        empty = np.array([not str(cell).strip() for cell in array.ravel()], bool).reshape(array.shape)
        return np.where(empty, np.asarray(repr(step.first), object), array)
    if array.dtype.kind == "f":
        return np.where(np.isnan(array), array.dtype.type(step.first), array)
    return array


def _bytes(array: Array, step: Transform) -> Array:
    length = int(step.first)
    if array.dtype != object or array.ndim != 1 or not 0 < length <= MAX_SAMPLE_ELEMENTS:
        raise UsageError(f"bytes:{length} takes one text column of a table and a length above 0")
    found = np.zeros((len(array), length), np.uint8)
    for at, cell in enumerate(array):
        text = str(cell).encode()[:length]
        found[at, : len(text)] = np.frombuffer(text, np.uint8)
    return found


def _number(text: str) -> float:
    """'0.5' or '1/255'; ValueError otherwise."""
    top, slash, bottom = text.partition("/")
    if slash and float(bottom) == 0.0:
        raise ValueError(text)
    return float(top) / float(bottom) if slash else float(top)


_KINDS: dict[str, Kind] = {
    "scale": Kind(_scale, "scale:FACTOR", "x * FACTOR, which may be a fraction such as 1/255", 1, 1),
    "normalise": Kind(
        _normalise, "normalise:MEAN,STD", "(x - MEAN) / STD; several by blanks: one a channel", 2, 2
    ),
    "clip": Kind(_clip, "clip:LOW,HIGH", "x held between the two", 2, 2),
    "reshape": Kind(_reshape, "reshape:SIZES", "each sample reshaped to this shape", 1, MAX_RANK, whole=True),
    "transpose": Kind(
        _transpose,
        "transpose:AXES",
        "the axes of a sample, numbered from 0, in this order",
        1,
        MAX_RANK,
        whole=True,
    ),
    "crop": Kind(
        _crop, "crop:LENGTH[,START]", "that much of a sample's first axis, from START", 1, 2, whole=True
    ),
    "pad": Kind(
        _pad, "pad:LENGTH[,VALUE]", "a sample's first axis filled up with VALUE or 0", 1, 2, whole=True
    ),
    "cast": Kind(_cast, "cast:DTYPE", f"to one of {', '.join(DTYPES)}", 1, 1, words=True),
    "classes": Kind(
        _classes, "classes:A,B,...", "a word's place in this list, from 0", 1, MAX_CLASSES, words=True
    ),
    "missing": Kind(_missing, "missing:VALUE", "VALUE for empty cells and NaN", 1, 1),
    "bytes": Kind(
        _bytes, "bytes:LENGTH", "a text cell's first UTF-8 bytes, filled up with 0", 1, 1, whole=True
    ),
}
TRANSFORMS = {name: (kind.form, kind.meaning) for name, kind in _KINDS.items()}
"""Name -> (how it is written, what it does): for the help and the docs."""
