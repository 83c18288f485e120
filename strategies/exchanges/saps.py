"""SAPS-PSGD: pairs average the few elements of their models that a shared seed draws.

    m = positions drawn from (job's seed, round) alone, each with probability 1/c      c: ``exchange.ratio``
    x[m] = (x_i[m] + x_j[m]) / 2,  the rest stays

Values travel, positions do not: 4/c bytes an element. Each tensor has a draw of its own, by its name: the
same whoever holds which tensors. Averaging is symmetric and doubly stochastic as long as a round counts for
both of a pair or for neither; the mean of all models is then kept. Only for models: a gradient averaged at a
mask would lose mass. Source: papers/compression.md 2.2 (Bernoulli mask; c = 100).
"""

from __future__ import annotations

from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING

import torch

from compressors.random_k import draw_positions
from compressors.vector import dense
from strategies.exchanges.base import Contribution, Exchanged, ExchangeRule, Flat, Settled, State

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.exchange import ExchangeRound


class SapsPsgd(ExchangeRule):
    """The rule above; state: the ``Flat`` of its tensors, and nothing besides the model."""

    def init(self, flat: Flat, own: Tensor) -> State:
        return flat

    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        mask = self.mask(state, at)
        return Contribution(dense(own[mask]), carry=mask)

    def settle(self, done: Exchanged) -> Settled | Contribution:
        """The pair's mean at the mask, and on top of it by how far the model has moved since."""
        mask, sent = done.contribution.carry, done.contribution.vector.values
        result = done.now.clone()
        for piece in done.pieces:
            if piece.total is not None:
                result[mask] = piece.total.dense() / len(piece.included) + (result[mask] - sent)
        return Settled(result, done.state)

    def mask(self, flat: Flat, at: ExchangeRound) -> Tensor:
        """Positions of the round in the row, ascending, int64; the same at every rank."""
        names = flat.names or tuple(map(str, range(len(flat.shapes))))
        starts = accumulate((0, *flat.sizes))
        found = [
            start + self._drawn(size, at.draw_seed(f"mask {name}"))
            for name, size, start in zip(names, flat.sizes, starts, strict=False)
        ]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def _drawn(self, elements: int, seed: int) -> Tensor:
        """Positions of a tensor. Fewer elements than the ratio are the begin of as many as it takes."""
        kept = ceil(elements / self.exchange.ratio)
        drawn = draw_positions(max(elements, round(kept * self.exchange.ratio)), kept, seed)
        return torch.from_numpy(drawn[drawn < elements])
