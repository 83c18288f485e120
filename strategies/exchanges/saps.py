"""SAPS-PSGD: pairs average the few elements of their models that a shared seed draws.

    m = positions drawn from (job's seed, round) alone, each with probability 1/c      c: ``exchange.ratio``
    x[m] = (x_i[m] + x_j[m]) / 2,  the rest stays

Values travel, positions do not: 4/c bytes an element. Averaging is symmetric and doubly stochastic as long
as a round counts for both of a pair or for neither; the mean of all models is then kept. Only for models:
a gradient averaged at a mask would lose mass. Source: papers/compression.md 2.2 (Bernoulli mask; c = 100).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compressors.random_k import draw_positions
from compressors.vector import dense
from strategies.exchanges.base import Contribution, Exchanged, ExchangeRule, Settled, State

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.exchange import ExchangeRound


class SapsPsgd(ExchangeRule):
    """The rule above; no state besides the model."""

    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        mask = self.mask(own.numel(), at)
        return Contribution(dense(own[mask]), carry=mask)

    def settle(self, done: Exchanged) -> Settled | Contribution:
        """The pair's mean at the mask, and on top of it by how far the model has moved since."""
        mask, sent = done.contribution.carry, done.contribution.vector.values
        result = done.now.clone()
        for piece in done.pieces:
            if piece.total is not None:
                result[mask] = piece.total.dense() / len(piece.included) + (result[mask] - sent)
        return Settled(result, done.state)

    def mask(self, elements: int, at: ExchangeRound) -> Tensor:
        """Positions of the round, ascending, int64; the same at every rank."""
        kept = max(1, int(elements / self.exchange.ratio))
        return torch.from_numpy(draw_positions(elements, kept, at.draw_seed("mask")))
