"""A fleet of jobs in simulated time, allotted by the coordinator's own code (``coordinator.sharing``).

A step is computed, then summed over the links of the places that a job spans. A job within one place takes
its steps without events of their own. Who is moved stops at the end of a step and stands still for its pause.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any

from atoll.job import Priority
from coordinator.sharing import allotment
from coordinator.sharing.allotment import allot
from coordinator.sharing.claims import Claim, Machine, faster
from coordinator.sharing.contention import begins, slowed_s
from coordinator.sharing.forecast import promised_s
from coordinator.sharing.places import Placing, least_work_first
from coordinator.sharing.policies import Policy

TICK_S = 60.0  # between two looks at who waits too long
EPSILON_BYTES = 1e-3

Admits = Callable[[float, Sequence[float], float, float], bool]  # as ``contention.begins``


@dataclass(frozen=True)
class TraceJob:
    """A job of a trace. ``compute_s``: of a step on its ``least`` workers; ``stays``: it gives none."""

    name: str
    at_s: float
    steps: int
    compute_s: float
    message_bytes: float = 0.0
    least: int = 1
    most: int = 1
    owner: str = ""
    priority: Priority = Priority.NORMAL
    stays: bool = False

    def step_s(self, workers: int) -> float:
        return self.compute_s * faster(self.least) / faster(workers)


@dataclass(frozen=True)
class Links:
    """Cost of a byte on a place's link, alone and beside others, and of a message."""

    byte_s: float = 8.53e-10  # 10 Gbit/s
    eta_s: float = 2.56e-10
    latency_s: float = 6.69e-4


@dataclass(eq=False)
class _Job:
    trace: TraceJob
    left: int
    held: tuple[str, ...] = ()
    had: frozenset[str] = frozenset()
    spans: tuple[str, ...] = ()  # places, where there are several
    due_s: float = inf
    since_s: float = 0.0  # it waits, or takes steps without events
    begun: bool = False
    stopping: bool = False
    ended_s: float = inf
    moves: int = 0
    epoch: int = 0
    bytes_left: float = 0.0
    byte_s: float = 0.0
    updated_s: float = 0.0


def at_most(transfers: int) -> Admits:
    """Return SRSF(n)'s rule: a link carries at most so many transfers at once."""
    return lambda new, left, byte_s, eta_s: len(left) < transfers


@dataclass
class SharedFleet:
    """``run`` returns when each job ended. ``sessions``: when machines are there; always where not named."""

    trace: Sequence[TraceJob]
    machines: Sequence[Machine]
    policy: Policy
    placing: Placing = least_work_first
    admits: Admits = begins
    links: Links = field(default_factory=Links)
    pause_s: float = 0.0
    together: bool = True  # jobs wait for as few places as could hold them
    sessions: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    now_s: float = 0.0
    jobs: dict[str, _Job] = field(default_factory=dict)
    moves: int = 0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)
    _here: dict[str, Machine] = field(default_factory=dict)
    _active: dict[str, list[_Job]] = field(default_factory=lambda: defaultdict(list))  # by place
    _asking: list[_Job] = field(default_factory=list)  # for their links
    _due: bool = False

    def run(self) -> dict[str, float]:
        """Return by job the seconds from its submission to its end."""
        for job in self.trace:
            self._at(job.at_s, lambda job=job: self._submit(job))  # type: ignore[misc]
        for machine in self.machines:
            for begin_s, end_s in self.sessions.get(machine.name, [(0.0, inf)]):
                self._at(begin_s, lambda machine=machine: self._come(machine))  # type: ignore[misc]
                if end_s < inf:
                    self._at(end_s, lambda machine=machine: self._go(machine))  # type: ignore[misc]
        left = len(self.trace)
        self._at(TICK_S, self._tick)
        while self._events:
            self.now_s, _, then = heapq.heappop(self._events)
            then()
            if self._due and not (self._events and self._events[0][0] == self.now_s):
                self._due = False
                self._allot()
            if len(self.jobs) == left and all(job.ended_s < inf for job in self.jobs.values()):
                break
        return {name: job.ended_s - job.trace.at_s for name, job in self.jobs.items()}

    # ------------------------------------------------------------ events

    def _at(self, at_s: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), then))

    def _later(self, seconds: float, job: _Job, then: Callable[[_Job], None]) -> None:
        epoch = job.epoch = job.epoch + 1
        self._at(self.now_s + seconds, lambda: then(job) if job.epoch == epoch else None)

    def _tick(self) -> None:
        self._due = True
        self._at(self.now_s + TICK_S, self._tick)

    def _submit(self, job: TraceJob) -> None:
        new = self.jobs[job.name] = _Job(job, job.steps, since_s=self.now_s)
        claims = [self._claim(other) for other in self.jobs.values() if other.ended_s == inf]
        new.due_s = promised_s(claims[-1], claims, len(self._here), self.now_s)
        self._due = True

    def _come(self, machine: Machine) -> None:
        self._here[machine.name] = machine
        self._due = True

    def _go(self, machine: Machine) -> None:
        del self._here[machine.name]
        for job in self.jobs.values():
            if machine.name in job.held:
                if not job.spans:
                    job.left -= max(0, int((self.now_s - job.since_s) / job.trace.step_s(len(job.held))))
                self._stop(job)
        self._due = True

    # ------------------------------------------------------------ allotting

    def _claim(self, job: _Job) -> Claim:
        trace, size = job.trace, len(job.held) or job.trace.least
        far = bool(job.spans) if job.held else size > self._largest
        each_s = trace.step_s(size) + far * (self.links.latency_s + trace.message_bytes * self.links.byte_s)
        left: float = job.left
        if job.held and not job.spans:
            left -= max(0.0, self.now_s - job.since_s) / each_s
        return Claim(
            trace.name, trace.owner, trace.priority, trace.at_s, work_s=left * each_s * faster(size),
            least=trace.least, most=trace.most, held=job.held, had=job.had, pause_s=self.pause_s,
            due_s=job.due_s, fixed=job.stopping or job.since_s > self.now_s,
            together=self.together and trace.message_bytes > 0.0, stays=trace.stays,
        )  # fmt: skip

    @property
    def _largest(self) -> int:
        places: dict[str, int] = defaultdict(int)
        for machine in self._here.values():
            places[machine.place] += 1
        return max(places.values(), default=0)

    def _allot(self) -> None:
        claims = [self._claim(job) for job in self.jobs.values() if job.ended_s == inf]
        found = allot(claims, list(self._here.values()), self.policy, self.now_s, placing=self.placing)
        for name, workers in found.starts.items():
            self._start(self.jobs[name], workers)
        for name in (*found.gives, *found.grows):
            self._stop_after_step(self.jobs[name])

    def _start(self, job: _Job, workers: tuple[str, ...]) -> None:
        job.held, job.stopping = workers, False
        places = tuple(dict.fromkeys(self._here[worker].place for worker in workers))
        job.spans = places if len(places) > 1 and job.trace.message_bytes else ()
        pause_s, job.begun = self.pause_s * job.begun, True
        job.since_s = self.now_s + pause_s
        if job.spans:
            self._later(pause_s + job.trace.step_s(len(workers)) + self.links.latency_s, job, self._ask)
        else:
            self._later(pause_s + job.left * job.trace.step_s(len(workers)), job, self._end)

    def _stop_after_step(self, job: _Job) -> None:
        job.stopping = True
        if not job.spans:
            each_s = job.trace.step_s(len(job.held))
            steps = max(1, ceil((self.now_s - job.since_s) / each_s))
            if steps < job.left:
                self._later(max(0.0, job.since_s + steps * each_s - self.now_s), job, self._stopped)

    def _stopped(self, job: _Job) -> None:
        job.left -= round((self.now_s - job.since_s) / job.trace.step_s(len(job.held)))
        self._stop(job)

    def _stop(self, job: _Job) -> None:
        self._leave_links(job)
        self.moves += 1
        job.held, job.had, job.spans, job.stopping = (), frozenset(job.held), (), False
        job.since_s, job.epoch, job.moves = self.now_s, job.epoch + 1, job.moves + 1
        self._due = True

    def _end(self, job: _Job) -> None:
        job.ended_s, job.held, job.epoch = self.now_s, (), job.epoch + 1
        self._due = True

    # ------------------------------------------------------------ links

    def _ask(self, job: _Job) -> None:
        job.bytes_left = job.trace.message_bytes
        self._asking.append(job)
        self._admit()

    def _admit(self) -> None:
        self._asking.sort(key=lambda job: job.left * len(job.held) * job.trace.step_s(len(job.held)))
        for job in list(self._asking):
            beside = [self._lefts(place) for place in job.spans]
            worst = max(beside, key=len)
            left = worst if len(worst) != 1 else [min(lefts[0] for lefts in beside if lefts)]
            if self.admits(job.bytes_left, left, self.links.byte_s, self.links.eta_s):
                self._asking.remove(job)
                for place in job.spans:
                    self._active[place].append(job)
                job.updated_s, job.byte_s = self.now_s, inf
                self._pace(job.spans)

    def _lefts(self, place: str) -> list[float]:
        return [job.bytes_left - (self.now_s - job.updated_s) / job.byte_s for job in self._active[place]]

    def _pace(self, places: Iterable[str]) -> None:
        """Give transfers on these links the rate that they have from now on."""
        touched = {id(job): job for place in places for job in self._active[place]}
        for job in touched.values():
            most = max(len(self._active[place]) for place in job.spans)
            byte_s = slowed_s(most, self.links.byte_s, self.links.eta_s)
            if byte_s == job.byte_s:
                continue
            job.bytes_left -= (self.now_s - job.updated_s) / job.byte_s
            job.updated_s, job.byte_s = self.now_s, byte_s
            self._later(max(0.0, job.bytes_left) * byte_s, job, self._sent)

    def _leave_links(self, job: _Job) -> None:
        if job in self._asking:
            self._asking.remove(job)
        held = [place for place in job.spans if job in self._active[place]]
        for place in held:
            self._active[place].remove(job)
        if held:
            self._pace(held)
            self._admit()

    def _sent(self, job: _Job) -> None:
        job.left -= 1
        if not job.left:
            self._leave_links(job)
            self._end(job)
        elif job.stopping:
            self._stop(job)
        else:
            self._leave_links(job)
            self._later(job.trace.step_s(len(job.held)) + self.links.latency_s, job, self._ask)


def fluid(
    trace: Sequence[TraceJob],
    slots: int,
    decide: Callable[[list[Claim], float], dict[str, int]],
) -> dict[str, float]:
    """Return by job the seconds to its end where ``decide`` gives out slots anew at each arrival and end, and
    moving costs nothing."""
    coming = sorted(trace, key=lambda job: job.at_s)
    works = {job.name: job.steps * job.compute_s * faster(job.least) for job in trace}
    by_name = {job.name: job for job in trace}
    here: dict[str, float] = {}
    ended: dict[str, float] = {}
    counts: dict[str, int] = {}
    now_s = 0.0
    while coming or here:
        ends = {name: here[name] / faster(counts[name]) for name in here if counts.get(name)}
        next_s = min([now_s + seconds for seconds in ends.values()] + [job.at_s for job in coming[:1]])
        for name in ends:
            here[name] -= (next_s - now_s) * faster(counts[name])
        now_s = next_s
        for name in [name for name in ends if here[name] <= 1e-9 * works[name]]:
            ended[name] = now_s - by_name[name].at_s
            del here[name]
            counts.pop(name)
        while coming and coming[0].at_s <= now_s:
            job = coming.pop(0)
            here[job.name] = works[job.name]
        claims = [
            Claim(
                name, by_name[name].owner, submitted_s=by_name[name].at_s, work_s=work,
                least=by_name[name].least, most=by_name[name].most,
                held=tuple(f"{name}/{at}" for at in range(counts.get(name, 0))),
            )
            for name, work in here.items()
        ]  # fmt: skip
        counts = decide(claims, now_s)
        assert sum(counts.values()) <= slots
    return ended


def by_shares(slots: int, policy: Policy) -> Callable[[list[Claim], float], dict[str, int]]:
    """Return the coordinator's sizes, anew each time."""
    machines = [Machine(f"m{at}") for at in range(slots)]

    def decide(claims: list[Claim], now_s: float) -> dict[str, int]:
        return allotment.sizes([replace(claim, held=()) for claim in claims], machines, policy, now_s)

    return decide
