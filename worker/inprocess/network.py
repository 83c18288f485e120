"""Simulated time of an exchange: messages over links with a rate and a delay.

A rank sends one message after another over its uplink and takes them one after another from its downlink; a
message occupies both at the rate of the slower, and arrives one delay after it was sent. Times are seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.exchange.round import CollectiveRun, Message


@dataclass
class SimulatedNetwork:
    """Links of ranks 0..n-1. ``rates``: [n][n] bytes/s from row to column; ``delay_s`` of every link; ``up``
    and ``down``: bytes/s that all links of a rank share (none: no such bound). ``clock``: [n], when each rank
    is free; ``carry`` moves it, and whoever computes."""

    rates: Sequence[Sequence[float]]
    delay_s: float = 0.0
    up: Sequence[float] = ()
    down: Sequence[float] = ()
    clock: list[float] = field(default_factory=list)
    _up_free: list[float] = field(default_factory=list)
    _down_free: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = len(self.rates)
        self.clock = self.clock or [0.0] * size
        self._up_free, self._down_free = [0.0] * size, [0.0] * size

    def carry(self, runs: Mapping[int, CollectiveRun]) -> None:
        """Deliver messages among ``runs``, each of which begins when its rank's clock says; moves the
        clocks to when each has finished. ValueError for ranks that wait for
        what nobody sends."""
        numbers = count()
        arrivals: list[tuple[float, int, Message]] = []

        def send(messages: Sequence[Message], at_s: float) -> None:
            for message in messages:
                heapq.heappush(arrivals, (self._sent(message, at_s), next(numbers), message))

        for rank, run in sorted(runs.items(), key=lambda item: self.clock[item[0]]):
            send(run.start(), self.clock[rank])
        while arrivals:
            at_s, _, message = heapq.heappop(arrivals)
            run = runs[message.target]
            was_finished = run.finished
            now_s = max(at_s, self.clock[message.target]) if not was_finished else at_s
            send(run.receive(message), now_s)
            if not was_finished:
                self.clock[message.target] = now_s
        stuck = sorted(rank for rank, run in runs.items() if not run.finished)
        if stuck:
            raise ValueError(f"ranks {stuck} wait for what nobody sends")

    def compute(self, rank: int, seconds: float) -> None:
        """Let ``rank`` be busy."""
        self.clock[rank] += seconds

    def _sent(self, message: Message, at_s: float) -> float:
        """When a message arrives that is handed over at ``at_s``."""
        source, target = message.source, message.target
        rate = self.rates[source][target]
        up = min(rate, self.up[source]) if self.up else rate
        down = min(rate, self.down[target]) if self.down else rate
        begin_s = max(at_s, self._up_free[source])
        self._up_free[source] = begin_s + message.wire_bytes / up
        first_s = max(begin_s + self.delay_s, self._down_free[target])
        last_s = max(first_s + message.wire_bytes / down, self._up_free[source] + self.delay_s)
        self._down_free[target] = last_s
        return last_s


def uniform_network(ranks: int, rate: float, delay_s: float = 0.0) -> SimulatedNetwork:
    """Network whose links, uplinks and downlinks all have ``rate`` bytes/s."""
    row = (rate,) * ranks
    return SimulatedNetwork((row,) * ranks, delay_s, row, row)
