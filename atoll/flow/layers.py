"""Layers that treat each sample by itself: convolutions, pools, norms, attention, recurrent ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from atoll.flow.call import ACROSS, Call, Family, Result
from atoll.flow.elementwise import loose
from atoll.flow.value import (
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


def trailing(reach: Callable[[Call], int]) -> Family:
    """Works within the last ``reach`` dims, every index before them alike; other arguments are weights."""

    def family(call: Call) -> Result:
        first, others = call.values[0], call.values[1:]
        if (found := broken(call.values, call.shape)) is not None:
            return found if len(call.shapes) == 1 else tuple(replace(found, shape=s) for s in call.shapes)
        made = tuple(_within(first, others, reach(call), shape) for shape in call.shapes)
        return made[0] if len(made) == 1 else made

    return family


def _within(first: Value, others: Sequence[Value], reach: int, shape: Shape) -> Value:
    found = blend([first, *others], shape)
    if found is not None:
        return found
    if first.kind is not Kind.ROWS or any(not v.plain for v in others) or first.placed >= -reach:
        return raw(shape, ACROSS)
    if shape[first.dim] != first.shape[first.dim]:
        return raw(shape, ACROSS)
    return replace(first, shape=shape, why=first_why([first, *others]))


def spatial(call: Call) -> int:
    """Channels and as many dims as a convolution's name says."""
    for n in (1, 2, 3):
        if f"{n}d" in call.name:
            return n + 1
    return len(call.value("weight").shape) - 1


def window(call: Call) -> int:
    """As many dims as a pooling op's name says."""
    return spatial(call) - 1


def normalised(call: Call) -> int:
    """The dims that a layer norm names."""
    return len(call.given["normalized_shape"])


def each_sample(call: Call) -> int:
    """All dims but the first."""
    return len(call.values[0].shape) - 1


def attention(call: Call) -> Value:
    """Return the value of attention within each sample; ``attn_mask`` is broadcast."""
    given = [call.given.get(name) for name in ("query", "key", "value", "attn_mask")]
    values = [v for v in given if isinstance(v, Value)]
    if (found := broken(values, call.shape)) is not None:
        return found
    key, value = call.value("key"), call.value("value")
    # Kernels take the key's length for the value's: beside it lie other samples.
    if key.shape[:-1] != value.shape[:-1] or any(not v.plain and v.placed >= -2 for v in values):
        return blend(values, call.shape) or raw(call.shape, ACROSS)
    # Beyond the last two dims all are broadcast like elements.
    flat = [_flattened(v) for v in values]
    found = pointwise(flat, (*call.shape[:-2], 1, 1))
    if found.plain:
        return plain(call.shape, found.kind, (*found.varies[:-2], Vary.PLACED, Vary.PLACED), found.why)
    found = replace(found, shape=call.shape)
    p = call.given.get("dropout_p")
    if p and (1.0 - p) * call.batch < call.least:
        return loose(found)
    return found


def _flattened(value: Value) -> Value:
    shape = (*value.shape[:-2], 1, 1)
    if value.plain:
        return plain(shape, value.kind, (*value.varies[:-2], Vary.SAME, Vary.SAME), value.why)
    return replace(value, shape=shape)


def recurrent(call: Call) -> Result:
    """lstm, gru and plain RNNs over padded batches: output, then the last states [layers, batch, ...]."""
    if (found := broken(call.values, call.shape)) is not None:
        return tuple(replace(found, shape=shape) for shape in call.shapes)
    if all(v.plain for v in call.values):
        return tuple(blend(call.values, shape) or raw(shape, ACROSS) for shape in call.shapes)
    value, hidden, weights = call.given.get("input"), call.given.get("hx"), call.given.get("params")
    at = 0 if call.given.get("batch_first") else 1
    states = hidden if isinstance(hidden, tuple) else (hidden,)
    fits = (
        call.overload == "input"
        and isinstance(value, Value)
        and isinstance(weights, tuple)
        and value.kind is Kind.ROWS
        and value.dim == at
        and len(value.shape) == 3
        and all(_begins(state, value) for state in states)
        and all(isinstance(v, Value) and v.plain for v in weights)
    )
    if not fits:
        return tuple(raw(shape, ACROSS) for shape in call.shapes)
    out = rows(call.value("input"), call.shape, at, first_why(call.values))
    p = call.given.get("dropout")
    if call.given.get("train") and p and (1.0 - p) * call.batch < call.least:
        out = loose(out)
    return (out, *(rows(out, shape, 1) for shape in call.shapes[1:]))


def _begins(state: object, value: Value) -> bool:
    """Return whether a first state [layers, batch, ...] is each sample's own, or the same for all."""
    if not isinstance(state, Value) or len(state.shape) != 3:
        return False
    if state.plain:
        return state.varies[1] is Vary.SAME
    return state.kind is Kind.ROWS and state.dim == 1 and same_samples(state, value)
