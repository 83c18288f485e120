"""Choice of the few pairs by which a large fleet's links are known: a bounded number a worker. Pure.

Workers stand in *places*: a declared site, one address as the coordinator sees it, else each its own. Of each
place the first members are measured against the first one, and that one against the first of some other
places. What lies between all others is estimated from these (``link_guesses``); the pairs of a plan are
measured before it is run.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from coordinator.planning.costs.fleet import Pair

SCANNED = 64  # pairs that are looked at for one that can be measured now


@dataclass(slots=True)
class Survey:
    """Pairs to be measured, in the order in which their workers came; ``few``: peers of one worker."""

    few: int
    place_of: dict[str, str] = field(default_factory=dict)
    _places: dict[str, dict[str, None]] = field(default_factory=dict)  # members in the order they came
    _peers: dict[str, dict[str, None]] = field(default_factory=dict)
    _todo: OrderedDict[Pair, None] = field(default_factory=OrderedDict)
    _pending: Counter[str] = field(default_factory=Counter)  # pairs to be measured, by worker

    def meet(self, worker: str, place: str) -> None:
        """Take in a worker, at its first time in the pool."""
        if worker in self.place_of:
            return
        members = self._places.setdefault(place, {})
        peers = self._heads(place) if not members else [next(iter(members))]
        if len(members) <= self.few:
            self._join(worker, peers)
        members[worker], self.place_of[worker] = None, place

    def forget(self, worker: str) -> None:
        """Drop a worker; those that have lost their only peer get others."""
        place = self.place_of.pop(worker, None)
        if place is None:
            return
        members = self._places[place]
        was_head = next(iter(members)) == worker
        del members[worker]
        peers = self._peers.pop(worker, {})
        for peer in peers:
            del self._peers[peer][worker]
            self._drop((worker, peer))
            self._drop((peer, worker))
        heirs = [next(iter(members))] if members and was_head else []
        if not members:
            del self._places[place]
        for lonely in [*heirs, *(peer for peer in peers if not self._peers[peer])]:
            self._join(lonely, self._heads(self.place_of[lonely]))

    def pending(self, workers: Iterable[str]) -> bool:
        """Return whether a pair of one of these is still to be measured."""
        return bool(self._todo) and any(worker in self._pending for worker in workers)

    def again(self, pair: Pair) -> None:
        """Measure a pair once more: it failed."""
        if all(worker in self.place_of for worker in pair) and pair not in self._todo:
            self._todo[pair] = None
            self._pending.update(pair)

    def take(
        self,
        room: int,
        ready: Callable[[str], bool],
        needed: Callable[[Pair], bool],
        busy: Iterable[str],
    ) -> list[Pair]:
        """Remove and return up to ``room`` pairs that can be measured now, none of which shares a place with
        another or with a ``busy`` worker. Pairs that are not ``needed`` are dropped."""
        found: list[Pair] = []
        held = {self.place_of.get(worker, worker) for worker in busy}
        for pair in list(islice(self._todo, SCANNED)):
            if len(found) >= room:
                break
            places = {self.place_of[worker] for worker in pair}
            if not needed(pair):
                self._drop(pair)
            elif places.isdisjoint(held) and all(map(ready, pair)):
                self._drop(pair)
                held |= places
                found.append(pair)
            else:
                self._todo.move_to_end(pair)
        return found

    def _heads(self, place: str) -> list[str]:
        """Return the first members of the newest other places."""
        newest = islice(reversed(self._places.items()), self.few + 1)
        return [next(iter(members)) for name, members in newest if members and name != place][: self.few]

    def _join(self, worker: str, peers: Iterable[str]) -> None:
        mine = self._peers.setdefault(worker, {})
        for peer in peers:
            if peer not in mine and peer != worker:
                mine[peer] = self._peers.setdefault(peer, {})[worker] = None
                for pair in ((worker, peer), (peer, worker)):
                    self._todo[pair] = None
                    self._pending.update(pair)

    def _drop(self, pair: Pair) -> None:
        if pair in self._todo:
            del self._todo[pair]
            self._pending.subtract(pair)
            for worker in pair:
                if not self._pending[worker]:
                    del self._pending[worker]
