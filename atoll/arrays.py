"""Arrays that data are stored in: numpy's, and bfloat16, which numpy has not.

A bfloat16 array is one of a structure with the single field ``bfloat16``, so that indexing and stacking are
numpy's own and its dtype says what the bits are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from atoll.errors import UsageError
from atoll.fields import described, is_a
from atoll.opdag import DTYPE_BYTES

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Array = NDArray[np.generic]

BFLOAT16 = np.dtype([("bfloat16", "<u2")])
_TENSOR = "torch.Tensor"
TEXT = "text (np.unique(labels, return_inverse=True)[1] numbers labels)"
_WIDER = {"uint16": "int32", "uint32": "int64"}
"""Types that no model takes as they are, and the next that holds all of their values."""


def dtype_name(array: Array) -> str:
    """Return an array's dtype by torch's name."""
    return "bfloat16" if array.dtype == BFLOAT16 else str(array.dtype)


def tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor that shares the array's memory, of a copy where that is read-only."""
    import torch  # what only stores data needs none

    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(what: str, value: Any) -> Array:
    """Return the array, tensor, data frame or nested list ``value`` as a contiguous array.

    A tensor is taken without its gradient, from any device; it shares the memory where it can. UsageError,
    which begins with ``what``, for values that are no numbers or not rectangular.
    """
    if isinstance(value, str | bytes):
        raise UsageError(f"{what} = {described(value)} is {TEXT}; give numbers")
    if value is None or isinstance(value, type):
        raise UsageError(f"{what} = {described(value)}; give an array or a tensor")
    found = _read(what, value)
    if found.ndim == 0:
        raise UsageError(f"{what} = {described(value)} has no rows; give one row for each sample")
    if found.dtype.kind == "c":
        raise UsageError(
            f"{what} holds {found.dtype} numbers; give real and imaginary part as inputs of their own"
        )
    found = found.astype(_WIDER.get(found.dtype.name, found.dtype.newbyteorder("=")), copy=False)
    if dtype_name(found) not in DTYPE_BYTES:
        raise UsageError(f"{what} holds {_kind(found)}; give numbers, as float32 or int64")
    return np.ascontiguousarray(found)


def _read(what: str, value: Any) -> Array:
    if is_a(value, _TENSOR):
        return _of_tensor(what, value)
    if isinstance(value, list | tuple) and value and all(is_a(item, _TENSOR) for item in value):
        return stacked(what, [_of_tensor(what, item) for item in value])
    return _of_other(what, value)


def stacked(what: str, rows: Sequence[Array]) -> Array:
    """Stack rows; UsageError, which begins with ``what``, where their shapes differ."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    if len(shapes) > 1:
        raise UsageError(f"{what} has rows of different shapes, {shapes[0]} and {shapes[1]}; pad them to one")
    return np.stack(rows)


def _of_tensor(what: str, value: Any) -> Array:
    if value.is_nested:
        raise UsageError(f"{what} has rows of different lengths; pad them to one, .to_padded_tensor(0)")
    if str(value.layout) != "torch.strided":
        raise UsageError(f"{what} is {str(value.layout).removeprefix('torch.')}; give it dense, .to_dense()")
    if value.is_meta:
        raise UsageError(f"{what} is on the meta device, which holds no values; give the data")
    if value.is_quantized:
        raise UsageError(f"{what} is quantised; give it as .dequantize()")
    plain = value.detach().cpu().contiguous()
    try:
        if str(plain.dtype) == "torch.bfloat16":
            import torch  # it is there: this is one of its tensors

            return cast("Array", plain.view(torch.int16).numpy().view(BFLOAT16))
        found: Array = plain.resolve_conj().resolve_neg().numpy()
    except TypeError:
        raise UsageError(f"{what} holds {plain.dtype}; give it as float32 or int64") from None
    return found


def _of_other(what: str, value: Any) -> Array:
    rows = value if isinstance(value, list | tuple) else (value,)  # a stack of masked arrays has no mask
    if any(isinstance(row, np.ma.MaskedArray) and np.ma.is_masked(row) for row in rows):
        raise UsageError(f"{what} has masked values; give numbers for them, .filled(0)")
    if hasattr(value, "tocoo"):  # scipy's
        raise UsageError(f"{what} is sparse; give it dense, .toarray()")
    convert: Callable[[], Any] | None = getattr(value, "to_numpy", None)  # pandas, and what is like it
    if is_a(value, "pyarrow.lib.Array"):
        convert = partial(value.to_numpy, zero_copy_only=False)
    try:
        found: Array = np.asarray(convert() if convert is not None else value)
        if found.dtype.kind == "O" and found.ndim == 1 and found.size and hasattr(found[0], "__len__"):
            found = np.asarray(found.tolist())  # a column of lists or arrays, as a data frame holds them
    except ValueError:
        raise UsageError(f"{what} has rows of different lengths; pad them to one") from None
    except TypeError as error:
        raise UsageError(f"{what} = {described(value)}: {error}; give an array or a tensor") from None
    return found


def _kind(array: Array) -> str:
    if array.dtype.kind == "O" and array.size:
        values: list[Any] = array.reshape(-1).tolist()
        odd = [v for v in values if not isinstance(v, int | float | np.number | np.bool_)]
        if not odd and all(type(v) is not int or abs(v) < 2**63 for v in values):
            return "numbers of several types, which .astype('float32') makes one"
        first = odd[0] if odd else values[0]
        return TEXT if isinstance(first, str) else f"objects, such as {described(first)}"
    return {"U": TEXT, "S": TEXT, "M": "dates", "m": "times"}.get(array.dtype.kind, str(array.dtype))
