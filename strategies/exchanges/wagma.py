"""WAGMA-SGD: groups average their models, and a late rank holds nobody up.

    in time:  x = sum / S        late:  x = (sum + now) / (S + 1)

A rank that is late contributes the model that it has, without the step that it is computing; when that is
done, the fresh model joins as one more. Groups are the grid's (``matching.grid_groups``), S about sqrt(P):
with nobody late all models are equal after log_S P rounds, up to the order in which they were added. Every
tenth round (``everybody_every`` in the catalogue) everybody averages, waiting for all: so no model is staler
than that.
Source: papers/compression.md 7, WAGMA-SGD.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compressors.vector import dense
from strategies.exchanges.base import Contribution, Exchanged, ExchangeRule, Settled, State

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.exchange import ExchangeRound


class Wagma(ExchangeRule):
    """The rule above; no state besides the model."""

    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        return Contribution(dense(own))

    def settle(self, done: Exchanged) -> Settled | Contribution:
        """The group's mean, in which a model that has moved on since it was contributed counts once more."""
        late = not torch.equal(done.now, done.contribution.vector.values)
        result = done.now.clone()
        for piece in done.pieces:
            if piece.total is None:
                continue
            fresh = result[piece.segment.start : piece.segment.stop]
            joined = piece.total.dense() + fresh if late else piece.total.dense()
            fresh.copy_(joined / (len(piece.included) + late))
        return Settled(result, done.state)
