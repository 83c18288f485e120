"""How pairs of workers are joined, as they report it: which relay they pass, and what those carry. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from coordinator.config import Relaying
from coordinator.membership.links.pairs import PairMap
from coordinator.messages.events import PeerJoined
from coordinator.messages.instructions import RelayUse
from coordinator.planning.costs.fleet import Pair, RelayLine

RELAYED = "relayed"
RELAY_AFTER_S = 2.5
"""So long two that may be able to dial each other have for that: each direction has its turn before."""


@dataclass(slots=True)
class Joined:
    """Ways of pairs: (worker, peer) -> as ``worker`` reports it."""

    config: Relaying
    ways: PairMap[PeerJoined] = field(default_factory=PairMap)

    def reported(self, worker: str, message: PeerJoined) -> None:
        """Take in a worker's report."""
        pair = (worker, message.peer)
        if message.way:
            self.ways[pair] = message
        else:
            self.ways.pop(pair, None)

    def way(self, pair: Pair) -> str:
        """Return how a pair is joined, as its first worker reports it; "" when it is not."""
        found = self.ways.get(pair)
        return found.way if found is not None else ""

    def use(self, worker: str, peer: str, *, dialable: bool) -> RelayUse | None:
        """Return what ``worker`` may do at the relays to meet ``peer``; ``dialable``: an address is known in
        either direction. None without relays."""
        if not self.config.used:
            return None
        return RelayUse(worker < peer, RELAY_AFTER_S if dialable else 0.0)

    def relayed(self) -> list[Pair]:
        """Pairs that pass a relay now, each once."""
        pairs = ((min(pair), max(pair)) for pair, found in self.ways.items() if found.way == RELAYED)
        return list(dict.fromkeys(pairs))

    def lines(self, workers: Iterable[str], alone_bps: Mapping[Pair, float]) -> tuple[RelayLine, ...]:
        """What the relays of these workers' pairs carry in all: what is configured, else the most that one
        pair got alone (``alone_bps``); without either there is nothing to count with."""
        known, through = set(workers), dict[str, set[Pair]]()
        for (worker, peer), found in self.ways.items():
            if found.way == RELAYED and worker in known and peer in known:
                through.setdefault(found.relay, set()).update(((worker, peer), (peer, worker)))
        lines = []
        for relay, pairs in sorted(through.items()):
            most_bps = self.config.line_bps or max((alone_bps.get(pair, 0.0) for pair in pairs), default=0.0)
            if most_bps > 0.0:
                lines.append(RelayLine(f"relay {relay}", frozenset(pairs), most_bps))
        return tuple(lines)
