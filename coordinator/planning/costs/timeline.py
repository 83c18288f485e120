"""Event simulation of one training step of a plan: when every micro-batch runs and is sent.

Stages run their actions in order; an action starts when the stage is free and all it needs has arrived.
Where a device has several stages these take turns (``_InTurn``) and hand each other what they make at once.
Under a quota of CPU time one that starts after a rest ends a little sooner. Weight gradients that were
deferred are taken in pieces whenever a stage would wait, the rest when their turn comes. What a stage
produces in an action goes out when the action ends, as one bundle to each peer; sends overlap compute, and
the stage is free once it has handled the bytes. Each ordered pair of stages is one wire that carries one
bundle at a time, gradients before activations. A bundle reserves, first in first out, each resource on its
way for size / rate from the moment its head arrives there. It has arrived when its tail has passed the
slowest, a fixed time for each message and one latency later. Flows that share a link get it in turns, not
one after the other: where another pair uses a resource on its way, a bundle passes in equal pieces of about
a chunk, each when the one before has passed. The step ends when every stage has all gradients, tied
parameters exchanged, and the coordinator's commit has come back.

Every step starts with all wires empty, and stages start it one commit latency plus the optimizer
step after the commit, so the time from commit to commit is the steady state's step time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from heapq import heappop, heappush
from math import ceil, inf
from typing import TYPE_CHECKING

import numpy as np

from atoll.microbatch import Work, merged

if TYPE_CHECKING:
    from coordinator.planning.costs.traffic import Hop, TiedExchange
    from coordinator.planning.costs.workload import Route, StageLoad, Workload


VARIATION = 0.2
"""Standard deviation of the logarithm of a forward's or backward's time; 0.09 to 0.28 in the lab."""
MOST_STEPS = 16
MOST_TURNS = 2048  # of a stage with a micro-batch, in all these steps
FINE_PIECES = 6  # of a bundle of 128 KiB: chunks have 16 to 32


Factors = Sequence[Sequence[float]]
"""Factors by stage and action: how much longer than usual it takes."""


class Cargo(IntEnum):
    """Content of a bundle, in the order of priority on a wire."""

    BACKWARD = 0
    TIED_PARTIAL = 1
    TIED_TOTAL = 2
    FORWARD = 3


@dataclass(frozen=True, slots=True)
class Span:
    """Bar of the Gantt chart; times from the commit before the step."""

    kind: str  # F | B | I | W | send-F | send-B | send-tied | opt
    source: int  # stage
    target: int  # stage; equal to source for compute
    micro: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Use of one wire in a step."""

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

_PIECE, _FREE, _TIED, _DONE = range(4)
"""Kinds of simulation events: a piece of a bundle, a wire, a tied tensor, an action; at one time in this
order, so that what is under way on a shared link takes its turn before what an action sends. Where such a
link is the bottleneck, actions often end just when a piece has passed."""


class _Wire:
    """An ordered pair of stages."""

    __slots__ = (
        "alone",
        "free_s",
        "latency_s",
        "left",
        "pieces",
        "private_s",
        "queue",
        "shared",
        "source",
        "target",
        "under_way_s",
    )

    def __init__(self, pair: tuple[int, int], route: Route, shared: dict[str, int], cargoes: int) -> None:
        self.source, self.target = pair
        self.latency_s = route.latency_s
        self.free_s = 0.0  # from when it can take the next bundle; inf while that is not known
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
        # Then bundles pass in the order in which they were sent, so that arrivals are known at once.
        self.alone = not self.shared and cargoes == 1
        self.pieces = 1  # of the bundle under way, and how many of them are still to pass
        self.left = 0


_Out = tuple[_Wire, float, int]  # bits and messages of a hop


class _Stage:
    """Progress of a stage in its list of actions; ``turn`` is an index in it."""

    __slots__ = (
        "actions",
        "at",
        "backward_turns",
        "done_s",
        "factors",
        "forward_turns",
        "free_s",
        "here_s",
        "index",
        "lends",
        "load",
        "missing",
        "out_backward",
        "out_forward",
        "owed",
        "owed_s",
        "piece_s",
        "took_s",
        "waits",
    )

    def __init__(self, index: int, load: StageLoad, needs: tuple[int, int], factors: Sequence[float]) -> None:
        self.index, self.load, self.actions = index, load, load.actions
        self.factors = factors  # by turn; empty: all 1
        self.lends = load.quota.period_s > 0.0 and load.quota.cores < 1.0
        forward_s, backward_s = load.forward_s + load.action_s, load.backward_s + load.action_s
        if load.defers:
            backward_s = load.input_s + load.apart_s + load.action_s
        self.took_s: list[float] = []  # by turn; of weight gradients it is not known yet
        self.missing: list[int] = []  # bundles, by turn
        self.forward_turns: list[int] = []  # by micro-batch: every schedule takes them in ascending order
        self.backward_turns: list[int] = []
        forward, weight = Work.FORWARD, Work.WEIGHT
        for turn, action in enumerate(load.actions):
            if action.work is forward:
                self.forward_turns.append(turn)
                self.took_s.append(forward_s)
                self.missing.append(needs[0])
            elif action.work is weight:
                self.took_s.append(0.0)
                self.missing.append(0)
            else:
                self.backward_turns.append(turn)
                self.took_s.append(backward_s)
                self.missing.append(needs[1])
        if factors:
            self.took_s = [took * factor for took, factor in zip(self.took_s, factors, strict=True)]
        self.here_s = [0.0] * len(load.actions)  # when the last one arrived that is no longer missing
        self.at = 0  # its next turn, or the one that runs
        self.waits = False  # for something that is missing
        self.free_s = 0.0  # since when, if it waits
        self.owed_s = 0.0  # of weight gradients that were deferred
        self.owed = 0  # micro-batches whose turn for that has not come
        self.piece_s = load.weights_s / load.pieces  # in which they can be taken meanwhile
        self.done_s: float | None = None
        self.out_forward: list[_Out] = []
        self.out_backward: list[_Out] = []

    def fill(self, free_s: float, until_s: float, most_s: float = inf) -> float:
        """Take deferred weight gradients piece by piece until something arrives; when that ends."""
        took = min(self.owed_s, most_s, ceil((until_s - free_s) / self.piece_s) * self.piece_s)
        self.owed_s -= took
        return free_s + took

    @property
    def owes(self) -> int:
        """Micro-batches of which weight gradients are left to be taken."""
        # Sums of floats: a billionth of a micro-batch is none.
        return max(1, ceil(self.owed_s / self.load.weights_s - 1e-9)) if self.owed_s > 0.0 else 0

    def pay(self) -> float:
        """Seconds of what is left of the weight gradients whose turn has come."""
        self.owed -= 1
        took = max(0.0, self.owed_s - self.owed * self.load.weights_s)
        self.owed_s -= took
        return took


class _Simulation:
    """State of one run; ``run`` may be called once.

    What happens is kept in a heap only where its order matters: ends of actions, which send, and wires
    that are shared or carry more than one kind of cargo. Everything else follows from it at once.
    """

    def __init__(self, work: Workload, keep_spans: bool, factors: Factors | None = None) -> None:
        self.work = work
        self.per_message_s = work.wire.per_message_s
        self.heap: list[tuple[float, int, int, _Stage | _Wire, tuple[object, ...]]] = []
        self.sequence = 0
        self.spans: list[Span] | None = [] if keep_spans else None
        n = len(work.stages)
        needs = list(zip(_count_into(work.forward, n), _count_into(work.backward, n), strict=True))
        self.stages = [
            _Stage(s, load, needs[s], factors[s] if factors is not None else ())
            for s, load in enumerate(work.stages)
        ]
        self._build_wires()
        for hop in work.forward:
            if (hop.source, hop.target) in self.wires:
                self.stages[hop.source].out_forward.append(self._out(hop))
        for hop in work.backward:
            if (hop.source, hop.target) in self.wires:
                self.stages[hop.source].out_backward.append(self._out(hop))
        self.partial_in = {(i, t.holders[-1]) for i, t in enumerate(work.tied)}
        self.ready: list[float] = [0.0] * n

    def _build_wires(self) -> None:
        work = self.work
        users: dict[str, int] = {}
        for route in work.routes.values():
            for name, _ in route.resources if self.work.several else route.resources[:-1]:
                users[name] = users.get(name, 0) + 1
        shared = {name: i for i, name in enumerate(n for n, count in users.items() if count > 1)}
        self.resource_free = [0.0] * len(shared)
        ahead = {(hop.source, hop.target) for hop in work.forward}
        back = {(hop.source, hop.target) for hop in work.backward}
        # A stage sends tensors that are tied when it has heard of others, not in the order of its actions.
        tied = {way for exchange in work.tied for way in exchange.ways}
        self.wires = {
            pair: _Wire(pair, way, shared, (pair in ahead) + (pair in back) + 2 * (pair in tied))
            for pair, way in work.routes.items()
        }

    def _out(self, hop: Hop) -> _Out:
        bits = self.work.wire.bits_of(hop.n_bytes, hop.messages)
        return self.wires[hop.source, hop.target], bits, hop.messages

    def run(self) -> None:
        self._begin_step()
        heap = self.heap
        while heap:
            now, kind, _, what, more = heappop(heap)
            if kind == _DONE:
                self._action_done(now, what)  # type: ignore[arg-type]
            elif kind == _PIECE:
                self._pass(now, what, *more)  # type: ignore[arg-type]
            elif kind == _FREE:
                _, _, bundle = heappop(what.queue)  # type: ignore[union-attr]
                self._begin(now, what, bundle)  # type: ignore[arg-type]
            else:
                self._tied_arrived(now, what, *more)  # type: ignore[arg-type]

    def _begin_step(self) -> None:
        for stage in self.stages:
            self._go_on(stage, self._applied(stage, stage.load.commit_latency_s))

    def _applied(self, stage: _Stage, begin: float) -> float:
        """When a stage's optimizer, which begins its step at ``begin``, has ended it."""
        end = begin + stage.load.apply_s
        if self.spans is not None and end > begin:
            self.spans.append(Span("opt", stage.index, stage.index, 0, begin, end))
        return end

    def _push(self, at: float, kind: int, what: _Stage | _Wire, more: tuple[object, ...] = ()) -> None:
        self.sequence += 1
        heappush(self.heap, (at, kind, self.sequence, what, more))

    # ------------------------------------------------------------ compute

    def _go_on(self, stage: _Stage, free_s: float) -> None:
        """``stage`` can begin its next turn at ``free_s``, if nothing is missing for it."""
        if stage.missing[stage.at]:
            stage.waits, stage.free_s = True, free_s
        else:
            self._start(stage, free_s)

    def _start(self, stage: _Stage, free_s: float) -> None:
        """The next turn of a stage that is free from ``free_s`` on; all for it is here or on its way."""
        at = stage.at
        begin, took = stage.here_s[at], stage.took_s[at]
        if begin > free_s:
            if stage.owed_s > 0.0:
                filled_s = stage.fill(free_s, begin)
                self._bar(stage, Work.WEIGHT, free_s, filled_s)
                begin, free_s = max(begin, filled_s), filled_s
            if stage.lends:
                took -= stage.load.quota.burst_s(took, begin - free_s)
        else:
            begin = free_s
            if stage.owed and stage.actions[at].work is Work.WEIGHT:
                took = stage.pay() * (stage.factors[at] if stage.factors else 1.0)
        self._bar(stage, stage.actions[at].work, begin, begin + took)
        self._push(begin + took, _DONE, stage)

    def _bar(self, stage: _Stage, work: Work, start_s: float, end_s: float) -> None:
        if self.spans is not None and end_s > start_s:
            micro = stage.actions[stage.at].micro
            self.spans.append(Span(work.value, stage.index, stage.index, micro, start_s, end_s))

    def _action_done(self, now: float, stage: _Stage) -> None:
        action = stage.actions[stage.at]
        work, micro = action.work, action.micro
        free_s = now
        if work is Work.FORWARD:
            free_s += stage.load.bytes_s
            for wire, bits, messages in stage.out_forward:
                self._send(now, wire, (Cargo.FORWARD, micro, bits, messages))
        elif work is not Work.WEIGHT:
            free_s += stage.load.bytes_s
            if work is Work.INPUT:
                stage.owed_s += stage.load.weights_s
                stage.owed += 1
            for wire, bits, messages in stage.out_backward:
                self._send(now, wire, (Cargo.BACKWARD, micro, bits, messages))
        stage.at += 1
        if stage.at < len(stage.actions):
            self._go_on(stage, free_s)
        else:
            self._stage_done(now, stage, free_s)

    def _stage_done(self, now: float, stage: _Stage, free_s: float) -> None:
        stage.done_s = self.ready[stage.index] = now
        for i, tied in enumerate(self.work.tied):
            self._fold_tied(now, stage.index, i, tied)

    def _tied_arrived(self, now: float, stage: _Stage, cargo: Cargo, index: int) -> None:
        if cargo is Cargo.TIED_PARTIAL:
            self.partial_in.add((index, stage.index))
            self._fold_tied(now, stage.index, index, self.work.tied[index])
        else:
            self.ready[stage.index] = max(self.ready[stage.index], now)

    def _fold_tied(self, now: float, s: int, i: int, tied: TiedExchange) -> None:
        """Send the partial sum on when both this stage's own and the later holders' are there."""
        if self.stages[s].done_s is None or (i, s) not in self.partial_in:
            return
        at = tied.holders.index(s)
        if at:
            bits = self.work.wire.bits_of(tied.blocks * tied.n_bytes, tied.blocks)
            partials = (Cargo.TIED_PARTIAL, i, bits, tied.blocks)
            self._send_tied(now, s, tied.holders[at - 1], partials)
            return
        self.ready[s] = max(self.ready[s], now)
        bits = self.work.wire.bits_of(tied.n_bytes, 1)
        for other in tied.holders[1:]:
            self._send_tied(now, s, other, (Cargo.TIED_TOTAL, i, bits, 1))

    def _send_tied(self, now: float, s: int, other: int, bundle: _Bundle) -> None:
        self._send(now, self.wires[s, other], bundle)

    # ------------------------------------------------------------ wires

    def _send(self, now: float, wire: _Wire, bundle: _Bundle) -> None:
        if wire.alone:
            begin = max(now, wire.free_s)
            self._left(wire, bundle, begin, begin + bundle[2] * wire.private_s)
        elif now >= wire.free_s and not wire.queue:
            self._begin(now, wire, bundle)
        else:
            if not wire.queue and wire.free_s < inf:
                self._push(wire.free_s, _FREE, wire)
            self.sequence += 1
            heappush(wire.queue, (bundle[0], self.sequence, bundle))

    def _begin(self, now: float, wire: _Wire, bundle: _Bundle) -> None:
        wire.free_s = inf
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
                self._push(start, _PIECE, wire, (bundle, at, sent_s, finish))
                return
        wire.left -= 1
        if wire.left:
            self._push(finish, _PIECE, wire, (bundle, 0, sent_s, finish + bits * wire.private_s))
            return
        self._left(wire, bundle, sent_s, finish)
        if wire.queue:
            self._push(wire.free_s, _FREE, wire)

    def _left(self, wire: _Wire, bundle: _Bundle, sent_s: float, finish: float) -> None:
        """All bits of a bundle that began to leave at ``sent_s`` will have left at ``finish``."""
        cargo, index, _, messages = bundle
        finish += messages * self.per_message_s
        wire.free_s = finish
        wire.under_way_s += finish - sent_s
        if self.spans is not None:
            kind = {Cargo.FORWARD: "send-F", Cargo.BACKWARD: "send-B"}.get(cargo, "send-tied")
            self.spans.append(Span(kind, wire.source, wire.target, index, sent_s, finish))
        stage, here_s = self.stages[wire.target], finish + wire.latency_s
        if cargo is Cargo.FORWARD:
            turn = stage.forward_turns[index]
        elif cargo is Cargo.BACKWARD:
            turn = stage.backward_turns[index]
        else:
            self._push(here_s, _TIED, stage, (cargo, index))
            return
        if here_s > stage.here_s[turn]:
            stage.here_s[turn] = here_s
        stage.missing[turn] -= 1
        if stage.waits and turn == stage.at and not stage.missing[turn]:
            stage.waits = False
            self._start(stage, stage.free_s)


class _InTurn(_Simulation):
    """Stages of one device take turns, in the one order of all their actions."""

    def __init__(self, work: Workload, keep_spans: bool, factors: Factors | None = None) -> None:
        super().__init__(work, keep_spans, factors)
        self.beside: dict[int, list[_Stage]] = {}  # by stage: all of its device
        self.turns: dict[int, Iterator[_Stage]] = {}
        self.here: dict[tuple[Work, int], list[_Stage]] = {}  # who has at once what a stage makes
        self.deferred = [0] * len(self.stages)  # by stage: micro-batches whose weight gradients were
        for device, those in enumerate(work.together):
            stages = [self.stages[s] for s in those]
            order = iter(
                [self.stages[s] for s in work.turns[device]]
                if work.turns
                else [stages[a.piece] for a in merged([stage.actions for stage in stages])]
            )
            self.beside.update(dict.fromkeys(those, stages))
            self.turns.update(dict.fromkeys(those, order))
        for work_kind, hops in ((Work.FORWARD, work.forward), (Work.BACKWARD, work.backward)):
            for hop in hops:
                if (hop.source, hop.target) not in self.wires:
                    self.here.setdefault((work_kind, hop.source), []).append(self.stages[hop.target])

    def _begin_step(self) -> None:
        for those in self.work.together:
            free_s = self.stages[those[0]].load.commit_latency_s
            for s in those:
                free_s = self._applied(self.stages[s], free_s)
            self._go_on(self.stages[those[0]], free_s)

    def _go_on(self, stage: _Stage, free_s: float) -> None:
        following = next(self.turns[stage.index], None)
        if following is not None:
            super()._go_on(following, free_s)

    def _start(self, stage: _Stage, free_s: float) -> None:
        begin = stage.here_s[stage.at]
        while begin > free_s and (owing := self._owing(stage)) is not None:
            rest_s = owing.owed_s - (owing.owes - 1) * owing.load.weights_s
            filled_s = owing.fill(free_s, begin, rest_s)
            self._bar(owing, Work.WEIGHT, free_s, filled_s)
            free_s = filled_s
        super()._start(stage, free_s)

    def _owing(self, stage: _Stage) -> _Stage | None:
        """Which stage of the device takes deferred weight gradients next: as a worker, of the first
        micro-batch, first pieces first."""
        owing = (other for other in self.beside[stage.index] if other.owes)
        return min(owing, key=lambda other: self.deferred[other.index] - other.owes, default=None)

    def _action_done(self, now: float, stage: _Stage) -> None:
        action = stage.actions[stage.at]
        ahead = action.work is Work.FORWARD
        if action.work is Work.INPUT:
            self.deferred[stage.index] += 1
        if action.work is not Work.WEIGHT:
            for other in self.here.get((Work.FORWARD if ahead else Work.BACKWARD, stage.index), ()):
                turn = (other.forward_turns if ahead else other.backward_turns)[action.micro]
                other.here_s[turn] = max(other.here_s[turn], now)
                other.missing[turn] -= 1
        super()._action_done(now, stage)

    def _stage_done(self, now: float, stage: _Stage, free_s: float) -> None:
        super()._stage_done(now, stage, free_s)
        self._go_on(stage, free_s)

    def _send_tied(self, now: float, s: int, other: int, bundle: _Bundle) -> None:
        if (s, other) in self.wires:
            super()._send_tied(now, s, other, bundle)
        elif bundle[0] is Cargo.TIED_PARTIAL:
            self._tied_arrived(now, self.stages[other], bundle[0], bundle[1])


def simulate(work: Workload, keep_spans: bool = False) -> Timeline:
    """Simulate one step of ``work``.

    Raises ValueError when the actions cannot finish (a schedule that waits for itself).
    Cost: a heap operation for each action, a few for each bundle on a shared link; 4 stages x 16
    micro-batches take about half a millisecond.
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

    Where several pairs of stages share a link, who comes first decides who waits, and with times that never
    vary the same order comes back in every round. Eight stages in join order across two gateways took 18.9
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
    run = (_InTurn if work.several else _Simulation)(work, keep_spans, factors)
    run.run()
    stuck = [stage.index for stage in run.stages if stage.done_s is None]
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
        bits = work.wire.bits_of(n_bytes, messages)
        busy = bits / route.rate_bps + messages * work.wire.per_message_s
        found.append(LinkUse(source, target, n_bytes, busy))
    return tuple(found)


def between_devices(links: Sequence[LinkUse], together: Sequence[Sequence[int]]) -> tuple[LinkUse, ...]:
    """Return what each device sends each other, of all its stages; devices numbered as in ``together``."""
    device_of = {stage: at for at, those in enumerate(together) for stage in those}
    found: dict[tuple[int, int], LinkUse] = {}
    for use in links:
        pair = (device_of[use.source], device_of[use.target])
        before = found.get(pair, LinkUse(*pair, 0, 0.0))
        found[pair] = LinkUse(
            *pair,
            before.n_bytes + use.n_bytes,
            before.busy_s + use.busy_s,
            before.under_way_s + use.under_way_s,
        )
    return tuple(found.values())


def step_bytes(work: Workload, source: int, target: int) -> tuple[int, int]:
    """(payload bytes, messages) that one wire carries in a step."""
    hops = [h for h in (*work.forward, *work.backward) if h.source == source and h.target == target]
    n_bytes = work.n_micro * sum(h.n_bytes for h in hops)
    messages = work.n_micro * sum(h.messages for h in hops)
    for tied in work.tied:
        times = tied.sums(source, target)
        n_bytes += times * tied.n_bytes
        messages += times
    return n_bytes, messages


def resource_seconds(work: Workload) -> tuple[tuple[str, float], ...]:
    """(resource, seconds that a step's bytes occupy it), uplinks and pair rates."""
    busy: dict[str, float] = {}
    for (source, target), route in work.routes.items():
        n_bytes, messages = step_bytes(work, source, target)
        bits = work.wire.bits_of(n_bytes, messages)
        for name, rate in route.resources:
            busy[name] = busy.get(name, 0.0) + bits / rate
    return tuple(sorted(busy.items()))


def _count_into(hops: Sequence[Hop], n: int) -> list[int]:
    counts = [0] * n
    for hop in hops:
        counts[hop.target] += 1
    return counts
