"""Random-k: gradients at positions that seed and round draw, with error feedback; no position travels.

    v = g + e;  result = mean(v) at S(seed, round), 0 elsewhere;  e' = v with what was included taken out

All ranks draw the same S, so a contribution is a short dense vector, and parts add up as they are. The raw
values are sent, not times d/k: with error feedback the contraction is 1 - k/d. Elements are drawn one in
``exchange.ratio``. Source: papers/compression.md 3 (random-k).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from atoll.opdag import TensorMeta
from compressors.base import meta_of
from compressors.random_k import draw_positions
from compressors.selection import all_finite
from compressors.sparse_sizes import random_k_most, random_k_of
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
    left_over,
    own_kept,
    own_row,
    weighted,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from atoll.exchange import ExchangeRound


@dataclass(frozen=True)
class _Drawn:
    wanted: Tensor  # [n]: gradient and residual
    positions: Tensor  # of what travels


@dataclass(frozen=True)
class RandomK(ExchangeRule):
    """The rule above; state: the residual [n], or None."""

    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        """A gradient that is not finite travels as NaN: no draw may hide it."""
        wanted = own if state is None else own + state
        kept = random_k_of(meta_of(wanted), self.exchange.ratio)
        positions = torch.from_numpy(draw_positions(wanted.numel(), kept, at.draw_seed("random_k")))
        values = weighted(wanted[positions], at.weight_of(rank))
        if not all_finite(wanted):
            values = torch.full_like(values, torch.nan)
        return Contribution(dense(values), carry=_Drawn(wanted, positions))

    def settle(self, done: Exchanged) -> Settled | Contribution:
        """The mean. One that is not finite leaves the state: the step will be discarded."""
        drawn: _Drawn = done.contribution.carry
        mean = average(done).values
        result = torch.zeros_like(drawn.wanted)
        result[drawn.positions] = mean
        if not all_finite(mean):
            return Settled(result, done.state)
        residual = drawn.wanted.clone()
        residual[drawn.positions] = left_over(done)
        return Settled(result, residual)

    def rows(self, flat: Flat, ranks: int) -> tuple[tuple[Row, ...], ...]:
        """At most: how many are drawn differs from round to round."""
        kept = random_k_of(TensorMeta((flat.size,), "float32"), self.exchange.ratio)
        return ((Row(random_k_most(kept, flat.size)),),)

    def stored(self, state: State, flat: Flat) -> list[Kept]:
        return own_kept(state, flat)

    def resumed(self, kept: Sequence[Kept], flat: Flat) -> State:
        return own_row(kept, flat)

    def undelivered(self, contribution: Contribution, state: State) -> State:
        return finite_or(contribution.carry.wanted, state)
