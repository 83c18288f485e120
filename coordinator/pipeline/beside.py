"""What idle workers do beside the plans of running jobs: stand by, keep copies, compare, join, and what they
would be worth in another plan; and what those who train keep of each other. Pure.

None of it holds a job up: whoever does it makes way once another job wants the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.messages import events as ev
from coordinator.messages.jobs import ENDED, GATHERS, PREPARING, RUNNING, Event, JobState, Phase
from coordinator.pipeline.changes.copies import Copies
from coordinator.pipeline.changes.newcomers import Newcomers
from coordinator.pipeline.changes.standbys import Standbys
from coordinator.pipeline.changes.successors import alike
from coordinator.pipeline.health.spot_checks import SpotChecks
from coordinator.pipeline.ring import Rings

if TYPE_CHECKING:
    from atoll.job import JobSpec
    from coordinator.membership.effects import Effects
    from coordinator.messages.facts import Checkpoint
    from coordinator.pipeline.health.suspicion import Suspicion


@dataclass(slots=True)
class Beside:
    """Of all jobs that are cut into stages; ``put``: keep a job's state, ``step``: step its machine,
    ``timed``: see ``Newcomers``, ``wants``: whether a queued job could begin with what is idle or beside."""

    effects: Effects
    jobs: Mapping[str, JobState]
    concurrent_jobs: int
    put: Callable[[JobState], None]
    step: Callable[[str, Event], None]
    suspicion: Suspicion
    timed: Callable[[str, JobSpec, list[str]], bool]
    wants: Callable[[JobState], bool]
    copies: Copies = field(init=False)
    rings: Rings = field(init=False)
    standbys: Standbys = field(init=False)
    newcomers: Newcomers = field(init=False)
    checks: SpotChecks = field(init=False)

    def __post_init__(self) -> None:
        self.copies = Copies(self.effects)
        self.rings = Rings(self.effects, self.step)
        self.standbys = Standbys(self.effects, self.put)
        self.checks = SpotChecks(self.effects, self.suspicion, self.step, self._workers_wanted, alike)
        self.newcomers = Newcomers(self.effects, self.standbys, self.timed, self.checks.make_way)

    def tick(self, returning: Collection[str]) -> None:
        """Let time pass; ``returning``: jobs whose workers are awaited after our restart."""
        for job in list(self.jobs):
            if self.jobs[job].phase in RUNNING and job not in returning:
                others_wait = self._pool_wanted()
                untimed = self.newcomers.tick(self.jobs[job], others_wait=others_wait)
                self.standbys.tick(self.jobs[job], others_wait=others_wait, untimed=untimed)
        self.checks.tick(self.jobs)
        self.rings.tick({job: state for job, state in self.jobs.items() if job not in returning})
        self.copies.tick(self.jobs)

    def over(self, state: JobState) -> None:
        """A job's plan is over."""
        self.standbys.over(state)
        self.rings.over(state)
        self.newcomers.over(state.job)

    def heard(self, worker: str, message: ev.CopyHeld | ev.CopyStored) -> None:
        """Take in what a worker says of a copy."""
        state = self.jobs[message.job]
        if isinstance(message, ev.CopyStored):
            self.rings.stored(state, worker, message)
            return
        self.copies.heard(worker, message)
        self.rings.kept(state, worker, message)

    def sources(self) -> list[Checkpoint]:
        """Return the checkpoints that somebody beside a plan loads, or will: newer ones may be stored."""
        standbys = (s for state in self.jobs.values() for s in state.standbys.values())
        loading = [s.source for s in standbys if s.source is not None and not s.loaded]
        return loading + self.checks.sources() + self.rings.sources()

    def make_way(self) -> None:
        """Give back the workers that another job wants."""
        for job in list(self.jobs):
            if self.jobs[job].standbys and self._pool_wanted():
                self.standbys.give_up(self.jobs[job], "another job wants the pool")
        if self._workers_wanted():
            self.checks.make_way()

    def _pool_wanted(self) -> bool:
        """Whether some job may want every idle worker, now or in its next round."""
        federated = (s for s in self.effects.jobs.values() if s.spec.federated is not None)
        return self._workers_wanted() or any(s.phase not in ENDED for s in federated)

    def _workers_wanted(self) -> bool:
        """Whether a job waits for workers, or for a plan on those that there are."""
        states = self.effects.jobs.values()
        busy = sum(s.phase in RUNNING | PREPARING for s in states if s.job in self.jobs)
        return any(
            s.phase in PREPARING | GATHERS
            or s.phase is Phase.PAUSED
            or (s.job in self.jobs and busy < self.concurrent_jobs and self.wants(s))
            for s in states
        )
