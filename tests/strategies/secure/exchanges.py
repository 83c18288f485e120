"""An exchange between members and a coordinator, without wires; members are lost where a test says so."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from atoll.secure import Secure
from strategies.secure.exchange import Exchange
from strategies.secure.masks import Words
from strategies.secure.member import Member
from strategies.secure.opening import add_vector, closed_for, unmask

STAGES = ("keys", "shares", "vectors", "signatures", "answers")


def names(n: int) -> list[str]:
    return [f"w{at:03d}" for at in range(n)]


@dataclass
class Run:
    """``lost``: by stage, members who do not answer it nor any later one."""

    vectors: Mapping[str, Words]
    secure: Secure = field(default_factory=Secure)
    lost: Mapping[str, Collection[str]] = field(default_factory=dict)
    name: str = "exchange-1"

    def __post_init__(self) -> None:
        self.members = {who: Member(who, "job-1", 3, self.name, self.secure) for who in self.vectors}
        self.masked: dict[str, list[np.ndarray]] = {}
        self.shares: dict[str, dict[str, str]] = {}
        self.shared: frozenset[str] = frozenset()
        self.survivors: frozenset[str] = frozenset()

    def there(self, stage: str) -> list[str]:
        gone = {who for each in STAGES[: STAGES.index(stage) + 1] for who in self.lost.get(each, ())}
        return [who for who in self.members if who not in gone]

    def share(self) -> None:
        """Up to the parcels' delivery."""
        roster = {who: self.members[who].keys for who in self.there("keys")}
        self.of = Exchange("job-1", 3, self.name, self.secure, roster)
        self.parcels = {who: self.members[who].shares(roster) for who in self.there("shares")}
        self.shared = frozenset(self.parcels)
        for who in self.there("shares"):
            due = self.of.neighbours(who) & self.shared
            self.members[who].receive(self.shared, {peer: self.parcels[peer][who] for peer in due})

    def upload(self) -> None:
        for who in self.there("vectors"):
            self.masked[who] = [array.copy() for array in self.vectors[who]]
            self.members[who].mask(self.masked[who])
        self.survivors = frozenset(self.masked)

    def answer(self) -> None:
        signatures = {who: self.members[who].sign(self.survivors) for who in self.there("signatures")}
        self.shares = {who: self.members[who].unmask(signatures) for who in self.there("answers")}

    def opened(self) -> Words:
        """The survivors' sum. AssertionError where it is not to be opened."""
        assert not closed_for(self.of, self.shared, self.shares)
        total = [np.zeros_like(array) for array in next(iter(self.vectors.values()))]
        for who in sorted(self.survivors):
            add_vector(total, self.masked[who])
        unmask(total, self.of, self.shared, self.survivors, self.shares)
        return total

    def run(self) -> Words:
        self.share()
        self.upload()
        self.answer()
        return self.opened()


def vectors(n: int, size: int = 64, dtype: type = np.uint32, seed: int = 0) -> dict[str, Words]:
    rng, most = np.random.default_rng(seed), np.iinfo(dtype).max
    return {
        who: [rng.integers(0, most, size, dtype), rng.integers(0, 2**50, 3, np.uint64)] for who in names(n)
    }


def plain(given: Mapping[str, Words], members: Collection[str]) -> Words:
    """The sum modulo the words' size, without any mask."""
    found = [np.zeros_like(array) for array in next(iter(given.values()))]
    for who in members:
        for total, array in zip(found, given[who], strict=True):
            total += array
    return found
