"""PowerSGD: the mean of gradients as two factors of low rank, each averaged before the next is computed.

    M_i = g_i + e_i;  P = mean(M_i Q);  P <- orthonormal(P);  Q = mean(M_i^T P);  result = P Q^T
    e_i = M_i - P (M_i^T P)^T

Two collectives a round, 4 r (n + m) bytes a matrix for both factors; Q is the next round's start. The
residual is what this rank's own part lacks. The source subtracts the mean, M_i - P Q^T. Both residuals have
one sum over the ranks, but this one is the smaller at each, by its distance P P^T (M_i - mean M) from the
mean, and a rank that leaves takes only its own error with it.

Every rank needs the same P and Q, so a round counts for all or for none: after one that does not, M stays
in the residual. P is orthonormalised at every rank, so bits agree within one device class. The rank of each
matrix follows from ``exchange.ratio``. Source: papers/compression.md 4 (PowerSGD, arXiv 1905.13727).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from compressors.contrib.low_rank.factors import Matrix, sketch
from compressors.contrib.low_rank.powersgd import START_SEED, phase_p, phase_q, restored
from compressors.contrib.low_rank.ranks import powersgd_rank
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


@dataclass(frozen=True)
class PowerState:
    """Right factors [columns, rank] of the last round, equal at all ranks, and this rank's residual [n]."""

    layout: Layout
    qs: tuple[Matrix, ...]
    residual: Tensor


@dataclass(frozen=True)
class _Sent:
    wanted: Tensor  # [n]: gradient and residual
    bases: tuple[Matrix, ...] = ()
    qs: tuple[Matrix, ...] = ()  # of this rank alone
    rest: Tensor | None = None  # mean of what travels dense


@dataclass(frozen=True)
class PowerSgd(ExchangeRule):
    """The rule above; state: ``PowerState``."""

    def init(self, flat: Flat, own: Tensor) -> State:
        layout = self._layout(flat)
        qs = tuple(sketch(columns, rank, START_SEED) for _, columns, rank in layout.factored)
        return PowerState(layout, qs, torch.zeros(flat.size))

    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        wanted = own + state.residual
        matrices, rest = state.layout.split(wanted)
        ps = [phase_p(matrix, q) for matrix, q in zip(matrices, state.qs, strict=True)]
        row = weighted(row_of(ps, rest), at.weight_of(rank))
        return Contribution(dense(row), carry=_Sent(wanted))

    def settle(self, done: Exchanged) -> Settled | Contribution:
        """After P the contribution of Q, after Q the mean. A mean that is not finite leaves the state."""
        before: PowerState = done.state
        sent: _Sent = done.contribution.carry
        mean = average(done).values
        matrices, rest = before.layout.split(sent.wanted)
        if done.contribution.phase == 0:
            ps, mean_rest = before.layout.factors(mean, left=True)
            if not ps:
                return Settled(mean, before)
            found = [phase_q(matrix, p) for matrix, p in zip(matrices, ps, strict=True)]
            bases, own_qs = tuple(basis for basis, _ in found), tuple(q for _, q in found)
            row = weighted(row_of(own_qs, rest[:0]), done.round.weight_of(done.rank))
            return Contribution(dense(row), phase=1, carry=_Sent(sent.wanted, bases, own_qs, mean_rest))
        assert sent.rest is not None  # noqa: S101 - set by the phase before
        qs, _ = before.layout.factors(mean, left=False)
        result = before.layout.joined(_restored(sent.bases, qs), sent.rest)
        if not all_finite(result):
            return Settled(result, before)
        errors = [m - own for m, own in zip(matrices, _restored(sent.bases, sent.qs), strict=True)]
        residual = before.layout.joined(errors, torch.zeros_like(rest))
        # A zero gradient has nothing to iterate from: keep the span found so far.
        kept = tuple(q if q.any() else old for q, old in zip(qs, before.qs, strict=True))
        return Settled(result, PowerState(before.layout, kept, residual))

    def rows(self, flat: Flat, ranks: int) -> tuple[tuple[Row, ...], ...]:
        layout = self._layout(flat)
        if not layout.factored:
            return ((Row(flat.size),),)
        return (Row(layout.row_size(left=True) + layout.rest),), (Row(layout.row_size(left=False)),)

    def stored(self, state: State, flat: Flat) -> list[Kept]:
        return [*state.layout.stored(flat, state.residual, state.qs)]

    def resumed(self, kept: Sequence[Kept], flat: Flat) -> State:
        """Without a basis of each it begins with those of the start."""
        layout, own = self._layout(flat), own_row(kept, flat)
        residual = torch.zeros(flat.size) if own is None else own
        qs = layout.bases(kept)
        if qs is None:
            return replace(self.init(flat, residual), residual=residual)
        return PowerState(layout, tuple(qs), residual)

    def _layout(self, flat: Flat) -> Layout:
        return layout_of(flat, lambda meta: powersgd_rank(meta, self.exchange.ratio))

    def undelivered(self, contribution: Contribution, state: State) -> State:
        sent: _Sent = contribution.carry
        return replace(state, residual=finite_or(sent.wanted, state.residual))


def _restored(bases: tuple[Matrix, ...], qs: tuple[Matrix, ...] | list[Matrix]) -> list[Matrix]:
    return [restored(basis, q) for basis, q in zip(bases, qs, strict=True)]
