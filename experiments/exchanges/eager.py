"""eager-SGD: the gradients that are ready go, and a late one joins the next round.

    result = (1/P) sum of what was contributed,     a rank that is not ready contributes zeros

Division is by all P, so a gradient counts alike whenever it comes. Solo: ``exchange.quorum`` of 1/P;
majority: 1/2, here at least so many where the paper's drawn initiator finds so many in the mean. A gradient
whose round was over (``undelivered``), and what a codec or an owner left out, is kept and added to the next
contribution, unless it is older than ``age_limit`` rounds by then.

All ranks apply every result in order, the late ones later, so models do not drift apart and the paper's
periodic averaging of models has nothing to repair. A rank that lost a total must fetch a model instead, as
its receipt says. Source: papers/compression.md 7, eager-SGD; the age limit is ours (D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compressors.vector import dense, empty_vector
from strategies.exchanges.base import (
    Contribution,
    Exchanged,
    ExchangeRule,
    Settled,
    State,
    finite_or,
    left_over,
    weighted,
)
from strategies.exchanges.mean import part_and_total

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.exchange import ExchangeRound


@dataclass(frozen=True)
class Late:
    """Gradient [n] that no result holds, and the round that it was contributed to."""

    gradient: Tensor
    round: int


@dataclass(frozen=True)
class Brought:
    """Contribution's round and weight."""

    round: int
    weight: float


@dataclass(frozen=True)
class Eager(ExchangeRule):
    """The rule above; state: ``Late`` or None."""

    age_limit: int = 10  # rounds

    def contribute(self, own: Tensor, state: State, at: ExchangeRound, rank: int) -> Contribution:
        """``own``: zeros at a rank that is not ready; nothing to bring takes no bytes."""
        wanted = own
        if state is not None and at.number - state.round <= self.age_limit:
            wanted = own + state.gradient
        weight = at.weight_of(rank)
        codec, total_codec = part_and_total(self.exchange.codec, self.exchange.ratio)
        vector = dense(weighted(wanted, weight)) if bool(wanted.any()) else empty_vector(own.numel())
        return Contribution(vector, codec, total_codec, carry=Brought(at.number, weight))

    def settle(self, done: Exchanged) -> Settled | Contribution:
        at = done.round
        whole = sum(at.weight_of(rank) for rank in at.ranks)
        result = torch.zeros(done.contribution.vector.size)
        for piece in done.pieces:
            if piece.total is not None:
                result[piece.segment.start : piece.segment.stop] = piece.total.dense() / whole
        return Settled(result, _late(left_over(done), at.number, done.state))

    def undelivered(self, contribution: Contribution, state: State) -> State:
        brought: Brought = contribution.carry
        return _late(contribution.vector.dense() / brought.weight, brought.round, state)


def _late(gradient: Tensor, number: int, before: Late | None) -> Late | None:
    if not bool(gradient.any()):
        return None
    found = finite_or(gradient, None)
    return before if found is None else Late(found, number)
