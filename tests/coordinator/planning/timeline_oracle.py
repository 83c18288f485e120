"""An independent simulation of pipeline steps: communicating processes, written as generators.

It shares no code with coordinator/planning/costs/timeline.py and is built differently: stages, wires and the
coordinator are coroutines that wait for signals or for time, steps run back to back without any
reset, and the period is read off the coordinator's commits. Only the Workload is common. Its clock is
that of tests/sim, whose worlds decide what happens and not how long the actions of a step take.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from typing import Any

from atoll.microbatch import merged
from coordinator.planning.costs.workload import Workload
from tests.sim.clock import Clock

Process = Generator[Any, None, None]


class Signal:
    """Fires once."""

    def __init__(self) -> None:
        self.fired = False
        self.waiting: list[Process] = []

    def fire(self, clock: Clock) -> None:
        self.fired = True
        for process in self.waiting:
            advance(clock, process)
        self.waiting.clear()


def advance(clock: Clock, process: Process) -> None:
    """Run a process until it waits: it yields a Signal, or seconds."""
    for wish in process:
        if not isinstance(wish, Signal):
            clock.after(wish, partial(advance, clock, process))
        elif not wish.fired:
            wish.waiting.append(process)
        else:
            continue
        return


class Line:
    """A first-in-first-out resource: whoever's head comes first is served first, at the full rate."""

    def __init__(self) -> None:
        self.free_at = 0.0


class Bundle:
    def __init__(self, rank: int, bits: float, messages: int, arrived: Signal) -> None:
        self.rank, self.bits, self.messages, self.arrived = rank, bits, messages, arrived


class Wire:
    """One ordered pair of stages; its sender picks the most urgent waiting bundle."""

    def __init__(self, clock: Clock, work: Workload, pair: tuple[int, int], lines: dict[str, Line]) -> None:
        self.clock, self.work = clock, work
        self.route = work.routes[pair]
        self.lines = lines
        self.waiting: list[Bundle] = []
        self.idle = True

    def put(self, bundle: Bundle) -> None:
        self.waiting.append(bundle)
        if self.idle:
            self.idle = False
            advance(self.clock, self.serve())

    def serve(self) -> Process:
        clock = self.clock
        while self.waiting:
            urgent = min(self.waiting, key=lambda b: b.rank)  # the first among equals
            self.waiting.remove(urgent)
            chunks = -(-urgent.bits // (8 * self.work.wire.piece_bytes))
            pieces = int(max(1, min(self.work.wire.pieces, chunks))) if self.meets_others() else 1
            for _ in range(pieces):
                tail = yield from self.carry(urgent.bits / pieces)
                yield tail - clock.now_s
            yield urgent.messages * self.work.wire.per_message_s
            clock.after(self.route.latency_s, partial(urgent.arrived.fire, clock))
        self.idle = True

    def meets_others(self) -> bool:
        """Whether another pair of stages uses a line on this way."""
        names = {name for name, _ in self.route.resources}
        others = (route for route in self.work.routes.values() if route is not self.route)
        return any(name in names for route in others for name, _ in route.resources)

    def carry(self, bits: float) -> Generator[Any, None, float]:
        """Pass every line in turn; returns when the last bit has passed the slowest."""
        clock = self.clock
        tail = clock.now_s
        for name, rate in self.route.resources:
            line = self.lines[name]
            wait = max(0.0, line.free_at - clock.now_s)
            line.free_at = clock.now_s + wait + bits / rate
            tail = max(tail, line.free_at)
            if wait:
                yield wait
        return tail


class Pipeline:
    """All processes of a run of several steps."""

    def __init__(self, work: Workload, steps: int) -> None:
        self.work, self.steps = work, steps
        self.clock = Clock(seed=0, now_s=0.0)
        lines: dict[str, Line] = defaultdict(Line)
        self.wires = {pair: Wire(self.clock, work, pair, lines) for pair in work.routes}
        self.signals: dict[tuple[Any, ...], Signal] = defaultdict(Signal)
        self.commits: list[float] = []

    def send(
        self, rank: int, pair: tuple[int, int], n_bytes: int, messages: int, key: tuple[Any, ...]
    ) -> None:
        if pair not in self.wires:  # two pieces of one device
            self.signals[key].fire(self.clock)
            return
        bits = (n_bytes + messages * self.work.wire.header_bytes) * 8.0
        self.wires[pair].put(Bundle(rank, bits, messages, self.signals[key]))

    def later(self, delay_s: float, key: tuple[Any, ...]) -> None:
        self.clock.after(delay_s, partial(self.signals[key].fire, self.clock))

    def device(self, stages: tuple[int, ...]) -> Process:
        work = self.work
        if work.turns:
            lists = {s: iter(work.stages[s].actions) for s in stages}
            order = work.turns[work.together.index(stages)]
            turns = tuple(replace(next(lists[s]), piece=stages.index(s)) for s in order)
        else:
            turns = merged([work.stages[s].actions for s in stages])
        for step in range(self.steps):
            for s in stages:
                yield self.signals["begin", step, s]
            yield sum(work.stages[s].apply_s for s in stages)
            debt: dict[int, list[tuple[int, float]]] = {
                s: [] for s in stages
            }  # of weight gradients: (micro-batch, seconds), ascending
            of_piece = {s: len(work.stages[s].actions) for s in stages}
            for turn, action in enumerate(turns):
                m, s = action.micro, stages[action.piece]
                load = work.stages[s]
                of_piece[s] -= 1
                if action.work == "W":
                    if debt[s] and debt[s][0][0] == m:
                        yield debt[s].pop(0)[1]
                    if not of_piece[s]:
                        self.signals["computed", step, s].fire(self.clock)
                    continue
                hops, rank, way = (work.forward, 3, "F") if action.work == "F" else (work.backward, 0, "B")
                for hop in hops:
                    if hop.target == s:
                        came = self.signals[way, step, hop.source, s, m]
                        while any(debt.values()) and not came.fired:
                            _, owing = min((debt[t][0][0], t) for t in stages if debt[t])
                            micro, rest = debt[owing].pop(0)
                            piece = work.stages[owing].weights_s / work.stages[owing].pieces
                            if rest > 1.5 * piece:
                                debt[owing].insert(0, (micro, rest - piece))
                                rest = piece
                            yield rest
                        yield came
                took = load.forward_s if action.work == "F" else load.backward_s
                if action.work == "I":
                    took += load.apart_s - load.weights_s
                    debt[s].append((m, load.weights_s))
                yield took + load.action_s
                for hop in hops:
                    if hop.source == s:
                        key = (way, step, s, hop.target, m)
                        self.send(rank, (s, hop.target), hop.n_bytes, hop.messages, key)
                if not of_piece[s]:
                    self.signals["computed", step, s].fire(self.clock)
                if turn + 1 < len(turns):
                    yield load.bytes_s
            for s in stages:
                for i, tied in enumerate(work.tied):
                    if s in tied.holders:
                        yield self.signals["total", step, i, s]
                self.later(work.stages[s].commit_latency_s, ("ready", step, s))

    def tied_holder(self, step: int, i: int, s: int) -> Process:
        tied = self.work.tied[i]
        at = tied.holders.index(s)
        yield self.signals["computed", step, s]
        if at + 1 < len(tied.holders):
            yield self.signals["partial", step, i, s]
        if at:
            below = tied.holders[at - 1]
            self.send(1, (s, below), tied.blocks * tied.n_bytes, tied.blocks, ("partial", step, i, below))
            return
        self.signals["total", step, i, s].fire(self.clock)
        for other in tied.holders[1:]:
            self.send(2, (s, other), tied.n_bytes, 1, ("total", step, i, other))

    def coordinator(self) -> Process:
        everyone = range(len(self.work.stages))
        for step in range(self.steps):
            for s in everyone:
                load = self.work.stages[s]
                self.later(load.commit_latency_s, ("begin", step, s))
            for s in everyone:
                yield self.signals["ready", step, s]
            yield self.work.wire.commit_s
            self.commits.append(self.clock.now_s)

    def period(self) -> float:
        """Seconds from one commit to the next, once the first step is over."""
        clock = self.clock
        for step in range(self.steps):
            for i, tied in enumerate(self.work.tied):
                for s in tied.holders:
                    advance(clock, self.tied_holder(step, i, s))
        for stages in self.work.together:
            advance(clock, self.device(stages))
        advance(clock, self.coordinator())
        while clock.step(math.inf):
            pass
        assert len(self.commits) == self.steps, "the pipeline stands still"
        return (self.commits[-1] - self.commits[0]) / (self.steps - 1)


def step_seconds(work: Workload, steps: int = 4) -> float:
    """Steady-state step time of ``work``."""
    return Pipeline(work, steps).period()
