"""Types of a graph's values by their dependence on the samples of a micro-batch.

    CLEAN   nothing: no input went into it
    MEAN    sums and means in which every sample counts alike, and what follows from them
    ROWS    along one dim what each sample gives, each in the same way; perhaps beside rows of no sample
    PAIRS   [n, n], what each two rows give, each two in the same way
    RAW     anything else, a single sample above all

A graph that picks or weighs samples by their place makes RAW of ROWS. One that does so by their values
(``where(label == 3)``) does not: that is a function of each sample like any other. ``why`` of a value that
is not RAW says what makes it loose: chance weighs its samples, or pairs of them were compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

Shape = tuple[int, ...]
Parts = tuple[tuple[int, bool], ...]
"""Lengths along the samples' dim, in order, each with whether it holds samples."""

DIAGONAL = "diagonal"  # a * identity + b
COUNTING = "counting"  # 0, 1, 2, ... along the one dim of more than one entry


class Kind(IntEnum):
    CLEAN = 0
    MEAN = 1
    ROWS = 2
    PAIRS = 3
    RAW = 4


class Vary(IntEnum):
    """Variation of a value along a dim: none, at random only, or by position."""

    SAME = 0
    DRAWN = 1
    PLACED = 2


@dataclass(frozen=True, slots=True)
class Value:
    """``varies`` of CLEAN and MEAN, one a dim. Of ROWS: ``dim`` and ``parts``; where samples are not the
    dim's slowest index, it runs over ``before`` other things first. ``batch``: samples of a micro-batch."""

    shape: Shape
    kind: Kind = Kind.CLEAN
    varies: tuple[Vary, ...] = ()
    dim: int = 0
    before: int = 1
    parts: Parts = ()
    batch: int = 0
    why: str = ""
    pattern: str = ""

    @property
    def placed(self) -> int:
        """The samples' dim, from the right: -1 is the last."""
        return self.dim - len(self.shape)

    @property
    def strict(self) -> bool:
        """Return whether every sample has the same weight, whatever is drawn."""
        return self.kind is not Kind.RAW and not self.why

    @property
    def plain(self) -> bool:
        """Return whether the value reveals nothing of a single sample."""
        return self.kind <= Kind.MEAN

    def along(self, dim: int) -> Vary:
        """Return the variation of a plain value along ``dim``, -1 being the last; beyond its dims there is
        none."""
        return self.varies[dim] if -dim <= len(self.varies) else Vary.SAME


def plain(shape: Shape, kind: Kind, vary: Vary | Sequence[Vary] = Vary.PLACED, why: str = "") -> Value:
    """A CLEAN or MEAN value that differs so along each dim."""
    given = (vary,) * len(shape) if isinstance(vary, Vary) else tuple(vary)
    return Value(
        shape, kind, tuple(Vary.SAME if n == 1 else v for n, v in zip(shape, given, strict=True)), why=why
    )


def rows(like: Value, shape: Shape, dim: int, why: str = "") -> Value:
    """ROWS of the same samples in another shape."""
    return Value(shape, Kind.ROWS, (), dim, like.before, like.parts, like.batch, why or like.why)


def pairs(like: Value, shape: Shape, why: str) -> Value:
    """PAIRS of the rows of ``like``."""
    return Value(shape, Kind.PAIRS, (), 0, like.before, like.parts, like.batch, why)


def raw(shape: Shape, why: str) -> Value:
    """RAW, with what made it so."""
    return Value(shape, Kind.RAW, why=why)


def samples_of(shape: Shape) -> Value:
    """An input: samples along its first dim."""
    return Value(shape, Kind.ROWS, (), 0, 1, ((shape[0], True),), shape[0])


def same_samples(one: Value, other: Value) -> bool:
    """Return whether two ROWS hold the same samples in the same order."""
    return (one.before, one.parts, one.batch) == (other.before, other.parts, other.batch)


def first_why(values: Sequence[Value]) -> str:
    """The first reason for looseness."""
    return next((v.why for v in values if v.why), "")


def broken(values: Sequence[Value], shape: Shape) -> Value | None:
    """RAW when one of ``values`` is, with its reason."""
    return next((replace(v, shape=shape) for v in values if v.kind is Kind.RAW), None)


def blend(values: Sequence[Value], shape: Shape, vary: Vary = Vary.PLACED) -> Value | None:
    """Return the result of plain values combined at unknown positions; None where one is not plain."""
    if not all(v.plain for v in values):
        return None
    kind = max((v.kind for v in values), default=Kind.CLEAN)
    return plain(shape, kind, vary, first_why(values))


def pointwise(values: Sequence[Value], shape: Shape) -> Value:
    """Elements of one place of each, broadcast: an elementwise op, and the join of what may be either."""
    if (found := broken(values, shape)) is not None:
        return found
    spread = [v for v in values if not v.plain]
    if not spread:
        return _plain_pointwise(values, shape)
    if any(v.kind is Kind.PAIRS for v in spread) or len({v.placed for v in spread}) > 1:
        return _pairwise(values, shape)
    first = spread[0]
    dim = first.placed + len(shape)
    if any(not same_samples(first, v) for v in spread) or shape[dim] != first.shape[first.dim]:
        return raw(shape, "it sets samples beside others than their own")
    why = first_why(values)
    for other in values:
        vary = other.along(first.placed) if other.plain else Vary.SAME
        if vary is Vary.PLACED:
            return raw(shape, "it weighs samples by their place in the micro-batch")
        if vary is Vary.DRAWN:
            why = why or "it weighs samples by chance"
    return rows(first, shape, dim, why)


def _plain_pointwise(values: Sequence[Value], shape: Shape) -> Value:
    kind = max((v.kind for v in values), default=Kind.CLEAN)
    varies = tuple(
        max((v.along(at - len(shape)) for v in values), default=Vary.SAME) for at in range(len(shape))
    )
    found = plain(shape, kind, varies, first_why(values))
    diagonal = [v for v in values if v.pattern == DIAGONAL and v.shape == shape]
    if diagonal and all(v in diagonal or set(v.varies) <= {Vary.SAME} for v in values):
        return replace(found, pattern=DIAGONAL)
    return found


def _pairwise(values: Sequence[Value], shape: Shape) -> Value:
    """Rows against columns, or what is PAIRS already with what treats every pair alike."""
    spread = [v for v in values if not v.plain]
    first = spread[0]
    size = sum(n for n, _ in first.parts)
    square = shape == (size, size) and first.before == 1
    fits = all(_of_pairs(v, size) and same_samples(first, v) for v in spread)
    if square and fits and all(set(v.varies) <= {Vary.SAME} or v.pattern for v in values if v.plain):
        return pairs(first, shape, first_why(values) or "it compares samples with each other")
    return raw(shape, "it sets samples beside others than their own")


def _of_pairs(value: Value, size: int) -> bool:
    """Return whether a ROWS or PAIRS value has one entry a row, a column, or a pair."""
    if value.kind is Kind.PAIRS:
        return value.shape == (size, size)
    return value.shape in ((size,), (1, size), (size, 1))
