"""Event simulation of one training step of a plan: when every micro-batch runs and is sent.

Stages run their actions in order; an action starts when the stage is free and all it needs has arrived;
under a quota of CPU time one that starts after a rest ends a little sooner. Weights' gradients that were
deferred are taken in pieces whenever a stage would wait, the rest when their turn comes. What a stage
produces in an action goes out when the action ends, as one bundle to each peer; sends overlap compute, and
the stage is free once it has handled the bytes. Each ordered pair of stages is one wire that carries one
bundle at a time, gradients before activations. A bundle reserves, first in first out, each resource on its
way for size / rate from the moment its head arrives there; it has arrived when its tail has passed the
slowest, a fixed time for each message and one latency later. Flows that share a line get it in turns, not
one after the other: where another pair uses a resource on its way, a bundle passes in equal pieces of about
a chunk, each when the one before has passed. The step ends when every stage has all gradients, tied
parameters exchanged, and the coordinator's commit has come back.

Every step starts with all wires empty, and stages start it one commit latency plus the optimizer
step after the commit, so the time from commit to commit is the steady state's step time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from atoll.microbatch import Work

if TYPE_CHECKING:
    from coordinator.traffic import Hop, TiedExchange
    from coordinator.workload import Route, Workload


VARIATION = 0.2
"""Standard deviation of the logarithm of a forward's or backward's time; 0.09 to 0.28 in the lab."""
MOST_STEPS = 16
MOST_TURNS = 2048  # of a stage with a micro-batch, in all these steps
FINE_PIECES = 6  # of a bundle of 128 KiB: chunks have 16 to 32


Factors = Sequence[Sequence[float]]
"""By stage and action: how much longer than usual it takes."""


class Cargo(IntEnum):
    """What a bundle carries, in the order of priority on a wire."""

    BACKWARD = 0
    TIED_PARTIAL = 1
    TIED_TOTAL = 2
    FORWARD = 3


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of the Gantt chart; times from the commit before the step."""

    kind: str  # F | B | I | W | send-F | send-B | send-tied | opt
    source: int  # stage
    target: int  # stage; equal to source for compute
    micro: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What one wire did in a step."""

    source: int  # stage
    target: int
    n_bytes: int
    busy_s: float  # its bytes at the route's slowest rate, plus per-message time
    under_way_s: float = 0.0  # from when a bundle begins to leave until it has left, all bundles


@dataclass(frozen=True, slots=True)
class Timeline:
    """Outcome of a simulated step; seconds."""

    step_s: float
    ready_s: tuple[float, ...]  # by stage: all gradients in place
    compute_s: tuple[float, ...]  # by stage, optimizer included
    links: tuple[LinkUse, ...]
    resources: tuple[tuple[str, float], ...]  # (name, busy seconds), shared ones and pairs
    commit_s: float  # from the last stage's ready to the last stage's start
    spans: tuple[Span, ...] = ()

    def busy_share(self, stage: int) -> float:
        return self.compute_s[stage] / self.step_s if self.step_s else 0.0


_Bundle = tuple[Cargo, int, float, int]  # cargo, micro or index of the tied parameter, bits, messages

_DONE, _RESOURCE, _FREE, _ARRIVED, _START = range(5)


class _Wire:
    """One ordered pair of stages."""

    __slots__ = (
        "busy",
        "latency_s",
        "left",
        "name",
        "pieces",
        "private_s",
        "queue",
        "shared",
        "source",
        "target",
        "under_way_s",
    )

    def __init__(self, pair: tuple[int, int], route: Route, shared: dict[str, int]) -> None:
        self.source, self.target = pair
        self.latency_s = route.latency_s
        self.busy = False
        self.under_way_s = 0.0
        self.queue: list[tuple[int, int, _Bundle]] = []
        # A resource that no other wire uses is never contended: only its rate matters, and from
        # when the head reaches it, which is when it has passed the shared one before.
        self.private_s = 0.0  # seconds a bit, before the first shared resource
        self.shared: list[tuple[int, float, float]] = []  # resource, its and later private seconds
        for name, rate in route.resources:
            if name in shared:
                self.shared.append((shared[name], 1.0 / rate, 0.0))
            elif self.shared:
                resource, own, after = self.shared[-1]
                self.shared[-1] = (resource, own, max(after, 1.0 / rate))
            else:
                self.private_s = max(self.private_s, 1.0 / rate)
        self.pieces = 1  # of the bundle under way, and how many of them are still to pass
        self.left = 0


class _Simulation:
    """State of one run; ``run`` may be called once."""

    def __init__(self, work: Workload, keep_spans: bool, factors: Factors | None = None) -> None:
        self.work, self.factors = work, factors
        self.n_micro = work.n_micro
        n = len(work.stages)
        self.heap: list[tuple[float, int, int, int, int, object]] = []
        self.sequence = 0
        self.spans: list[Span] | None = [] if keep_spans else None
        self._build_wires()
        self.out_forward = _by_source(work.forward, n)
        self.out_backward = _by_source(work.backward, n)
        self.need_forward = _count_into(work.forward, n)
        self.need_backward = _count_into(work.backward, n)
        self.got_forward = [[0] * self.n_micro for _ in range(n)]
        self.got_backward = [[0] * self.n_micro for _ in range(n)]
        self.next_action = [0] * n
        self.running = [True] * n  # until the commit of the step before has arrived
        self.rests_since = [0.0] * n
        self.owed_s = [0.0] * n  # of weights' gradients that were deferred
        self.owed = [0] * n  # micro-batches whose turn for that has not come
        self.filling = [False] * n  # with a piece of them, for want of anything else
        self.compute_done: list[float | None] = [None] * n
        self.partial_in = {(i, t.holders[-1]) for i, t in enumerate(work.tied)}
        self.ready: list[float] = [0.0] * n

    def _build_wires(self) -> None:
        users: dict[str, int] = {}
        for route in self.work.routes.values():
            for name, _ in route.resources[:-1]:
                users[name] = users.get(name, 0) + 1
        shared = {name: i for i, name in enumerate(n for n, count in users.items() if count > 1)}
        self.resource_free = [0.0] * len(shared)
        self.wires = {
            (source, target): _Wire((source, target), way, shared)
            for (source, target), way in self.work.routes.items()
        }

    def run(self) -> None:
        for s, stage in enumerate(self.work.stages):
            self._push(stage.commit_latency_s + stage.apply_s, _START, s, 0, None)
            if self.spans is not None and stage.apply_s:
                begin = stage.commit_latency_s
                self.spans.append(Span("opt", s, s, 0, begin, begin + stage.apply_s))
        heap = self.heap
        while heap:
            now, _, kind, a, b, extra = heappop(heap)
            if kind == _DONE:
                self._action_done(now, a)
            elif kind == _RESOURCE:
                self._pass(now, *extra)  # type: ignore[misc]
            elif kind == _FREE:
                self._wire_free(now, extra)  # type: ignore[arg-type]
            elif kind == _ARRIVED:
                self._arrived(now, a, b, extra)  # type: ignore[arg-type]
            else:
                self._free(now, a)

    def _push(self, at: float, kind: int, a: int, b: int, extra: object) -> None:
        self.sequence += 1
        heappush(self.heap, (at, self.sequence, kind, a, b, extra))

    # ------------------------------------------------------------ compute

    def _try_start(self, now: float, s: int) -> None:
        stage = self.work.stages[s]
        at = self.next_action[s]
        if self.running[s] or at >= len(stage.actions):
            return
        action = stage.actions[at]
        work, micro = action.work, action.micro
        if work is Work.FORWARD:
            here = self.got_forward[s][micro] >= self.need_forward[s]
            took = stage.forward_s + stage.action_s
        elif work is Work.WEIGHT:
            here = True
            self.owed[s] -= 1
            took = max(0.0, self.owed_s[s] - self.owed[s] * stage.weights_s)
            self.owed_s[s] -= took
        else:
            here = self.got_backward[s][micro] >= self.need_backward[s]
            took = stage.backward_s if work is Work.BACKWARD else stage.input_s + stage.apart_s
            took += stage.action_s
        if self.factors is not None:
            took *= self.factors[s][at]
        if not here:
            if self.owed_s[s] <= 0.0:
                return
            work, took = Work.WEIGHT, min(self.owed_s[s], stage.weights_s / stage.pieces)
            self.owed_s[s] -= took
            self.filling[s] = True
        took -= stage.lent_s(took, now - self.rests_since[s])
        self.running[s] = True
        if self.spans is not None and took > 0.0:
            self.spans.append(Span(work.value, s, s, micro, now, now + took))
        self._push(now + took, _DONE, s, 0, None)

    def _action_done(self, now: float, s: int) -> None:
        stage = self.work.stages[s]
        if self.filling[s]:
            self.filling[s] = False
            self._free(now, s)
            return
        action = stage.actions[self.next_action[s]]
        self.next_action[s] += 1
        if action.work is Work.FORWARD:
            for hop in self.out_forward[s]:
                self._send(
                    now, hop.source, hop.target, Cargo.FORWARD, action.micro, hop.n_bytes, hop.messages
                )
        elif action.work is not Work.WEIGHT:
            if action.work is Work.INPUT:
                self.owed_s[s] += stage.weights_s
                self.owed[s] += 1
            for hop in self.out_backward[s]:
                self._send(
                    now, hop.source, hop.target, Cargo.BACKWARD, action.micro, hop.n_bytes, hop.messages
                )
        if self.next_action[s] == len(stage.actions):
            self.compute_done[s] = now
            self.ready[s] = now
            for i, tied in enumerate(self.work.tied):
                self._fold_tied(now, s, i, tied)
        elif stage.bytes_s and action.work is not Work.WEIGHT:
            self._push(now + stage.bytes_s, _START, s, 0, None)
        else:
            self._free(now, s)

    def _free(self, now: float, s: int) -> None:
        self.running[s] = False
        self.rests_since[s] = now
        self._try_start(now, s)

    def _fold_tied(self, now: float, s: int, i: int, tied: TiedExchange) -> None:
        """Send the partial sum on when both this stage's own and the later holders' are there."""
        if self.compute_done[s] is None or (i, s) not in self.partial_in:
            return
        at = tied.holders.index(s)
        if at:
            self._send(now, s, tied.holders[at - 1], Cargo.TIED_PARTIAL, i, tied.n_bytes, 1)
            return
        self.ready[s] = max(self.ready[s], now)
        for other in tied.holders[1:]:
            self._send(now, s, other, Cargo.TIED_TOTAL, i, tied.n_bytes, 1)

    # ------------------------------------------------------------ wires

    def _send(
        self, now: float, source: int, target: int, cargo: Cargo, index: int, n_bytes: int, messages: int
    ) -> None:
        wire = self.wires[source, target]
        bundle = (cargo, index, 8.0 * (n_bytes + messages * self.work.wire.header_bytes), messages)
        if wire.busy:
            self.sequence += 1
            heappush(wire.queue, (cargo, self.sequence, bundle))
        else:
            self._begin(now, wire, bundle)

    def _begin(self, now: float, wire: _Wire, bundle: _Bundle) -> None:
        wire.busy = True
        wire.pieces = wire.left = self.work.wire.pieces_of(bundle[2] / 8.0) if wire.shared else 1
        self._pass(now, wire, bundle, 0, now, now + bundle[2] / wire.pieces * wire.private_s)

    def _pass(self, now: float, wire: _Wire, bundle: _Bundle, at: int, sent_s: float, finish: float) -> None:
        """A piece's head reaches resource ``at`` of its way; its tail has left at ``finish``."""
        bits = bundle[2] / wire.pieces
        while at < len(wire.shared):
            resource, seconds, private_s = wire.shared[at]
            start = max(now, self.resource_free[resource])
            self.resource_free[resource] = free = start + bits * seconds
            finish = max(finish, free, start + bits * private_s)
            at += 1
            if start > now and at < len(wire.shared):
                self._push(start, _RESOURCE, 0, 0, (wire, bundle, at, sent_s, finish))
                return
        wire.left -= 1
        if wire.left:
            self._push(finish, _RESOURCE, 0, 0, (wire, bundle, 0, sent_s, finish + bits * wire.private_s))
            return
        finish += bundle[3] * self.work.wire.per_message_s
        wire.under_way_s += finish - sent_s
        if self.spans is not None:
            kind = {Cargo.FORWARD: "send-F", Cargo.BACKWARD: "send-B"}.get(bundle[0], "send-tied")
            self.spans.append(Span(kind, wire.source, wire.target, bundle[1], sent_s, finish))
        self._push(finish, _FREE, 0, 0, wire)
        self._push(finish + wire.latency_s, _ARRIVED, wire.target, bundle[1], bundle[0])

    def _wire_free(self, now: float, wire: _Wire) -> None:
        wire.busy = False
        if wire.queue:
            _, _, bundle = heappop(wire.queue)
            self._begin(now, wire, bundle)

    def _arrived(self, now: float, s: int, index: int, cargo: Cargo) -> None:
        if cargo is Cargo.FORWARD:
            self.got_forward[s][index] += 1
            self._try_start(now, s)
        elif cargo is Cargo.BACKWARD:
            self.got_backward[s][index] += 1
            self._try_start(now, s)
        elif cargo is Cargo.TIED_PARTIAL:
            self.partial_in.add((index, s))
            self._fold_tied(now, s, index, self.work.tied[index])
        else:
            self.ready[s] = max(self.ready[s], now)


def simulate(work: Workload, keep_spans: bool = False) -> Timeline:
    """Simulate one step of ``work``.

    Raises ValueError when the actions cannot finish (a schedule that waits for itself).
    Cost: a few heap operations for each action and bundle; 4 stages x 16 micro-batches take
    about two milliseconds.
    """
    run = _finished(work, keep_spans)
    step = _step_s(run)
    begins = max(stage.commit_latency_s for stage in work.stages)
    return Timeline(
        step_s=step,
        ready_s=tuple(run.ready),
        compute_s=tuple(
            work.n_micro * (stage.forward_s + stage.backward_s + (stage.apart_s if stage.defers else 0.0))
            + stage.apply_s
            for stage in work.stages
        ),
        links=tuple(
            replace(use, under_way_s=run.wires[use.source, use.target].under_way_s) for use in link_uses(work)
        ),
        resources=resource_seconds(work),
        commit_s=step - max(run.ready) + begins,
        spans=tuple(sorted(run.spans, key=lambda s: s.start_s)) if run.spans else (),
    )


def step_seconds(work: Workload) -> float:
    """``simulate(work).step_s``, for searches that need no more."""
    return _step_s(_finished(work, False))


def expected_step_s(work: Workload, simulated_s: float) -> float:
    """Seconds of a step whose forwards and backwards vary, where that matters; ``simulated_s``: of one whose
    do not.

    Where several pairs of stages share a line, who comes first decides who waits, and with times that never
    vary the same order comes back in every round: eight stages in join order across two gateways took 18.9
    or 24.8 s by how finely their flows took turns, and 21 to 25 s in the lab. The mean over some steps of
    forwards and backwards that vary as they do there does not hang on such a pattern.
    """
    if not _Simulation(work, False).resource_free:
        return simulated_s
    draw = np.random.default_rng(MOST_STEPS)  # the same steps every time
    finer = replace(work, wire=replace(work.wire, pieces=FINE_PIECES))
    # Long pipelines take longer to simulate, and average more by themselves.
    steps = max(1, min(MOST_STEPS, MOST_TURNS // (work.n_micro * len(work.stages))))
    mean = -(VARIATION**2) / 2  # of the logarithm: of the factors it is 1

    def varied_s() -> float:
        factors = [draw.lognormal(mean, VARIATION, len(stage.actions)).tolist() for stage in work.stages]
        return _step_s(_finished(finer, False, factors))

    return statistics.mean(varied_s() for _ in range(steps))


def _finished(work: Workload, keep_spans: bool, factors: Factors | None = None) -> _Simulation:
    run = _Simulation(work, keep_spans, factors)
    run.run()
    stuck = [s for s, done in enumerate(run.compute_done) if done is None]
    if stuck:
        raise ValueError(f"schedule deadlocks: stages {stuck} never finish")
    return run


def _step_s(run: _Simulation) -> float:
    """The last stage's ready message at the coordinator, plus the commit."""
    ready = zip(run.ready, run.work.stages, strict=True)
    return max(at + stage.commit_latency_s for at, stage in ready) + run.work.wire.commit_s


def link_uses(work: Workload) -> tuple[LinkUse, ...]:
    """Bytes and busy seconds of every wire in a step, by stage pair."""
    found = []
    for (source, target), route in work.routes.items():
        n_bytes, messages = step_bytes(work, source, target)
        bits = 8.0 * (n_bytes + messages * work.wire.header_bytes)
        busy = bits / route.rate_bps + messages * work.wire.per_message_s
        found.append(LinkUse(source, target, n_bytes, busy))
    return tuple(found)


def step_bytes(work: Workload, source: int, target: int) -> tuple[int, int]:
    """(payload bytes, messages) that one wire carries in a step."""
    hops = [h for h in (*work.forward, *work.backward) if h.source == source and h.target == target]
    n_bytes = work.n_micro * sum(h.n_bytes for h in hops)
    messages = work.n_micro * sum(h.messages for h in hops)
    for tied in work.tied:
        chain = tied.holders
        downs = zip(chain[1:], chain[:-1], strict=True)
        times = ((source, target) in downs) + (source == chain[0] and target in chain[1:])
        n_bytes += times * tied.n_bytes
        messages += times
    return n_bytes, messages


def resource_seconds(work: Workload) -> tuple[tuple[str, float], ...]:
    """(resource, seconds that a step's bytes occupy it), uplinks and pair rates."""
    busy: dict[str, float] = {}
    for (source, target), route in work.routes.items():
        n_bytes, messages = step_bytes(work, source, target)
        bits = 8.0 * (n_bytes + messages * work.wire.header_bytes)
        for name, rate in route.resources:
            busy[name] = busy.get(name, 0.0) + bits / rate
    return tuple(sorted(busy.items()))


def _by_source(hops: Sequence[Hop], n: int) -> list[list[Hop]]:
    found: list[list[Hop]] = [[] for _ in range(n)]
    for hop in hops:
        found[hop.source].append(hop)
    return found


def _count_into(hops: Sequence[Hop], n: int) -> list[int]:
    counts = [0] * n
    for hop in hops:
        counts[hop.target] += 1
    return counts
