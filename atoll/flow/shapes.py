"""Values in other shapes: views, slices, joins. Dims are counted from 0, as torch's are after wrapping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice
from math import prod

from atoll.flow.value import (
    COUNTING,
    Kind,
    Shape,
    Value,
    Vary,
    broken,
    first_why,
    plain,
    raw,
    rows,
    same_samples,
)

BY_PLACE = "it takes samples by their place in the micro-batch"
LOST = "it folds samples into another dim"
MAX_PARTS = 64  # joined with itself over and over, a dim of samples would have any number


def wrapped(dim: int, ndim: int) -> int:
    """``dim`` from 0; ValueError for none of ``ndim``."""
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise ValueError(f"dim {dim} of {ndim}")
    return dim % max(ndim, 1)


def reshaped(value: Value, shape: Shape) -> Value:
    """The same elements in the same order."""
    if value.shape == shape or value.kind is Kind.RAW:
        return replace(value, shape=shape)
    if value.plain:
        return _plain_reshaped(value, shape)
    if value.kind is Kind.PAIRS or not prod(shape):
        return raw(shape, LOST)
    return _rows_reshaped(value, shape)


def _rows_reshaped(value: Value, shape: Shape) -> Value:
    """Return the value with the samples' new position in the flat index, if that is within one dim."""
    ahead = prod(value.shape[: value.dim])
    if len(value.parts) == 1:
        ahead *= value.before
        for dim, size in enumerate(shape):
            over = prod(shape[:dim])
            if ahead % over == 0 and size > 0 and size % (ahead // over * value.batch) == 0:
                return replace(value, shape=shape, dim=dim, before=ahead // over, parts=((size, True),))
        return raw(shape, LOST)
    for dim, size in enumerate(shape):
        lengths = [n * size for n, _ in value.parts]
        whole = value.shape[value.dim]
        if prod(shape[:dim]) != ahead or size == 1 or any(n % whole for n in lengths):
            continue
        parts = tuple((n // whole, real) for n, (_, real) in zip(lengths, value.parts, strict=True))
        if not any(real and n % value.batch for n, real in parts):
            return replace(value, shape=shape, dim=dim, parts=parts)
    return raw(shape, LOST)


def _plain_reshaped(value: Value, shape: Shape) -> Value:
    """Dims that are kept keep how they vary; dims that are merged or parted share the most."""
    varies = [Vary.PLACED] * len(shape)
    for old, new in _groups(value.shape, shape):
        most = max((value.varies[at] for at in old), default=Vary.SAME)
        for at in new:
            varies[at] = most
    counts = value.pattern == COUNTING and max(shape, default=1) == prod(shape)
    return replace(plain(shape, value.kind, varies, value.why), pattern=COUNTING if counts else "")


def _groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """The finest runs of dims that hold equally many elements on both sides; dims of size 1 in none."""
    if prod(old) != prod(new) or not prod(old):
        return [(list(range(len(old))), list(range(len(new))))]
    left = [at for at, n in enumerate(old) if n != 1]
    right = [at for at, n in enumerate(new) if n != 1]
    ends = [
        list(accumulate((side[at] for at in dims), int.__mul__)) for side, dims in ((old, left), (new, right))
    ]
    found, begun = [], (0, 0)
    for cut in sorted(set(ends[0]) & set(ends[1])):
        stop = (ends[0].index(cut) + 1, ends[1].index(cut) + 1)
        found.append((left[begun[0] : stop[0]], right[begun[1] : stop[1]]))
        begun = stop
    return found


def permuted(value: Value, order: Sequence[int], shape: Shape) -> Value:
    """Dim ``at`` of the result is dim ``order[at]`` of ``value``."""
    if sorted(order) != list(range(len(value.shape))):
        raise ValueError(f"order {order}")
    if value.plain:
        kept = value.pattern if len(order) < 3 else ""
        return replace(plain(shape, value.kind, [value.varies[d] for d in order], value.why), pattern=kept)
    if value.kind is Kind.ROWS:
        return replace(value, shape=shape, dim=list(order).index(value.dim))
    return replace(value, shape=shape)


def sliced(value: Value, dim: int, start: int, length: int, shape: Shape, step: int = 1) -> Value:
    """``length`` entries of ``dim`` from ``start``."""
    size = value.shape[dim]
    if length == size and step == 1:
        return replace(value, shape=shape)
    if value.plain:
        return plain(shape, value.kind, value.varies, value.why)
    if value.kind is not Kind.ROWS:
        return raw(shape, value.why if value.kind is Kind.RAW else BY_PLACE)
    if dim != value.dim:
        return replace(value, shape=shape)
    return _part(value, start, length, shape, step)


def _part(value: Value, start: int, length: int, shape: Shape, step: int) -> Value:
    """All the rows of one run of samples, or some that are of no sample."""
    at, stop = 0, start + (length - 1) * step + 1
    for n, real in value.parts:
        if len(value.parts) > 1 and at <= start and stop <= at + n:
            if not real:
                return plain(shape, Kind.MEAN, Vary.PLACED, value.why)
            if (start, length, step) == (at, n, 1):
                return replace(value, shape=shape, parts=((n, True),))
        at += n
    return raw(shape, BY_PLACE)


def selected(value: Value, dim: int, shape: Shape) -> Value:
    """Return the value of a single entry of ``dim``, which is removed."""
    if value.plain:
        return plain(shape, value.kind, [v for at, v in enumerate(value.varies) if at != dim], value.why)
    if value.kind is Kind.ROWS and dim != value.dim:
        return replace(value, shape=shape, dim=value.dim - (dim < value.dim))
    return raw(shape, value.why if value.kind is Kind.RAW else BY_PLACE)


def written_at(base: Value, part: Value, dim: int, removed: bool) -> Value:
    """``base`` after some entries of ``dim`` became ``part``; ``removed``: part has no such dim."""
    if (found := broken((base, part), base.shape)) is not None:
        return found
    why = first_why((base, part))
    if base.plain and part.plain:
        return plain(base.shape, max(base.kind, part.kind), Vary.PLACED, why)
    place = part.dim + (removed and part.dim >= dim) if part.kind is Kind.ROWS else base.dim
    sides = [base, part]
    if Kind.PAIRS in (base.kind, part.kind) or place == dim:
        return raw(base.shape, "it writes samples by their place in the micro-batch")
    if base.kind is Kind.ROWS and part.kind is Kind.ROWS:
        same = same_samples(base, part) and base.dim == place
        return rows(base, base.shape, place, why) if same else raw(base.shape, LOST)
    other = next(v for v in sides if v.plain)
    here = place if other is base else place - (removed and place > dim)
    if other.varies and other.varies[here] is not Vary.SAME:
        return raw(base.shape, "it writes samples by their place in the micro-batch")
    return rows(next(v for v in sides if not v.plain), base.shape, place, why)


def joined(values: Sequence[Value], dim: int, shape: Shape) -> Value:
    """``values`` one after another along ``dim``."""
    if (found := broken(values, shape)) is not None:
        return found
    values = [v for v in values if len(v.shape) == len(shape)]  # cat passes empty tensors of one dim over
    if all(v.plain for v in values):
        varies = [max(v.varies[at] for v in values) for at in range(len(shape))]
        varies[dim] = Vary.PLACED
        return plain(shape, max(v.kind for v in values), varies, first_why(values))
    first = next(v for v in values if not v.plain)
    if any(v.kind is Kind.PAIRS for v in values):
        return raw(shape, LOST)
    if dim != first.dim:
        return _beside(values, first, shape)
    fits = [v for v in values if v.kind is Kind.ROWS]
    if any(v.dim != dim or v.before != 1 or v.batch != first.batch for v in fits):
        return raw(shape, LOST)
    each = (v.parts if v.kind is Kind.ROWS else ((v.shape[dim], False),) for v in values)
    parts = tuple(islice(chain.from_iterable(each), MAX_PARTS + 1))
    if len(parts) > MAX_PARTS:
        return raw(shape, f"it joins more than {MAX_PARTS} runs of samples")
    return replace(rows(first, shape, dim, first_why(values)), parts=parts)


def _beside(values: Sequence[Value], first: Value, shape: Shape) -> Value:
    """Joined along another dim than the samples'."""
    why = first_why(values)
    for v in values:
        if not v.plain:
            if v.dim != first.dim or not same_samples(v, first):
                return raw(shape, "it sets samples beside others than their own")
        elif v.varies[first.dim] is not Vary.SAME:
            if v.varies[first.dim] is Vary.PLACED:
                return raw(shape, "it weighs samples by their place in the micro-batch")
            why = why or "it weighs samples by chance"
    return rows(first, shape, first.dim, why)


def stacked(values: Sequence[Value], dim: int, shape: Shape) -> Value:
    """``values`` along a new ``dim``."""
    one = (*shape[:dim], 1, *shape[dim + 1 :])
    return joined([_unsqueezed(v, dim, one) for v in values], dim, shape)


def _unsqueezed(value: Value, dim: int, shape: Shape) -> Value:
    if value.plain:
        return plain(shape, value.kind, (*value.varies[:dim], Vary.SAME, *value.varies[dim:]), value.why)
    if value.kind is Kind.PAIRS:
        return raw(shape, LOST)
    return replace(value, shape=shape, dim=value.dim + (dim <= value.dim))


def repeated(value: Value, times: Sequence[int], shape: Shape) -> Value:
    """``repeat`` and ``tile``: ``times`` by dim of the result."""
    new = len(shape) - len(value.shape)
    full = [1] * (len(shape) - len(times)) + list(times)
    if value.plain:
        varies = [Vary.SAME] * new + list(value.varies)
        return plain(shape, value.kind, varies, value.why)
    if value.kind is Kind.ROWS and full[new + value.dim] == 1:
        return replace(value, shape=shape, dim=new + value.dim)
    return raw(shape, value.why if value.kind is Kind.RAW else "it repeats samples")
