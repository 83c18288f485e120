"""Draws cases: arguments that fit together, and then some that do not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from atoll.opdag import DTYPE_BYTES, TorchLiteral
from atoll.ops import ALLOWED, GETITEM
from atoll.signatures import ENUMERATIONS, TEXTS, Parameter, parameters
from tests.fuzz.case import Case, Tensorlike
from tests.fuzz.recipes import RECIPES, SIZES, Draw

TARGETS = tuple(sorted(ALLOWED - {GETITEM}))
HOSTILE_INTS = (-1, 0, 1, 2, 3, 7, 64, -7, 10**6, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63))
HOSTILE_FLOATS = (0.0, -1.0, 1e-300, 1e300, 2.5, float("inf"), float("-inf"), float("nan"), 1e9)
ODD_DTYPES = (
    "float64",
    "bfloat16",
    "float16",
    "int64",
    "int32",
    "uint8",
    "int8",
    "bool",
    "complex64",
    "int16",
)
HONEST_SHARE = 0.45


def targets(names: Sequence[str]) -> tuple[str, ...]:
    """All ops, or those whose name contains one of ``names``."""
    return TARGETS if not names else tuple(t for t in TARGETS if any(name in t for name in names))


def case(seed: int, target: str, number: int) -> Case:
    """The ``number``-th case of an op under ``seed``."""
    rng = random.Random(f"{seed} {target} {number}")
    draw = Draw(rng)
    given = _fitting(draw, target)
    if not draw.maybe(HONEST_SHARE):
        for _ in range(rng.choice((1, 1, 2, 3))):
            given = _spoilt(draw, target, given)
    return Case(target, given, rng.randrange(2**31), at_start=draw.maybe(0.2))


def _fitting(draw: Draw, target: str) -> dict[str, Any]:
    _, name, overload = target.split(".")
    declared = parameters(target)
    found: dict[str, Any] = {}
    for key in (f"{name}:{overload}", f"{name.rstrip('_')}:{overload}", name, name.removesuffix("_")):
        if key in RECIPES:
            found = RECIPES[key](draw)
            break
    shape = draw.sizes(0, 3) if draw.maybe(0.9) else (*draw.sizes(0, 2), 0)
    dtype = draw.one(("float32", "float32", "float32", *ODD_DTYPES))
    given: dict[str, Any] = {}
    for parameter in declared:
        value = found.get(parameter.name)
        if parameter.name in found and not (parameter.kind == "number" and isinstance(value, Tensorlike)):
            given[parameter.name] = value
        elif parameter.required or draw.maybe(0.3):
            given[parameter.name] = _drawn(draw, parameter, shape, dtype)
    if name.endswith("_") and not name.startswith("__"):
        # Autograd refuses a write to a leaf's own view; the kernel is what is tried here.
        first = declared[0].name
        if isinstance(given.get(first), Tensorlike) and draw.maybe(0.8):
            given[first] = replace(given[first], grad=False)
    return given


def _drawn(draw: Draw, parameter: Parameter, shape: tuple[int, ...], dtype: str) -> Any:
    if parameter.optional and draw.maybe():
        return None
    if parameter.is_list:
        length = parameter.length or draw.rng.randint(1, 3)
        if parameter.kind == "int" and parameter.name in ("dim", "dims"):
            return tuple(draw.rng.sample(range(len(shape)), k=min(len(shape), length)))
        return tuple(_item(draw, parameter, shape, dtype) for _ in range(length))
    return _item(draw, parameter, shape, dtype)


def _item(draw: Draw, parameter: Parameter, shape: tuple[int, ...], dtype: str) -> Any:
    name = parameter.name
    match parameter.kind:
        case "Tensor":
            return _tensor(draw, shape, dtype)
        case "int":
            if name in ENUMERATIONS:
                return draw.one(sorted(ENUMERATIONS[name]))
            if "dim" in name or name.startswith("axis"):
                return draw.dim(shape)
            return draw.one((0, 1, 1, 2, 2, 3, 4, 5))
        case "float":
            return draw.one((0.0, 0.5, 1.0, 1e-5, 0.25))
        case "number":
            return draw.one((0, 1, 2, 3, 0.5, 1.0, 2.0, -1.0, True))
        case "bool":
            return draw.maybe()
        case "str":
            return draw.one(sorted(TEXTS.get(name, {"ij,jk->ik"})) or ["x"])
        case "ScalarType":
            return TorchLiteral("dtype", draw.one(("float32", "float32", "float64", *ODD_DTYPES)))
        case "Layout":
            return TorchLiteral("layout", "strided")
        case "MemoryFormat":
            return TorchLiteral(
                "memory_format", draw.one(("contiguous_format", "preserve_format", "channels_last"))
            )
        case "Device":
            return TorchLiteral("device", "")
        case _:
            return None


def _tensor(draw: Draw, shape: tuple[int, ...], dtype: str) -> Tensorlike:
    made = shape
    if draw.maybe(0.15) and shape:  # to be broadcast
        at = draw.rng.randrange(len(shape))
        made = shape[at:] if draw.maybe() else (*shape[:at], 1, *shape[at + 1 :])
    return Tensorlike(
        made, dtype, draw.one(("normal", "normal", "unit", "small", "extreme")), grad=draw.maybe(0.8)
    )


# ---------------------------------------------------------------- hostile changes


def _spoilt(draw: Draw, target: str, given: dict[str, Any]) -> dict[str, Any]:
    """One argument changed to what no honest capture has, or has seldom."""
    declared = {p.name: p for p in parameters(target)}
    if not declared:
        return given
    name = draw.one(list(given) or list(declared))
    if draw.maybe(0.1):
        name = draw.one(list(declared))
    return {**given, name: _changed(draw, declared[name], given.get(name))}


def _changed(draw: Draw, parameter: Parameter, value: Any) -> Any:
    if isinstance(value, Tensorlike):
        return _other_tensor(draw, value)
    if isinstance(value, tuple) and value and draw.maybe(0.8):
        at = draw.rng.randrange(len(value))
        changed = list(value)
        match draw.one(("change", "change", "drop", "double")):
            case "change":
                changed[at] = _changed(draw, parameter, value[at])
            case "drop":
                del changed[at]
            case "double":
                changed.insert(at, value[at])
        return tuple(changed)
    match parameter.kind:
        case "int":
            return draw.one(HOSTILE_INTS)
        case "float":
            return draw.one((*HOSTILE_FLOATS, *HOSTILE_INTS))
        case "number":
            return draw.one((*HOSTILE_FLOATS, *HOSTILE_INTS, True))
        case "bool":
            return draw.one((True, False, 1))
        case "Tensor" if value is None:
            return _tensor(draw, draw.sizes(0, 3), "float32")
        case _:
            return draw.one((None, 0, 1.5, "x", TorchLiteral("dtype", draw.one(sorted(DTYPE_BYTES)))))


def _other_tensor(draw: Draw, value: Tensorlike) -> Tensorlike:
    shape = list(value.shape)
    match draw.one(("fill", "fill", "size", "size", "dims", "dtype", "new", "bound")):
        case "fill":
            return replace(value, fill="extreme")
        case "bound":
            return replace(value, bound=max(1, value.bound * draw.one((2, 1000))))
        case "size" if shape:
            shape[draw.rng.randrange(len(shape))] = draw.one((0, 1, *SIZES, 33, 64))
            return replace(value, shape=tuple(shape))
        case "dims":
            return replace(value, shape=tuple(shape[1:]) if draw.maybe() else (draw.size(), *shape))
        case "dtype":
            return replace(value, dtype=draw.one(ODD_DTYPES))
        case _:
            return replace(value, shape=draw.sizes(0, 4))
