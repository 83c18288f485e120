"""Products with sums: matrix products, linear layers and einsum, all as one contraction of labelled dims."""

from __future__ import annotations

import string
from collections.abc import Sequence

from atoll.flow.call import Call
from atoll.flow.value import (
    Kind,
    Shape,
    Value,
    Vary,
    blend,
    broken,
    first_why,
    pairs,
    plain,
    pointwise,
    raw,
    rows,
    same_samples,
)

MIXED = "it multiplies samples with others than their own"
_EQUATIONS = {"mm": "ab,bc->ac", "bmm": "nab,nbc->nac", "mv": "ab,b->a", "dot": "a,a->"}


def contraction(call: Call) -> Value:
    """The product of two operands, plus what addmm, baddbmm and linear add to it."""
    name = call.name
    if name == "einsum":
        return _einsum(call)
    if name in ("addmm", "baddbmm"):
        one, other = [call.given[n] for n in (("mat1", "mat2") if name == "addmm" else ("batch1", "batch2"))]
        product = contracted(_EQUATIONS[name[3:] if name == "addmm" else "bmm"], one, other, call.shape)
        return pointwise([call.value("self"), product], call.shape)
    if name == "linear":
        value, bias = call.value("input"), call.given.get("bias")
        letters = string.ascii_lowercase[: len(value.shape)]
        wide = "Z" if len(call.value("weight").shape) == 2 else ""
        product = contracted(
            f"{letters},{wide}{letters[-1]}->{letters[:-1]}{wide}", value, call.value("weight"), call.shape
        )
        return pointwise([product, bias], call.shape) if isinstance(bias, Value) else product
    one, other = call.values
    return contracted(_EQUATIONS.get(name) or _matmul(one.shape, other.shape), one, other, call.shape)


def _matmul(one: Shape, other: Shape) -> str:
    """The equation of a matmul: leading dims broadcast, vectors as one row or column."""
    left = "A" if len(one) == 1 else f"{_letters(len(one) - 2)}XA"
    right = "A" if len(other) == 1 else f"{_letters(len(other) - 2)}AY"
    lead = _letters(max(len(one), len(other)) - 2)
    return f"{left},{right}->{lead}{'X' if len(one) > 1 else ''}{'Y' if len(other) > 1 else ''}"


def _letters(count: int) -> str:
    """Return letters of ``count`` leading dims, aligned from the right."""
    return string.ascii_lowercase[:count][::-1]


def _einsum(call: Call) -> Value:
    equation, values = str(call.given["equation"]).replace(" ", ""), call.values
    if (found := broken(values, call.shape)) is not None:
        return found
    plain_ones = blend(values, call.shape)
    if plain_ones is not None:
        return plain_ones
    if len(values) != 2 or "->" not in equation or "." in equation:
        return raw(call.shape, "an einsum of samples is known for two operands with an explicit result alone")
    return contracted(equation, values[0], values[1], call.shape)


def contracted(equation: str, one: Value, other: Value, shape: Shape) -> Value:
    """``equation`` as einsum writes it, of two operands."""
    values = (one, other)
    if (found := broken(values, shape)) is not None:
        return found
    if (found := blend(values, shape)) is not None:
        return found
    inputs, out = equation.split("->")
    labels = inputs.split(",")
    fits = [*map(len, labels)] == [len(v.shape) for v in values]
    if not fits or any(len(set(text)) != len(text) for text in (*labels, out)):
        return raw(shape, MIXED)
    if any(v.kind is Kind.PAIRS for v in values):
        return raw(shape, MIXED)
    places = [text[v.dim] if v.kind is Kind.ROWS else "" for text, v in zip(labels, values, strict=True)]
    why = first_why(values)
    if all(places) and places[0] != places[1]:
        return _crossed(labels, places, out, values, shape)
    place = places[0] or places[1]
    first = one if places[0] else other
    second = other if first is one else one
    text = labels[1] if first is one else labels[0]
    if second.kind is Kind.ROWS:
        if not same_samples(one, other):
            return raw(shape, MIXED)
    elif place in text and second.varies[text.index(place)] is not Vary.SAME:
        chance = second.varies[text.index(place)] is Vary.DRAWN
        if not chance:
            return raw(shape, "it weighs samples by their place in the micro-batch")
        why = why or "it weighs samples by chance"
    if place not in out:
        return plain(shape, Kind.MEAN, why=why)
    return rows(first, shape, out.index(place), why)


def _crossed(
    labels: Sequence[str], places: Sequence[str], out: str, values: Sequence[Value], shape: Shape
) -> Value:
    """Samples along different dims of both: each of one with each of the other."""
    alone = places[0] not in labels[1] and places[1] not in labels[0]
    square = out in ("".join(places), "".join(reversed(places))) and values[0].before == 1
    if alone and square and same_samples(*values):
        return pairs(values[0], shape, first_why(values) or "it compares samples with each other")
    return raw(shape, MIXED)
