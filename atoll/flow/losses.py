"""Losses with their reduction, and similarities."""

from __future__ import annotations

from dataclasses import replace

from atoll.flow.call import Call, Family, Result
from atoll.flow.elementwise import elementwise
from atoll.flow.reductions import reduced
from atoll.flow.shapes import wrapped
from atoll.flow.value import COUNTING, Kind, Shape, Value, blend, broken, plain, pointwise, raw, rows

MEAN, SUM = 1, 2  # torch's numbers for reductions


def loss_of_each(each: Family) -> Family:
    """``each`` of every element or row, then the reduction that the op names."""

    def family(call: Call) -> Result:
        how = call.given.get("reduction")
        if how == 0:
            return each(call)
        found = each(replace(call, shapes=(_unreduced(call, each),)))
        if how not in (MEAN, SUM) or isinstance(found, tuple):
            return raw(call.shape, "its reduction is neither a sum nor a mean")
        return reduced(found, range(len(found.shape)), False, call.shape, alike=True)

    return family


def _unreduced(call: Call, each: Family) -> Shape:
    if each is elementwise:
        ndim = max((len(v.shape) for v in call.values), default=0)
        sizes = [[v.shape[at] for v in call.values if len(v.shape) >= -at] for at in range(-ndim, 0)]
        return tuple(max(each_dim) for each_dim in sizes)
    return call.values[0].shape[:1]


def each_row(call: Call) -> Value:
    """A loss of logits and target with samples along the first dim of both; weights of classes are plain."""
    if (found := broken(call.values, call.shape)) is not None:
        return found
    if (found := blend(call.values, call.shape)) is not None:
        return found
    logits, target, weight = call.value("self"), call.value("target"), call.given.get("weight")
    if logits.kind is Kind.PAIRS and target.pattern == COUNTING and target.shape == logits.shape[:1]:
        return rows(logits, call.shape, 0)  # which of the others is its own
    lines = [_leading(v) for v in (logits, target)]
    weighed = isinstance(weight, Value) and not weight.plain
    if len(logits.shape) < 2 or weighed or None in lines:
        return raw(call.shape, "its samples do not lie along the first dim of logits and target")
    found = pointwise([v for v in lines if v is not None], call.shape[:1])
    return replace(found, shape=call.shape)


def _leading(value: Value) -> Value | None:
    """``value`` with one entry for each index of its first dim; None where samples lie elsewhere."""
    if value.plain:
        return plain(value.shape[:1], value.kind, value.varies[:1], value.why)
    return rows(value, value.shape[:1], 0) if value.kind is Kind.ROWS and value.dim == 0 else None


def similarity(call: Call) -> Value:
    """``cosine_similarity``: elementwise, then over ``dim``."""
    values = call.values
    ndim = max(len(v.shape) for v in values)
    dim = wrapped(call.given.get("dim", -1), ndim)
    size = max(v.shape[dim - ndim] for v in values if len(v.shape) >= ndim - dim)
    shape = (*call.shape[:dim], size, *call.shape[dim:])
    return reduced(pointwise(values, shape), (dim,), False, call.shape, alike=True)
