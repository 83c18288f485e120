"""ACP-SGD: PowerSGD with one factor a round instead of two, the sides alternating.

    even: P = mean(M_i Q),   result = P Q^T,   Q orthonormal;  the next round's basis: orthonormal(P)
    odd:  Q = mean(M_i^T P), result = P Q^T,   P orthonormal;  orthonormal(Q)
    M_i = g_i + e_i,   e_i = M_i less what this rank's own factor restores

One collective of 4 r n or 4 r m bytes a matrix in turn, half of PowerSGD's; the residual waits for no answer.
Every rank needs the same basis and side, so a round counts for all or for none: after one that does not, M
stays in the residual and the side does not change. The basis is made at every rank, so bits agree within one
device class. The rank of each matrix follows from ``exchange.ratio``: dense bytes over the mean of both
sides. Source: papers/compression.md 4 (ACP-SGD, arXiv 2306.08881).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from compressors.contrib.low_rank.acp_sgd import START_SEED, next_basis, phase, restored
from compressors.contrib.low_rank.factors import Matrix, orthonormal, sketch
from compressors.contrib.low_rank.ranks import acp_rank
from compressors.selection import all_finite
from compressors.vector import dense
from strategies.exchanges.base import (
    Contribution,
    Exchanged,
    ExchangeRule,
    Flat,
    Kept,
    Row,
    Settled,
    State,
    average,
    finite_or,
    own_row,
    weighted,
)
from strategies.exchanges.low_rank.layout import Layout, layout_of, row_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from atoll.exchange import ExchangeRound


SIDE = "side"
"""Key of the side whose turn is next: 0 where a basis is Q, 1 where it is P."""


@dataclass(frozen=True)
class AcpState:
    """Step and bases, equal at all ranks, and this rank's residual [n]."""

    layout: Layout
    step: int  # even: the bases are Q [columns, rank]; odd: P [rows, rank]
    bases: tuple[Matrix, ...]
    residual: Tensor


@dataclass(frozen=True)
class _Sent:
    wanted: Tensor  # [n]: gradient and residual
    factors: tuple[Matrix, ...]  # of this rank alone


@dataclass(frozen=True)
class AcpSgd(ExchangeRule):
    """The rule above; state: ``AcpState``."""

    def init(self, flat: Flat, own: Tensor) -> State:
        layout = self._layout(flat)
        bases = tuple(
            orthonormal(sketch(columns, rank, START_SEED)).contiguous()
            for _, columns, rank in layout.factored
        )
        return AcpState(layout, 0, bases, torch.zeros(flat.size))

    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        wanted = own + state.residual
        matrices, rest = state.layout.split(wanted)
        factors = tuple(phase(m, basis, state.step) for m, basis in zip(matrices, state.bases, strict=True))
        row = weighted(row_of(factors, rest), at.weight_of(rank))
        return Contribution(dense(row), carry=_Sent(wanted, factors))

    def settle(self, done: Exchanged) -> Settled | Contribution:
        """The mean as its factors restore it. One that is not finite leaves the state."""
        before: AcpState = done.state
        sent: _Sent = done.contribution.carry
        factors, rest = before.layout.factors(average(done).values, left=before.step % 2 == 0)
        result = before.layout.joined(_restored(factors, before), rest)
        if not all_finite(result):
            return Settled(result, before)
        matrices, _ = before.layout.split(sent.wanted)
        errors = [m - own for m, own in zip(matrices, _restored(sent.factors, before), strict=True)]
        residual = before.layout.joined(errors, torch.zeros_like(rest))
        # In rows, as one that is stored and read again: a product's bits depend on how a matrix lies.
        bases = tuple(next_basis(factor).contiguous() for factor in factors)
        return Settled(result, AcpState(before.layout, before.step + 1, bases, residual))

    def rows(self, flat: Flat, ranks: int) -> tuple[tuple[Row, ...], ...]:
        """Of both sides, which take turns."""
        layout = self._layout(flat)
        return (tuple(Row(layout.row_size(left=side) + layout.rest) for side in (True, False)),)

    def stored(self, state: State, flat: Flat) -> list[Kept]:
        step = torch.tensor([float(state.step % 2)])
        kept = state.layout.stored(flat, state.residual, state.bases)
        return [{**one, SIDE: step} if one else one for one in kept]

    def resumed(self, kept: Sequence[Kept], flat: Flat) -> State:
        """Without a basis of each, all of one side, it begins with those of the start."""
        layout, own = self._layout(flat), own_row(kept, flat)
        residual = torch.zeros(flat.size) if own is None else own
        bases, sides = layout.bases(kept), {int(one[SIDE]) for one in kept if SIDE in one}
        if bases is None or len(sides) > 1:
            return replace(self.init(flat, residual), residual=residual)
        return AcpState(layout, next(iter(sides), 0), tuple(bases), residual)

    def _layout(self, flat: Flat) -> Layout:
        return layout_of(flat, lambda meta: acp_rank(meta, self.exchange.ratio))

    def undelivered(self, contribution: Contribution, state: State) -> State:
        sent: _Sent = contribution.carry
        return replace(state, residual=finite_or(sent.wanted, state.residual))


def _restored(factors: tuple[Matrix, ...] | list[Matrix], state: AcpState) -> list[Matrix]:
    return [restored(f, basis, state.step) for f, basis in zip(factors, state.bases, strict=True)]
