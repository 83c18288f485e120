"""Ops along dims: reductions, softmax, sorting, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from atoll.flow.call import ACROSS, Call, Family, Result
from atoll.flow.elementwise import elementwise
from atoll.flow.shapes import joined, wrapped
from atoll.flow.value import Kind, Shape, Value, Vary, broken, plain, raw, rows


def _kept_along(value: Value, dims: Sequence[int], shape: Shape, why: str = ACROSS) -> Value:
    """An op that works within each line along ``dims``, perhaps by place, and keeps other dims."""
    if value.kind is Kind.RAW:
        return replace(value, shape=shape)
    if value.plain:
        varies = [Vary.PLACED if at in dims else v for at, v in enumerate(value.varies)]
        return plain(shape, value.kind, varies, value.why)
    if value.kind is Kind.ROWS:
        inside = value.dim in dims or shape[value.dim] != value.shape[value.dim]
        return raw(shape, why) if inside else replace(value, shape=shape)
    return raw(shape, why)


def softmax(call: Call) -> Value:
    """As ``along``; of pairs each row among its own."""
    value = call.values[0]
    if value.kind is Kind.PAIRS and len(call.values) == 1:
        return replace(value, shape=call.shape)
    return _kept_along(value, call.dims("dim", len(value.shape)), call.shape)


def along(argument: str = "dim", reach: int = 0) -> Family:
    """Works along the dims of ``argument``, or along the last ``reach`` ones."""

    def family(call: Call) -> Result:
        value = call.values[0]
        ndim = len(value.shape)
        dims = range(ndim - reach, ndim) if reach else call.dims(argument, ndim)
        if (found := broken(call.values[1:], call.shape)) is not None:
            return found
        if any(not v.plain for v in call.values[1:]):
            return raw(call.shape, ACROSS)
        made = tuple(_kept_along(value, dims, shape) for shape in call.shapes)
        return made[0] if len(made) == 1 else made

    return family


def differences(call: Call) -> Value:
    """``diff``: of neighbours along a dim, after what is put before and behind them."""
    value = call.value("self")
    dim = wrapped(call.number("dim"), len(value.shape))
    ends = [call.given.get("prepend"), value, call.given.get("append")]
    parts = [v for v in ends if isinstance(v, Value)]
    longer = (*value.shape[:dim], sum(v.shape[dim] for v in parts), *value.shape[dim + 1 :])
    return _kept_along(joined(parts, dim, longer), (dim,), call.shape)


def padded(call: Call) -> Value:
    """More entries at the ends of the last dims."""
    pad = call.given.get("pad") or call.given.get("padding")
    if not isinstance(pad, tuple):
        raise ValueError(f"pad {pad!r}")
    value = call.values[0]
    ndim = len(value.shape)
    dims = [ndim - 1 - at // 2 for at, n in enumerate(pad) if n != 0]
    return _kept_along(value, dims, call.shape, "it pads the micro-batch")


def reduced(
    value: Value, dims: Sequence[int], keep: bool, shape: Shape, alike: bool, picks: bool = False
) -> Value:
    """Over ``dims``; ``alike``: a sum or mean, in which every entry counts the same; ``picks``: an entry, or
    where it is."""
    if value.kind is Kind.RAW:
        return replace(value, shape=shape)
    if value.plain:
        varies = [v for at, v in enumerate(value.varies) if keep or at not in dims]
        return plain(shape, value.kind, varies, value.why)
    if value.kind is Kind.PAIRS:
        if set(dims) == {0, 1}:
            return plain(shape, Kind.MEAN, why=value.why) if alike else raw(shape, ACROSS)
        return raw(shape, ACROSS) if picks else rows(value, shape, (1 - dims[0]) if keep else 0)
    if value.dim in dims:
        return plain(shape, Kind.MEAN, why=value.why) if alike else raw(shape, ACROSS)
    dim = value.dim if keep else value.dim - sum(1 for d in dims if d < value.dim)
    return replace(value, shape=shape, dim=dim)


def reduction(*, alike: bool, picks: bool = False) -> Family:
    """A family of reductions; ``alike`` and ``picks`` as of ``reduced``."""

    def family(call: Call) -> Result:
        value = call.values[0]
        if len(call.values) > 1:  # max(a, b)
            return elementwise(call)
        dims = call.dims("dim", len(value.shape))
        keep = bool(call.given.get("keepdim"))
        made = tuple(reduced(value, dims, keep, shape, alike, picks) for shape in call.shapes)
        return made[0] if len(made) == 1 else made

    return family


def norm(call: Call) -> Result:
    """A norm whose power is 1 or 2 adds all up; one of infinity picks the largest."""
    power = call.given.get("ord", call.given.get("p"))
    return reduction(alike=power in (1, 2, None))(call)
