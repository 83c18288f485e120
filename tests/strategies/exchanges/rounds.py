"""Rounds of one rule among some ranks, for the rules' own tests: contents, and what travelled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atoll.exchange import ExchangeRound
from compressors.vector import SPARSE
from strategies.exchanges.base import ExchangeRule, Flat
from tests.inprocess.exchange import Answer, Faults, run_round
from worker.exchange.round import Message


def gradients(ranks: int, size: int, seed: int = 0) -> dict[int, Tensor]:
    """Gradients of ``ranks``: a part that all share, heavier tails than a Gaussian's, noise of each."""
    draw = torch.Generator().manual_seed(seed)
    common = torch.randn(size, generator=draw) ** 3
    return {rank: common + torch.randn(size, generator=draw) for rank in range(ranks)}


@dataclass
class Rounds:
    """One rule among ``ranks``, round after round; ``messages`` are those of the last one that arrived."""

    rule: ExchangeRule
    ranks: int
    size: int
    shapes: Sequence[tuple[int, ...]] = ()
    weights: tuple[float, ...] = ()
    states: dict[int, Any] = field(init=False)
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        flat = Flat(tuple(self.shapes) or ((self.size,),))
        self.states = {rank: self.rule.init(flat, torch.zeros(self.size)) for rank in range(self.ranks)}

    def play(
        self,
        own: Mapping[int, Tensor],
        number: int = 0,
        *,
        lose: Callable[[Message], bool] = lambda message: False,
        dead: frozenset[int] = frozenset(),
        pick: Callable[[int], int] = lambda waiting: 0,
    ) -> dict[int, Answer]:
        """Answers of the living; their states are those of the next round."""
        self.messages.clear()

        def alter(message: Message) -> Message | None:
            if lose(message):
                return None
            self.messages.append(message)
            return message

        everyone = tuple(range(self.ranks))
        at = ExchangeRound(number, everyone, seed=11, weights=self.weights)
        answers = run_round(
            self.rule, own, self.states, at, [everyone], faults=Faults(pick=pick, alter=alter, dead=dead)
        )
        self.states.update({rank: answer.state for rank, answer in answers.items()})
        return answers

    def pairs_received(self) -> dict[int, int]:
        """(position, value) pairs that arrived at each rank in sparse packets."""
        found = dict.fromkeys(range(self.ranks), 0)
        for message in self.messages:
            if message.packet.codec == SPARSE:
                found[message.target] += int.from_bytes(message.packet.params, "little")
        return found


def same_bits(answers: Mapping[int, Answer]) -> bool:
    """Whether all results are equal, bit for bit."""
    first, *others = (answer.result for answer in answers.values())
    return all(torch.equal(first, other) for other in others)
