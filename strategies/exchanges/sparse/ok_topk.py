"""Ok-Topk: about the k largest elements of the sum of everybody's about k largest, through region owners.

    v = g + e;  S = {|v| >= t_local};  region owners sum their parts;  G = {|sum| >= t_global};
    result = sum / weights at G;  e' = v, zero at S and G

Volume stays near 2 k (P - 1) / P pairs (position, value) received, whatever P is:

- thresholds are exact every ``renew`` rounds and re-used in between, moved by about a percent when
  counts leave 2k/3 .. 5k/4;
- regions are cut so that each holds an equal share of what is kept. A first phase averages the borders that
  ranks propose from their own S. It comes every ``repartition`` rounds and after a round in which a
  region's share of G was more than 1.25 of an equal one (residuals shift fast at first; the source waits);
- an owner sends at most 3k / (2P) sums, its largest. The exact threshold is the k-th largest of what all
  owners sent. So it costs no other message, and follows at once where they sent too many (the source
  gathers all sums for it, and moves sums between owners to balance the gathering).

Borders must agree, so a round counts for all or for none. k follows from ``exchange.ratio``.
Source: Ok-Topk, arXiv 2201.07598 (papers/compression.md 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compressors.base import meta_of
from compressors.selection import all_finite, bits_of, largest, magnitude
from compressors.sparse_sizes import vector_kept
from compressors.topk import Threshold, TopK
from compressors.vector import Vector, chosen, dense, strongest, total
from strategies.exchanges.base import (
    OWN,
    OWN_PREFIX,
    Contribution,
    Exchanged,
    ExchangeRule,
    Flat,
    Kept,
    Merged,
    Row,
    Settled,
    State,
    average,
    finite_or,
    own_row,
    unpicked,
    weighted,
)

if TYPE_CHECKING:
    from atoll.exchange import ExchangeRound

BORDERS, SUMS = 0, 1  # phases
LOCAL = OWN_PREFIX + "threshold"
"""Key of a rank's own threshold, beside each tensor's residual; int64 [1]."""
REGIONS = "regions"
"""Key of what all ranks know of the row that a tensor is in, float64: the tensor's first element, the row's
size, the threshold of sums or -1, whether regions are uneven, their borders."""
UNEVEN = 1.25  # largest region's count / mean count from which regions are cut anew


@dataclass(frozen=True)
class OkState:
    """``residual`` [n] and ``local`` are this rank's; ``threshold`` of sums and ``borders`` equal at all
    ranks. None: to be found."""

    residual: Tensor
    local: Threshold | None = None
    threshold: float | None = None
    borders: tuple[int, ...] = ()
    uneven: bool = False  # the last result over these regions


@dataclass(frozen=True)
class _Kept:
    wanted: Tensor  # [n]: gradient and residual
    kept: Vector  # of ``wanted``, weighted
    local: Threshold
    threshold: float | None  # of sums in this round; None: exact
    most: int  # sums that an owner sends
    borders: tuple[int, ...]


@dataclass(frozen=True)
class OkTopK(ExchangeRule):
    """The rule above; state: ``OkState``."""

    renew: int = 32  # rounds between exact thresholds: tau' (the source: 32, for BERT 128)
    repartition: int = 64  # rounds between new regions

    def kept(self, size: int) -> int:
        """k: entries that thresholds aim at."""
        return vector_kept(size, self.exchange.ratio)

    def init(self, flat: Flat, own: Tensor) -> State:
        return OkState(torch.zeros(flat.size))

    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        wanted = own + state.residual
        vector = dense(weighted(wanted, at.weight_of(rank)))
        renewed = at.number % self.renew == 0
        positions, local = self._selected(vector, None if renewed else state.local)
        carry = _Kept(
            wanted,
            chosen(vector, positions),
            local,
            None if renewed else state.threshold,
            self._most(vector.size, len(at.ranks)),
            state.borders,
        )
        others = len(at.ranks) - 1
        stale = state.uneven or at.number % self.repartition == 0 or len(state.borders) != others
        if others and stale:
            proposal = _equal_borders(positions, vector.size, len(at.ranks))
            return Contribution(dense(weighted(proposal, at.weight_of(rank))), phase=BORDERS, carry=carry)
        return _sums(carry)

    def merge(self, parts: Sequence[Vector], own: Contribution) -> Merged:
        summed = total(parts)
        if own.phase == BORDERS:
            return Merged(summed)
        carry: _Kept = own.carry
        if carry.threshold is not None:
            low = summed.values.abs() < carry.threshold  # not so for NaN, which must be seen
            summed = Vector(summed.size, summed.values[~low], _of(summed)[~low])
        return Merged(strongest(summed, carry.most)[0])

    def settle(self, done: Exchanged) -> Settled | Contribution:
        """After the borders the contribution of values; then the mean. One that is not finite leaves the
        state: the step will be discarded."""
        carry: _Kept = done.contribution.carry
        mean = average(done).values
        if done.contribution.phase == BORDERS:
            # Within the row and ascending, whatever others proposed: no integer stands for an infinity.
            size = carry.kept.size
            sound = mean.nan_to_num(0.0, posinf=size, neginf=0.0).clamp(0, size)
            borders = torch.cummax(sound, 0).values.round().to(torch.int64).clamp(0, size).tolist()
            return _sums(replace(carry, borders=tuple(borders)))
        if not all_finite(mean):
            return Settled(mean, done.state)
        sent = [piece.total.values.abs() for piece in done.pieces if piece.total is not None]
        residual = unpicked(done, carry.wanted)
        threshold = self._next_threshold(torch.cat(sent), carry)
        # Regions by what the next threshold leaves: where all owners send their most, regions look even.
        counts = [int((values >= (threshold or 0.0)).sum()) for values in sent]
        uneven = max(counts) * len(done.round.ranks) > UNEVEN * sum(counts)
        return Settled(mean, OkState(residual, carry.local, threshold, carry.borders, uneven))

    def undelivered(self, contribution: Contribution, state: State) -> State:
        return replace(state, residual=finite_or(contribution.carry.wanted, state.residual))

    def rows(self, flat: Flat, ranks: int) -> tuple[tuple[Row, ...], ...]:
        kept = self.kept(flat.size)
        # A re-used threshold never selects more than that.
        sums = Row(flat.size, (kept + kept // 4, self._most(flat.size, ranks)), free=True)
        return (Row(ranks - 1),), (sums,)

    def stored(self, state: State, flat: Flat) -> list[Kept]:
        """Thresholds and borders are the row's, so each of its tensors has them."""
        found: list[Kept] = []
        threshold = -1.0 if state.threshold is None else state.threshold
        shared = (float(flat.size), threshold, float(state.uneven), *map(float, state.borders))
        starts = accumulate(flat.sizes, initial=0)
        for part, start in zip(flat.tensors(state.residual), starts, strict=False):
            row = torch.tensor([float(start), *shared], dtype=torch.float64)
            own = {} if state.local is None else {LOCAL: torch.tensor([state.local.key])}
            found.append({OWN: part, REGIONS: row, **own})
        return found

    def resumed(self, kept: Sequence[Kept], flat: Flat) -> State:
        """Thresholds and borders are found anew unless these tensors were a row before."""
        own = own_row(kept, flat)
        state = OkState(torch.zeros(flat.size) if own is None else own)
        rows = {tuple(one[REGIONS].tolist()[1:]) if REGIONS in one else () for one in kept}
        starts = [float(one[REGIONS][0]) for one in kept if REGIONS in one]
        shared = rows.pop()
        if rows or not _sound(shared, flat.size) or starts != [*accumulate(flat.sizes, initial=0)][:-1]:
            return state
        _, threshold, uneven, *borders = shared
        keys = {int(one[LOCAL]) for one in kept if LOCAL in one}
        return replace(
            state,
            local=Threshold(keys.pop()) if len(keys) == 1 else None,
            threshold=threshold if threshold >= 0.0 else None,
            borders=tuple(map(int, borders)),
            uneven=bool(uneven),
        )

    def _most(self, size: int, ranks: int) -> int:
        """Sums that an owner sends, at most."""
        return max(1, -(-3 * self.kept(size) // (2 * ranks)))

    def _selected(self, vector: Vector, state: Threshold | None) -> tuple[Tensor, Threshold]:
        """Positions of S and the threshold for the next round."""
        bits, kept = bits_of(vector.values), self.kept(vector.size)
        if state is None:
            positions = largest(bits, kept)
            return torch.from_numpy(positions), Threshold(max(1, int(magnitude(bits[positions]).min())))
        codec = TopK(density=kept / vector.size, rows=False, selection="reused")
        positions, state = codec.select(bits, meta_of(vector.values), state)
        return torch.from_numpy(positions), state

    def _next_threshold(self, sent: Tensor, carry: _Kept) -> float | None:
        """Threshold of the next round's sums after one in which owners sent these magnitudes; None where they
        were too few to go on from."""
        kept, count = self.kept(carry.kept.size), len(sent)
        if 2 * count < kept:
            return None
        if carry.threshold is None or 4 * count > 5 * kept:
            return float(torch.topk(sent, min(kept, count)).values[-1])
        return carry.threshold / 1.008 if 3 * count < 2 * kept else carry.threshold


def _sound(shared: Sequence[float], size: int) -> bool:
    """Whether a stored row's figures are of so many elements, and its borders ascend among them."""
    if len(shared) < 3 or shared[0] != size or not all(map(isfinite, shared)):
        return False
    borders = list(shared[3:])
    return borders == sorted(borders) and (not borders or 0 <= borders[0] <= borders[-1] <= size)


def _sums(carry: _Kept) -> Contribution:
    return Contribution(carry.kept, borders=carry.borders, phase=SUMS, carry=carry)


def _equal_borders(positions: Tensor, size: int, regions: int) -> Tensor:
    """Borders [regions - 1] between equal numbers of ascending ``positions``."""
    if not len(positions):
        return torch.arange(1, regions) * (size / regions)
    places = torch.arange(1, regions) * len(positions) // regions
    return positions[places].to(torch.float32)


def _of(vector: Vector) -> Tensor:
    assert vector.positions is not None  # noqa: S101 - a sum of sparse parts
    return vector.positions
