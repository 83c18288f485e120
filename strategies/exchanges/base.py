"""The contract of an exchange rule: both halves at the worker, pure, state in, state out.

One round at one rank:

    contribution = rule.contribute(own, state, round, rank)        what travels, and how it is coded
        owners:  total = rule.merge(parts)                         of one segment, parts by ascending label
    settled = rule.settle(exchanged)                               result and next state, or a further phase
    state = rule.undelivered(contribution, state)                  instead, when the round was given up

``own`` is the flat float32 content (gradient, delta or model) at this rank; the result replaces it. A rule
keeps no clock, file or generator: draws come from the round's seed. State changes in ``settle`` and
``undelivered`` alone, so a round that fails anywhere before may be repeated with the same bits.

Between rounds a worker has what a rule keeps by tensor, as in a checkpoint: ``stored(state)`` takes it apart,
``resumed(stored)`` puts one together, of the same tensors or of others that follow each other in a row.

What was not included stays: a rule whose contributions are changes (gradients, deltas) keeps a residual of
what its codec left out, of what an owner did not include, and of segments whose total never came.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from atoll.collective import Segment, cut
from compressors.selection import all_finite
from compressors.vector import UNCOMPRESSED, Vector, total

if TYPE_CHECKING:
    from atoll.exchange import Exchange, ExchangeRound
    from compressors.base import Compressor

State = Any
"""A rule's own frozen value, or None; in as an argument, out as a result."""
OWN = "value"
"""Key of what a rank alone keeps of a tensor, in its shape."""
OWN_PREFIX = "own_"
"""Of further keys of what a rank alone keeps; all other keys are equal at all ranks."""
Kept = Mapping[str, Tensor]
"""What a rule keeps of one tensor."""


def is_own(key: str) -> bool:
    """Whether what is kept under a key is a rank's alone."""
    return key == OWN or key.startswith(OWN_PREFIX)


@dataclass(frozen=True, slots=True)
class Flat:
    """Shapes of the tensors that follow each other in the flat content; ``names``: theirs, or none."""

    shapes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def tensors(self, row: Tensor) -> list[Tensor]:
        """Tensors of a row [n], sharing its memory."""
        parts = torch.split(row, [torch.Size(shape).numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@dataclass(frozen=True, slots=True)
class Row:
    """Bounds of the contributions to one phase, known before any is made: what a message may have at most."""

    elements: int
    # Positions of a part and of a total, at most, where they travel with them; None: all elements do.
    positions: tuple[int, int] | None = None
    free: bool = False  # owners' borders may lie anywhere


@dataclass(frozen=True)
class Contribution:
    """What one rank brings to one phase. Equal ``vector.size``, codecs and ``multiple`` at all ranks."""

    vector: Vector
    codec: Compressor = UNCOMPRESSED  # of dense parts
    total_codec: Compressor = UNCOMPRESSED  # of dense totals
    multiple: int = 1  # segments are cut at multiples of this many elements
    # Or here: [0, b1), [b1, b2), ... [b_last, size); where segments have owners, one a rank.
    borders: tuple[int, ...] = ()
    phase: int = 0
    carry: Any = None  # the rule's own, for ``settle``

    def segments(self, shares: Sequence[float]) -> tuple[Segment, ...]:
        """Segments of the ranks in their order."""
        if not self.borders:
            return cut(self.vector.size, shares, self.multiple)
        edges = (0, *self.borders, self.vector.size)
        return tuple(Segment(start, stop) for start, stop in pairwise(edges))


@dataclass(frozen=True)
class Merged:
    """Total of a segment, and what merging left out of it (gTop-k), which this rank keeps."""

    total: Vector
    kept_back: Vector | None = None


@dataclass(frozen=True)
class Piece:
    """Outcome of one segment."""

    segment: Segment
    total: Vector | None  # None: it never came
    included: frozenset[int] = frozenset()  # labels


@dataclass(frozen=True)
class Exchanged:
    """Outcome of one phase at one rank."""

    rank: int
    round: ExchangeRound
    contribution: Contribution
    sent: Vector  # the contribution as it left its codec
    pieces: tuple[Piece, ...]
    state: State
    now: Tensor  # the content when the result is used; later than the contribution where delayed
    kept_back: tuple[tuple[int, Vector], ...] = ()  # (start, what merging here left out)


@dataclass(frozen=True)
class Settled:
    """``result`` [n] replaces the content; ``state`` the rule's."""

    result: Tensor
    state: State


@dataclass(frozen=True)
class ExchangeRule(ABC):
    """A rule with the plan's settings; constants of its paper are fields with defaults."""

    exchange: Exchange

    def init(self, flat: Flat, own: Tensor) -> State:
        """State before round 0; ``own`` is the content at that moment, equal at all ranks for models."""
        return None

    @abstractmethod
    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        """What this rank brings to the round's first phase."""

    def merge(self, parts: Sequence[Vector], own: Contribution) -> Merged:
        """Total of one segment from its parts, by ascending label; ``own`` has the rule's settings."""
        return Merged(total(parts))

    @abstractmethod
    def settle(self, done: Exchanged) -> Settled | Contribution:
        """The round's result, or the contribution to its next phase."""

    def undelivered(self, contribution: Contribution, state: State) -> State:
        """State after a round whose contribution nobody included."""
        return state

    def codecs(self) -> tuple[Compressor, Compressor]:
        """Codecs of parts and of totals."""
        return UNCOMPRESSED, UNCOMPRESSED

    def rows(self, flat: Flat, ranks: int) -> tuple[tuple[Row, ...], ...]:
        """Bounds of each phase's contributions, of so many ranks; several of a phase: any of them."""
        return ((Row(flat.size),),)

    def stored(self, state: State, flat: Flat) -> list[Kept]:
        """What a state keeps of each tensor."""
        return [{} for _ in flat.shapes]

    def resumed(self, kept: Sequence[Kept], flat: Flat) -> State:
        """State of tensors of which this is kept."""
        return self.init(flat, torch.zeros(flat.size))


def own_kept(row: Tensor | None, flat: Flat) -> list[Kept]:
    """Return what a rank alone keeps, a row [n] or nothing, by tensor."""
    return [{} for _ in flat.shapes] if row is None else [{OWN: part} for part in flat.tensors(row)]


def own_row(kept: Sequence[Kept], flat: Flat, key: str = OWN) -> Tensor | None:
    """Row [n] of what a rank alone keeps under a key in the tensors' shapes, zero where it keeps nothing;
    None where it does of no tensor."""
    if not any(key in one for one in kept):
        return None
    parts = [
        one[key].reshape(-1) if key in one else torch.zeros(torch.Size(shape).numel())
        for one, shape in zip(kept, flat.shapes, strict=True)
    ]
    return torch.cat(parts)


@dataclass(frozen=True)
class Average:
    """Weighted mean of what was included, element by element."""

    values: Tensor  # [size]; zero where nothing came
    came: Tensor = field(repr=False)  # bool [size]


def average(done: Exchanged) -> Average:
    """Divide each segment's total by the weights of the contributions in it."""
    size = done.contribution.vector.size
    values, came = torch.zeros(size), torch.zeros(size, dtype=torch.bool)
    for piece in done.pieces:
        if piece.total is None:
            continue
        here = slice(piece.segment.start, piece.segment.stop)
        weight = sum(done.round.weight_of(label) for label in sorted(piece.included))
        values[here] = piece.total.dense() / weight
        came[here] = True
    return Average(values, came)


def weighted(values: Tensor, weight: float) -> Tensor:
    """``values`` times ``weight``; itself for 1."""
    return values if weight == 1.0 else values * weight


def left_over(done: Exchanged) -> Tensor:
    """Part of the contribution that no total holds: the codec's error where this rank was included, all of it
    elsewhere, and what merging left out here. In units of the content (weights divided out), [size]."""
    wanted = done.contribution.vector.dense()
    left = wanted - done.sent.dense()
    for piece in done.pieces:
        if piece.total is None or done.rank not in piece.included:
            here = slice(piece.segment.start, piece.segment.stop)
            left[here] = wanted[here]
    for start, vector in done.kept_back:
        left[start : start + vector.size] += vector.dense()
    weight = done.round.weight_of(done.rank)
    return left if weight == 1.0 else left / weight


def picked(done: Exchanged) -> Tensor:
    """Elements that sparse totals which hold this rank's contribution have a position for, bool [size]."""
    found = torch.zeros(done.contribution.vector.size, dtype=torch.bool)
    for piece in done.pieces:
        if piece.total is not None and piece.total.positions is not None and done.rank in piece.included:
            found[piece.segment.start + piece.total.positions] = True
    return found


def unpicked(done: Exchanged, wanted: Tensor) -> Tensor:
    """``wanted`` [size], zero where both the sparse contribution and ``picked`` have it."""
    sent = done.sent.positions
    left = wanted.clone()
    left[sent] = torch.where(picked(done)[sent], 0.0, left[sent])
    return left


def finite_or(error: Tensor, before: Tensor | None) -> Tensor | None:
    """``error``, or the residual before where an element is not finite: the step will be discarded."""
    return error if all_finite(error) else before
