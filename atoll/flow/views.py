"""Ops that give the same elements in another shape, some of them, or several tensors as one."""

from __future__ import annotations

from atoll.flow.call import Call, Result
from atoll.flow.shapes import joined, permuted, repeated, reshaped, selected, sliced, stacked, wrapped
from atoll.flow.value import Value, blend, pointwise, raw


def reshape(call: Call) -> Value:
    """The same elements in another shape."""
    if call.overload == "dtype":  # view as other bits
        return blend(call.values, call.shape) or raw(call.shape, "it reads other bits as numbers")
    return reshaped(call.values[0], call.shape)


def broadcast(call: Call) -> Value:
    """The first argument, broadcast."""
    return pointwise(call.values[:1], call.shape)


def broadcast_all(call: Call) -> Result:
    """Each argument, broadcast to one shape."""
    return tuple(pointwise([v], shape) for v, shape in zip(call.values, call.shapes, strict=True))


def transpose(call: Call) -> Value:
    """Two dims swapped, or all reversed."""
    value = call.values[0]
    n = len(value.shape)
    order = list(range(n))
    if call.name in ("t", "numpy_T"):
        order.reverse()
    elif call.name in ("mT", "adjoint"):
        order[-2:] = [n - 1, n - 2]
    else:
        names = [name for name in call.given if name != "self"][:2]
        one, other = (wrapped(call.number(name), n) for name in names)
        order[one], order[other] = order[other], order[one]
    return permuted(value, order, call.shape)


def permute(call: Call) -> Value:
    """Dims in another order."""
    value = call.values[0]
    return permuted(value, call.dims("dims", len(value.shape)), call.shape)


def movedim(call: Call) -> Value:
    """Some dims elsewhere, the others in order."""
    value = call.values[0]
    n = len(value.shape)
    source, target = call.dims("source", n), call.dims("destination", n)
    places = dict(zip(target, source, strict=True))
    rest = iter(d for d in range(n) if d not in source)
    return permuted(value, [places[at] if at in places else next(rest) for at in range(n)], call.shape)


def slice_(call: Call) -> Value:
    """Some entries of a dim."""
    value = call.values[0]
    dim = wrapped(call.number("dim"), len(value.shape))
    start, step = call.given.get("start") or 0, call.given.get("step") or 1
    if type(start) is not int or type(step) is not int:
        raise ValueError(f"a slice from {start!r} in steps of {step!r}")
    size = value.shape[dim]
    begin = min(max(start + size if start < 0 else start, 0), size)
    return sliced(value, dim, begin, call.shape[dim], call.shape, step)


def select(call: Call) -> Value:
    """Return the value of a single entry of a dim."""
    value = call.values[0]
    return selected(value, wrapped(call.number("dim"), len(value.shape)), call.shape)


def split(call: Call) -> Result:
    """A dim in pieces."""
    value = call.values[0]
    dim, at, found = wrapped(call.number("dim"), len(value.shape)), 0, []
    for shape in call.shapes:
        found.append(sliced(value, dim, at, shape[dim], shape))
        at += shape[dim]
    return tuple(found)


def unbind(call: Call) -> Result:
    """Every entry of a dim."""
    value = call.values[0]
    dim = wrapped(call.number("dim"), len(value.shape))
    return tuple(selected(value, dim, shape) for shape in call.shapes)


def cat(call: Call) -> Value:
    """Tensors one after another along a dim."""
    return joined(call.values, wrapped(call.number("dim"), len(call.shape)), call.shape)


def stack(call: Call) -> Value:
    """Tensors along a new dim."""
    return stacked(call.values, wrapped(call.number("dim"), len(call.shape)), call.shape)


def repeat(call: Call) -> Value:
    """A tensor several times along its dims."""
    times = call.given.get("repeats", call.given.get("dims"))
    if not isinstance(times, tuple):
        raise ValueError(f"repeats {times!r}")
    return repeated(call.values[0], times, call.shape)
