"""Members of secure rounds in worlds: the product's exchange, with short vectors that a check opens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atoll.errors import BadFrame
from atoll.messages.from_worker import SecureAnswer
from atoll.secure import Secure
from coordinator.messages import instructions as do
from strategies.secure.exchange import Exchange
from strategies.secure.opening import add_vector, unmask
from worker.federated.secure.membership import SecureRounds

SECURE = Secure()
Words = list[np.ndarray[Any, Any]]


class InMemory(SecureRounds):
    """What was answered lies in ``disk``, which outlives the process as the product's file does."""

    def __init__(self, who: str, job: str, disk: dict[str, list[list[str]]]) -> None:
        super().__init__(who, job, SECURE, 1, Path("nowhere"))
        self._disk = disk

    def _note(self) -> None:
        found = self._disk.setdefault(self._model, [])
        if sorted(self._survivors) not in found:
            found.append(sorted(self._survivors))

    def _answered(self) -> dict[str, list[list[str]]]:
        return self._disk

    def masked(self, exchange: str, value: int) -> Words:
        """The vector of this exchange, whose sum is to be that of everybody's ``value``."""
        words: Words = [np.full(3, value, np.uint32), np.full(1, value, np.uint64)]
        self._of(exchange).mask(words)
        return words


@dataclass
class Vectors:
    """All masked vectors of a world by blob, each with what it hides; ``opened``: sums that were checked."""

    held: dict[str, tuple[Words, int]] = field(default_factory=dict)
    disks: dict[tuple[str, str], dict[str, list[list[str]]]] = field(default_factory=dict)
    opened: int = 0

    def member(self, who: str, job: str) -> InMemory:
        return InMemory(who, job, self.disks.setdefault((who, job), {}))

    def wrong(self, asked: do.AggregateRound) -> str:
        """Open a round's sum; what is wrong with it, "" where it is the sum of what its members hid."""
        opening = asked.opening
        if opening is None:
            return ""
        total: Words = [np.zeros(3, np.uint32), np.zeros(1, np.uint64)]
        for update in asked.updates.values():
            add_vector(total, self.held[update.update][0])
        of = Exchange(asked.job, asked.round, opening.exchange, SECURE, opening.roster)
        unmask(total, of, opening.shared, asked.updates, opening.shares)
        wanted = sum(self.held[update.update][1] for update in asked.updates.values())
        self.opened += 1
        found = {int(word) for words in total for word in words}
        return "" if found == {wanted} else f"a sum of {sorted(found)[:4]} of members who hid {wanted}"


def answered(member: InMemory, order: Any) -> SecureAnswer:
    """A member's answer, or its refusal, as the product's worker gives it."""
    try:
        return member.answer(order)
    except BadFrame as error:
        return SecureAnswer(order.job, order.round, order.exchange, order.stage, refused=str(error))
