"""Lookups by an index, and writes at one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from atoll.flow.call import ACROSS, Call, Family
from atoll.flow.shapes import wrapped, written_at
from atoll.flow.value import (
    COUNTING,
    Kind,
    Shape,
    Value,
    Vary,
    blend,
    broken,
    first_why,
    plain,
    pointwise,
    raw,
    rows,
    same_samples,
)


def embedding(call: Call) -> Value:
    """Rows of a table at indices."""
    return _looked_up(call.value("weight"), 0, call.value("indices"), call.shape)


def _looked_up(table: Value, dim: int, index: Value, shape: Shape) -> Value:
    """``table``'s entries of ``dim`` at ``index``, whose dims take the place of ``dim``."""
    if (found := broken((table, index), shape)) is not None:
        return found
    why = first_why((table, index))
    if not table.plain:
        if not index.plain or table.kind is Kind.PAIRS or table.dim == dim:
            return raw(shape, "it picks samples by an index")
        more = len(index.shape) - 1 if table.dim > dim else 0
        return rows(table, shape, table.dim + more, why)
    if index.plain:
        found_by = [min(vary, table.varies[dim]) for vary in index.varies]
        varies = (*table.varies[:dim], *found_by, *table.varies[dim + 1 :])
        return plain(shape, max(table.kind, index.kind), varies, why)
    if index.kind is Kind.PAIRS:
        return raw(shape, ACROSS)
    return rows(index, shape, dim + index.dim, why)


def index(call: Call) -> Value:
    """``self[indices]``; None entries stand for whole dims."""
    value, indices = call.value("self"), call.given["indices"]
    used = [(at, v) for at, v in enumerate(indices) if isinstance(v, Value)]
    tensors = [v for _, v in used]
    if (found := broken([value, *tensors], call.shape)) is not None:
        return found
    places = [at for at, _ in used]
    if not places or places != list(range(places[0], places[-1] + 1)):
        return blend([value, *tensors], call.shape) or raw(call.shape, "it picks samples by an index")
    joint = len(call.shape) - (len(value.shape) - len(used))
    inner = call.shape[places[0] : places[0] + joint]
    if all(v.plain for v in (value, *tensors)):
        return _plain_index(value, places, tensors, inner, call.shape)
    why = first_why([value, *tensors])
    own = value.kind is Kind.ROWS and value.dim == places[0] == 0
    if own and len(value.parts) == 1 and _counts_samples(tensors[0], value):
        # x[arange(batch), at]: each sample at its own place
        at = max(range(len(tensors[0].shape)), key=tensors[0].shape.__getitem__)
        tensors[0], value = rows(value, tensors[0].shape, at), plain(value.shape, Kind.MEAN)
    one = pointwise(tensors, inner)
    if one.kind is Kind.RAW:
        return replace(one, shape=call.shape)
    if value.plain and one.kind is Kind.ROWS:
        return rows(one, call.shape, places[0] + one.dim, why or one.why)
    if value.kind is Kind.ROWS and one.plain and value.dim not in places:
        dim = value.dim + (joint - len(used) if value.dim > places[0] else 0)
        return rows(value, call.shape, dim, why)
    return raw(call.shape, "it picks samples by an index")


def _plain_index(
    value: Value, places: Sequence[int], tensors: Sequence[Value], inner: Shape, shape: Shape
) -> Value:
    """Plain values at plain indices: different only where both an index and what it looks up are."""
    varies = list(value.varies[: places[0]])
    for at in range(-len(inner), 0):
        found_by = (min(v.along(at), value.varies[p]) for p, v in zip(places, tensors, strict=True))
        varies.append(max(found_by))
    varies += value.varies[places[-1] + 1 :]
    return plain(shape, max(v.kind for v in (value, *tensors)), varies, first_why([value, *tensors]))


def _counts_samples(index: Value, of: Value) -> bool:
    return index.pattern == COUNTING and prod(index.shape) == of.shape[0] and of.before == 1


def index_select(call: Call) -> Value:
    """Entries of one dim at an index."""
    value = call.value("self")
    return _looked_up(value, wrapped(call.number("dim"), len(value.shape)), call.value("index"), call.shape)


def gather(call: Call) -> Value:
    """Element by element but along ``dim``."""
    value, index = call.value("self"), call.given.get("index", call.given.get("indices"))
    dim = call.given.get("dim")
    if not isinstance(index, Value) or type(dim) is not int:
        return raw(call.shape, "it picks samples by an index")
    return _scattered_along(call, wrapped(dim, len(value.shape)), [value, index])


def _scattered_along(call: Call, dim: int, values: list[Value]) -> Value:
    if any(len(v.shape) != len(call.shape) for v in values):
        return blend(values, call.shape) or raw(call.shape, "it picks samples by an index")
    if any(not v.plain and (v.kind is Kind.PAIRS or v.dim == dim) for v in values):
        return broken(values, call.shape) or raw(call.shape, "it picks samples by an index")
    spread = [v for v in values if v.kind is Kind.ROWS]
    if any(v.shape[v.dim] != call.shape[v.dim] for v in spread):
        return raw(call.shape, "it picks samples by an index")
    lines = [_line(v, dim) for v in values]
    found = pointwise(lines, (*call.shape[:dim], 1, *call.shape[dim + 1 :]))
    if found.plain:
        return plain(call.shape, found.kind, why=found.why)
    return replace(found, shape=call.shape)


def _line(value: Value, dim: int) -> Value:
    shape = (*value.shape[:dim], 1, *value.shape[dim + 1 :])
    return plain(shape, value.kind, value.varies, value.why) if value.plain else replace(value, shape=shape)


def scatter(call: Call) -> Value:
    """Along another dim than the samples' each sample by itself; along theirs only a sum over all."""
    value, index = call.value("self"), call.value("index")
    source = call.given.get("src")
    values = [value, index, *([source] if isinstance(source, Value) else [])]
    dim = wrapped(call.number("dim"), len(value.shape))
    if all(v.plain for v in values):
        return plain(call.shape, max(v.kind for v in values), why=first_why(values))
    if broken(values, call.shape) is None and index.kind is Kind.ROWS and index.dim == dim:
        adds = call.name == "scatter_add" or call.given.get("reduce") in ("add", "sum")
        return _added(call, value, index, source if isinstance(source, Value) else None, dim, adds)
    # An index shorter than what it writes into leaves the last rows as they were.
    whole = len(index.shape) == len(call.shape) and all(
        n == m for at, (n, m) in enumerate(zip(index.shape, call.shape, strict=True)) if at != dim
    )
    return _scattered_along(call, dim, values) if whole else raw(call.shape, "it picks samples by an index")


def index_add(call: Call) -> Value:
    """Sums of entries, each added where its index says."""
    value, index, source = call.value("self"), call.value("index"), call.value("source")
    dim = wrapped(call.number("dim"), len(value.shape))
    if broken([value, index, source], call.shape) is None and index.kind is Kind.ROWS:
        return _added(call, value, index, source, dim, True)
    return blend([value, index, source], call.shape) or raw(call.shape, "it picks samples by an index")


def _added(call: Call, into: Value, index: Value, source: Value | None, dim: int, adds: bool) -> Value:
    """Sums of all samples, each at the place that its index says."""
    fits = source is None or source.plain or (source.dim == dim and same_samples(source, index))
    weighed = source is not None and source.plain and source.varies[dim] is not Vary.SAME
    if not adds or not into.plain or not fits or weighed:
        return raw(call.shape, "it picks samples by an index")
    return plain(call.shape, Kind.MEAN, why=first_why(call.values))


def one_hot(call: Call) -> Value:
    """A new last dim that tells classes."""
    value = call.value("self")
    if value.plain:
        return plain(call.shape, value.kind, (*value.varies, Vary.PLACED), value.why)
    return replace(value, shape=call.shape) if value.kind is not Kind.PAIRS else raw(call.shape, ACROSS)


def written_slice(removed: bool) -> Family:
    """``slice_scatter``, or with ``removed`` ``select_scatter``."""

    def family(call: Call) -> Value:
        value = call.value("self")
        return written_at(value, call.value("src"), wrapped(call.number("dim"), len(value.shape)), removed)

    return family
