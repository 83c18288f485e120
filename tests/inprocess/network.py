"""Simulated time of an exchange: messages over links with a rate and a delay.

A pair's messages go one after another at the pair's rate; where a rank has an uplink or a downlink of its
own, its messages to all others also go one after another there, and so do those of several ranks that leave
or enter by one line. It arrives one delay after it was sent.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.exchange.round import CollectiveRun, Message


@dataclass
class SharedLine:
    """Bytes/s that several ranks share towards all others, each direction its own."""

    members: frozenset[int]
    up: float
    down: float
    up_free_s: float = 0.0
    down_free_s: float = 0.0


@dataclass
class SimulatedNetwork:
    """Links of ranks 0..n-1. ``rates``: [n][n] bytes/s from row to column; ``delay_s`` of every link; ``up``
    and ``down``: bytes/s that all links of a rank share (none: no such bound); ``lines``: of several ranks.
    ``clock``: [n], when each rank is free; ``carry`` moves it, and whoever computes."""

    rates: Sequence[Sequence[float]]
    delay_s: float = 0.0
    up: Sequence[float] = ()
    down: Sequence[float] = ()
    clock: list[float] = field(default_factory=list)
    lines: Sequence[SharedLine] = ()
    _up_free: list[float] = field(default_factory=list)
    _down_free: list[float] = field(default_factory=list)
    _pair_free: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = len(self.rates)
        self.clock = self.clock or [0.0] * size
        self._up_free, self._down_free = [0.0] * size, [0.0] * size

    def carry(self, runs: Mapping[int, CollectiveRun]) -> None:
        """Deliver messages among ``runs``, each of which begins when its rank's clock says; moves the
        clocks to when each has finished. ValueError for ranks that wait for what nobody sends."""
        self.carry_all([runs])

    def carry_all(self, exchanges: Sequence[Mapping[int, CollectiveRun]]) -> None:
        """As ``carry``, of several exchanges at once."""
        numbers = count()
        arrivals: list[tuple[float, int, int, Message]] = []
        done_s = list(self.clock)

        def send(messages: Sequence[Message], exchange: int, at_s: float) -> None:
            for message in messages:
                heapq.heappush(arrivals, (self._sent(message, at_s), next(numbers), exchange, message))

        starts = [(self.clock[rank], e, rank) for e, runs in enumerate(exchanges) for rank in runs]
        for at_s, exchange, rank in sorted(starts):
            send(exchanges[exchange][rank].start(), exchange, at_s)
        while arrivals:
            at_s, _, exchange, message = heapq.heappop(arrivals)
            run = exchanges[exchange][message.target]
            was_finished = run.finished
            now_s = max(at_s, self.clock[message.target])
            send(run.receive(message), exchange, now_s)
            if not was_finished:
                done_s[message.target] = max(done_s[message.target], now_s)
        self.clock = done_s
        stuck = sorted(rank for runs in exchanges for rank, run in runs.items() if not run.finished)
        if stuck:
            raise ValueError(f"ranks {stuck} wait for what nobody sends")

    def compute(self, rank: int, seconds: float) -> None:
        """Let ``rank`` be busy."""
        self.clock[rank] += seconds

    def _sent(self, message: Message, at_s: float) -> float:
        """When a message arrives that is handed over at ``at_s``."""
        pair = message.source, message.target
        up = self.up[message.source] if self.up else inf
        down = self.down[message.target] if self.down else inf
        rate = min(self.rates[message.source][message.target], up, down)
        leaves = [line for line in self.lines if line.members & {*pair} == {message.source}]
        enters = [line for line in self.lines if line.members & {*pair} == {message.target}]
        free_s = (
            self._pair_free.get(pair, 0.0),
            self._up_free[message.source],
            *(o.up_free_s for o in leaves),
        )
        begin_s = max(at_s, *free_s)
        self._pair_free[pair] = begin_s + message.wire_bytes / rate
        self._up_free[message.source] = begin_s + message.wire_bytes / up
        for line in leaves:
            line.up_free_s = begin_s + message.wire_bytes / line.up
        left_s = max(self._pair_free[pair], *(line.up_free_s for line in leaves), 0.0)
        turn_s = self._down_free[message.target] + message.wire_bytes / down
        for line in enters:
            turn_s = max(turn_s, line.down_free_s + message.wire_bytes / line.down)
        last_s = max(left_s + self.delay_s, turn_s)
        self._down_free[message.target] = last_s if down < inf else 0.0
        for line in enters:
            line.down_free_s = last_s
        return last_s


def uniform_network(ranks: int, rate: float, delay_s: float = 0.0) -> SimulatedNetwork:
    """Network whose links, uplinks and downlinks all have ``rate`` bytes/s."""
    row = (rate,) * ranks
    return SimulatedNetwork((row,) * ranks, delay_s, row, row)
