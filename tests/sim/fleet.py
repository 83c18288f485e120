"""A large fleet for some minutes: thousands join, are probed, wait, train, leave and come back.

The cores, network and checks are those of every other world; what costs O(fleet) is checked once a
simulated second instead of after every event.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

from coordinator.membership.roster import Worker as Known
from coordinator.messages.jobs import Phase
from tests.sim.checks import Violation
from tests.sim.worker import Worker
from tests.sim.world import Scenario, World, federated_job, pipeline_job
from worker.session.events import LeaveAsked

JOIN_WITHIN_S = 20.0
FIRST_JOB_S = 30.0  # the fleet is here, its survey has begun
JOBS_EVERY_S = 75.0  # links are measured in the pauses between jobs
STEPS = 40
ROUNDS = 5
WITH_DATA = 20  # one worker in so many could take part in federated jobs
AWAY_S = (2.0, 20.0)
LEAVERS = 0.5  # of those that go: they say so; the others are killed
GRACE_S = 10.0  # from a start until the member has to be live, or from an end until it has to be gone


@dataclass(frozen=True)
class FleetRun:
    """``churn``: share of the fleet that goes, and is back some seconds later, a minute."""

    workers: int
    minutes: float = 5.0
    churn: float = 0.1
    seed: int = 0

    @property
    def seconds(self) -> float:
        return 60.0 * self.minutes


@dataclass
class Fleet:
    """One run of a large fleet."""

    asked: FleetRun
    world: World = field(init=False)
    random: Random = field(init=False)
    departures: int = 0
    events: int = 0
    peak_members: int = 0
    _turned_s: dict[str, float] = field(default_factory=dict)  # worker -> when it last came or went

    def __post_init__(self) -> None:
        self.world = World(Scenario(self.asked.seed, self.asked.workers))
        self.random = Random(self.asked.seed)

    def run(self) -> dict[str, Any]:
        """Let the minutes pass; returns figures. Raises Violation when something does not hold."""
        world, clock = self.world, self.world.clock
        begun_s, wall_s = clock.now_s, time.perf_counter()
        self._begin()
        until_s, look_s = begun_s + self.asked.seconds, begun_s
        while clock.step(until_s):
            self.events += 1
            world.checks.current()
            if clock.now_s >= look_s:
                look_s = clock.now_s + 1.0
                self._look()
        self._look()
        self._ended()
        took_s = time.perf_counter() - wall_s
        messages = world.network.messages
        return {
            **vars(self.asked),
            "wall_s": round(took_s, 1),
            "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            "events": self.events,
            "messages": messages,
            "messages_a_simulated_s": round(messages / self.asked.seconds),
            "messages_a_wall_s": round(messages / took_s),
            "members": self.peak_members,
            "departures": self.departures,
            "pairs_measured": len(world.coordinator.scheduler.roster.links.measured_s),
            "jobs": {job: state.phase.value for job, state in world.coordinator.scheduler.jobs.items()},
            "fingerprint": clock.fingerprint()[:16],
        }

    def _begin(self) -> None:
        world, clock = self.world, self.world.clock
        world.coordinator.start()
        for at, (name, worker) in enumerate(world.workers.items()):
            worker.data = at % WITH_DATA == 0
            self._turned_s[name] = clock.now_s + JOIN_WITHIN_S
            clock.after(JOIN_WITHIN_S * at / len(world.workers), worker.start)
        at_s, number = min(FIRST_JOB_S, self.asked.seconds / 3), 1
        while at_s < self.asked.seconds:
            world.submit(f"job-{number}", pipeline_job(STEPS), at_s)
            world.submit(f"fed-{number}", federated_job(ROUNDS), at_s + 5.0)
            at_s, number = at_s + JOBS_EVERY_S, number + 1
        self._depart_later()

    # ------------------------------------------------------------ churn

    def _depart_later(self) -> None:
        a_second = self.asked.churn * self.asked.workers / 60.0
        if a_second > 0:
            self.world.clock.after(self.random.expovariate(a_second), self._depart)

    def _depart(self) -> None:
        """Have one worker go, with a word or without, and come back later."""
        self._depart_later()
        clock = self.world.clock
        worker = self.world.workers[f"w{self.random.randrange(self.asked.workers)}"]
        if not worker.alive or clock.now_s < self._turned_s[worker.name] + 1.0:
            return
        self.departures += 1
        self._turned_s[worker.name] = clock.now_s
        if self.random.random() < LEAVERS:
            worker.hear(LeaveAsked("its owner wants the machine"))
        else:
            worker.kill()
            self.world.network.died(worker)
        clock.after(self.random.uniform(*AWAY_S), lambda: self._back(worker))

    def _back(self, worker: Worker) -> None:
        if worker.alive:  # still busy with a step
            self.world.clock.after(AWAY_S[0], lambda: self._back(worker))
            return
        self._turned_s[worker.name] = self.world.clock.now_s
        worker.start()

    # ------------------------------------------------------------ checks

    def _look(self) -> None:
        world, roster = self.world, self.world.coordinator.scheduler.roster
        world.checks.folded()
        self.peak_members = max(self.peak_members, sum(not w.member.gone for w in roster.workers.values()))
        if roster.idle() != [name for name, known in roster.workers.items() if known.idle]:
            raise Violation("the roster's idle workers are not those of its members")
        for name, worker in world.workers.items():
            settled = world.clock.now_s > self._turned_s[name] + GRACE_S
            known = roster.workers.get(name)
            if settled and worker.alive is _gone(known):
                state = known.member.phase.value if known is not None else "not known"
                raise Violation(f"{name} {'runs' if worker.alive else 'is gone'}, its member is {state}")
        busy = [end for flow in roster.links.flows.values() for end in flow.pair]
        if len(roster.links.flows) > world.coordinator.config.probing.probes_at_once:
            raise Violation(f"{len(roster.links.flows)} probes at once, of {len(busy)} workers")

    def _ended(self) -> None:
        """Every job that had the time for it has finished as an undisturbed one does."""
        world = self.world
        world.checks.finished()
        late_s = self.asked.seconds - 2 * JOBS_EVERY_S
        for job, state in world.coordinator.scheduler.jobs.items():
            created_s = state.created_s - 1000.0
            if created_s < late_s and state.phase is not Phase.FINISHED:
                raise Violation(f"{job} is still {state.phase.value} ({state.reason})")


def _gone(known: Known | None) -> bool:
    return known is None or known.member.gone
