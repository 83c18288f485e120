"""Ops that work element by element, copy, draw at random or create."""

from __future__ import annotations

from dataclasses import replace

from atoll.flow.call import ACROSS, Call, Result
from atoll.flow.value import COUNTING, DIAGONAL, Kind, Value, Vary, blend, plain, pointwise, raw

CHANCE = "it draws at random for each sample"


def elementwise(call: Call) -> Result:
    """Elements of one place of each argument, broadcast."""
    found = [pointwise(call.values, shape) for shape in call.shapes]
    return found[0] if len(found) == 1 else tuple(found)


def same(call: Call) -> Value:
    """The first argument as it is."""
    value = call.values[0]
    return replace(value, shape=call.shape) if value.shape == call.shape else pointwise([value], call.shape)


def overwritten(call: Call) -> Value:
    """``copy_``, ``fill_``: of what was there before only the shape."""
    return pointwise(call.values[1:], call.shape)


def like(call: Call) -> Value:
    """Return the value of an op that depends on its argument's shape alone."""
    return plain(call.shape, Kind.CLEAN, Vary.SAME)


def drawn(call: Call) -> Value:
    """Drawn at random: of its shape alone, or of a tensor that bounds it."""
    if call.values and call.overload == "Tensor":  # bernoulli_(p), randint_like(high)
        return loose(pointwise(call.values, call.shape))
    return plain(call.shape, Kind.CLEAN, Vary.DRAWN)


def loose(value: Value) -> Value:
    """``value`` after chance weighed its samples."""
    if value.plain:
        drawn = [max(v, Vary.DRAWN) for v in value.varies]
        return plain(value.shape, value.kind, drawn, value.why)
    return replace(value, why=value.why or CHANCE)


def bernoulli(call: Call) -> Value:
    """Return the value of a draw by its argument's values, by ``p``'s, or by its shape alone."""
    if call.overload == "default":
        return random_(call)
    p = call.given.get("p")
    return (
        loose(pointwise([p], call.shape))
        if isinstance(p, Value)
        else plain(call.shape, Kind.CLEAN, Vary.DRAWN)
    )


def normal(call: Call) -> Value:
    """Return the value of a draw by tensors' means and deviations, or by its shape alone."""
    return random_(call) if "Tensor" in call.overload else plain(call.shape, Kind.CLEAN, Vary.DRAWN)


def random_(call: Call) -> Value:
    """Drawn at random, of figures that its argument holds."""
    return loose(pointwise(call.values, call.shape))


def dropout(call: Call) -> Result:
    """Leaves a sum of samples enough of them, or makes it loose."""
    value, p = same(call), call.given.get("p")
    if call.given.get("train") is False or p == 0:
        return value
    enough = isinstance(p, int | float) and 0.0 <= p < 1.0 and (1.0 - p) * call.batch >= call.least
    found = value if enough and not value.plain else loose(value)
    return found if len(call.shapes) == 1 else tuple(replace(found, shape=shape) for shape in call.shapes)


def created(call: Call) -> Value:
    """Filled with one literal."""
    return blend(call.values, call.shape, Vary.SAME) or raw(call.shape, ACROSS)


def eye(call: Call) -> Value:
    """The identity, which treats all pairs alike."""
    square = len(call.shape) == 2 and call.shape[0] == call.shape[1]
    return replace(plain(call.shape, Kind.CLEAN), pattern=DIAGONAL if square else "")


def arange(call: Call) -> Value:
    """A row of numbers; from 0 in steps of 1 it counts."""
    found = blend(call.values, call.shape) or raw(call.shape, ACROSS)
    counts = call.given.get("start", 0) == 0 and call.given.get("step", 1) == 1 and not call.values
    return replace(found, pattern=COUNTING) if counts else found
