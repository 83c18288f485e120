"""Who of the jobs that are cut into stages gets which workers: claims made of their states, asked of
``coordinator.sharing``, and what running jobs give to others. Pure.

A job is measured and planned with the workers that it was granted alone. Where they do not hold it, it asks
for more. A job that is to give workers stops at a commit that is stored and is planned anew, as for a fleet
that has grown (decision 054): no step is repeated, and an exact plan has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf, isfinite
from typing import TYPE_CHECKING

from atoll.backoff import doubled_s
from coordinator.messages.events import Needs
from coordinator.messages.jobs import ENDED, RUNNING, STEPPING, WAITING, Cause, Phase, anew
from coordinator.pipeline.changes.choice import pause_s
from coordinator.planning.costs.losses import PLANNED_WITHIN_S
from coordinator.planning.peers.replicas import devices_named
from coordinator.sharing.allotment import allot
from coordinator.sharing.claims import Allotment, Claim, Machine, faster
from coordinator.sharing.forecast import PROMISE, promised_s

if TYPE_CHECKING:
    from coordinator.membership.effects import Effects
    from coordinator.messages.jobs import JobState, PlanChange
    from coordinator.pipeline.tuning.profiling import Profiling
    from coordinator.sharing.policies import Policy

WAITS = "waits for"
REST_S = 60.0  # after a job has given workers, until it gives some again; twice as long each time
LOOK_S = 2.0
USUAL_FLOPS = 5e10  # a second, of a worker that has timed nothing yet
FEW = 8  # workers: as many were too few, so one more is tried; of larger sets a quarter more


@dataclass(slots=True)
class _Rest:
    """A job that has given workers: how often, and until when it keeps those that it has."""

    times: int = 0
    until_s: float = -inf


@dataclass(slots=True)
class Shares:
    """Of all jobs that are cut into stages. ``gathers``: whether a job waits for what its workers kept."""

    effects: Effects
    jobs: Mapping[str, JobState]
    profiling: Profiling
    policy: Policy
    gathers: Callable[[str], bool]
    found: Allotment = field(default_factory=Allotment)
    needs: dict[str, Needs] = field(default_factory=dict)
    _least: dict[str, int] = field(default_factory=dict)  # fewer did not hold a job
    _on: frozenset[str] = frozenset()  # workers of which that was learnt
    _step_s: dict[str, tuple[int, float]] = field(default_factory=dict)  # of jobs that ran: on how many
    _due_s: dict[str, float] = field(default_factory=dict)  # promised
    _rests: dict[str, _Rest] = field(default_factory=dict)
    _looked_s: float = -inf

    # ------------------------------------------------------------ asking

    def look(self) -> Allotment:
        """Ask who gets what now; nothing is asked while nobody waits."""
        self._looked_s = self.effects.now_s
        if not any(map(self._asks, self.jobs.values())):
            self.found, self.effects.waits = Allotment(), {}
            return self.found
        machines = self._machines()
        names = frozenset(self.effects.roster.workers)
        if names != self._on:
            self._on = names
            self._least.clear()
        claims = [claim for state in self.jobs.values() if (claim := self._claim(state)) is not None]
        for claim in claims:
            if claim.job not in self._due_s:
                self._due_s[claim.job] = promised_s(claim, claims, len(machines), self.effects.now_s)
        claims = [self._dated(claim) for claim in claims]
        self.found = allot(claims, machines, self.policy, self.effects.now_s, self.effects.quotas)
        self.effects.waits = self.found.waits
        return self.found

    def _asks(self, state: JobState) -> bool:
        return state.phase is Phase.PROFILING or (state.phase in WAITING and not self.held_up(state))

    def held_up(self, state: JobState) -> bool:
        """Whether something else than workers keeps a job that waits."""
        return not self.profiling.may_plan(state.job) or self.gathers(state.job)

    def wants(self, state: JobState) -> bool:
        """Whether a queued job could begin with workers that are idle or do something beside a plan."""
        if state.phase is not Phase.QUEUED or self.held_up(state):
            return False
        held = {worker for other in self.jobs.values() if other.phase in RUNNING for worker in other.workers}
        known = self.effects.roster.workers.items()
        beside = sum(bool(worker.member.job) and name not in held for name, worker in known)
        return self._least_of(state) <= self.effects.roster.idle_count + beside

    # ------------------------------------------------------------ learning

    def too_small(self, job: str) -> bool:
        """Take in that the workers of a job's newest grant do not hold it; whether there are more."""
        count = len(self.profiling.granted.get(job, ()))
        if not count or count >= len(self._machines()):
            return False
        self._least[job] = count + 1 if count < FEW else ceil(1.25 * count)
        return True

    def stopped(self, state: JobState) -> None:
        """Take in how long a job's steps took that runs no more; let it rest where it stopped for others."""
        if state.plan is not None and state.median_step_s:
            self._step_s[state.job] = len(set(state.workers)), state.median_step_s
        if state.phase is Phase.PAUSED and state.job in self.found.gives:
            rest = self._rests.setdefault(state.job, _Rest())
            rest.times += 1
            rest.until_s = self.effects.now_s + doubled_s(REST_S, rest.times)

    def tick(self) -> None:
        """Look again now and then while jobs wait: what is left of the others gets less."""
        if self.effects.now_s - self._looked_s >= LOOK_S and any(map(self._asks, self.jobs.values())):
            self.effects.advance = True

    def forget(self, job: str) -> None:
        """Forget a job that has ended."""
        for known in (self.needs, self._least, self._step_s, self._due_s, self._rests):
            known.pop(job, None)

    # ------------------------------------------------------------ giving

    def candidates(self, state: JobState) -> Iterator[PlanChange]:
        """Yield that a job stops for others that are to have workers of its."""
        gives = self.found.gives.get(state.job)
        if gives is not None and state.phase in STEPPING and not state.run.moving:
            yield anew(state, gives.reason, Cause.CHOSEN)

    # ------------------------------------------------------------ claims

    def _machines(self) -> list[Machine]:
        roster = self.effects.roster
        held = {worker for state in self.jobs.values() for worker in self._held(state)}
        names = roster.in_order({*roster.idle(), *(worker for worker in held if worker in roster.workers)})
        return [Machine(name, roster.workers[name].introduction.site or name) for name in names]

    def _held(self, state: JobState) -> tuple[str, ...]:
        """Return the workers that a job has now, or is to have again in a moment."""
        roster = self.effects.roster
        if state.phase in RUNNING:
            own = (state.workers[rank] for rank in state.present)
        elif state.phase is Phase.PLANNING:
            own = (worker for worker in self.profiling.granted.get(state.job, ()) if roster.is_idle(worker))
        elif state.phase is Phase.PAUSED and self.held_up(state):
            own = (worker for worker in state.workers if roster.is_idle(worker))
        else:
            return ()
        return tuple(dict.fromkeys(own))

    def _claim(self, state: JobState) -> Claim | None:
        if state.phase in ENDED or (state.phase is Phase.QUEUED and self.held_up(state)):
            return None
        held, now_s = self._held(state), self.effects.now_s
        if not held and (state.phase not in WAITING | {Phase.PROFILING} or self.held_up(state)):
            return None  # what it had is gone: it waits again in a moment
        spec, rest = state.spec, self._rests.get(state.job, _Rest())
        moves = state.phase in STEPPING and not state.run.moving and not state.run.seating
        return Claim(
            state.job, spec.owner, spec.rank, state.created_s,
            work_s=self._work_s(state), least=self._least_of(state), most=len(held) or 1 << 30,
            held=held, had=frozenset(state.workers), pause_s=pause_s(state) + PLANNED_WITHIN_S,
            stays=spec.standbys == 0 or state.local or now_s < rest.until_s,
            fixed=bool(held) and not (moves or (state.run.seating and state.job in self.found.gives)),
            together=spec.training.replicas != "1" and spec.training.local_exchange is None,
            must=spec.data_of,
        )  # fmt: skip

    def _dated(self, claim: Claim) -> Claim:
        """Return the claim with when it is due; while a job trains its promise follows what is measured."""
        state = self.jobs[claim.job]
        if state.phase in STEPPING and isfinite(claim.work_s):
            later_s = self.effects.now_s + PROMISE * claim.left_s(claim.size)
            self._due_s[claim.job] = max(self._due_s[claim.job], later_s)
        wanted_s = state.created_s + state.spec.within_s if state.spec.within_s else inf
        return replace(claim, due_s=min(wanted_s, self._due_s[claim.job]))

    def _least_of(self, state: JobState) -> int:
        """Return the fewest workers that hold a job, as far as known; where all do not, all: the planner
        says by how much."""
        left, limits = self.needs.get(state.job, Needs()).state_bytes, self._limits()
        wanted = state.spec.training.replica_count or 1
        if state.version:  # it goes on with two of its former replicas
            wanted = min(wanted, 2)
        wanted = max(wanted, devices_named(state.spec.partitioner))
        learnt = max(self._least.get(state.job, 1), min(wanted, len(limits)))
        fewest = 0
        for limit in limits:
            if left <= 0:
                break
            left, fewest = left - limit, fewest + 1
        return max(learnt, fewest, 1)

    def _limits(self) -> list[int]:
        workers = self.effects.roster.workers
        return sorted(
            (workers[machine.name].memory_limit_bytes for machine in self._machines()), reverse=True
        )

    def _work_s(self, state: JobState) -> float:
        """Return the seconds that a job's other steps take on one worker, ``inf`` where that is not known."""
        left = state.steps - state.step
        if state.phase in RUNNING and state.usual_step_s:
            return left * state.usual_step_s * faster(len(self._held(state)))
        if state.job in self._step_s:
            count, step_s = self._step_s[state.job]
            return left * step_s * faster(count)
        flops = self.needs.get(state.job, Needs()).step_flops
        return left * flops / self._flops(state) if flops else inf

    def _flops(self, state: JobState) -> float:
        """Return the usual FLOPs a second of the workers that there are."""
        roster, precision = self.effects.roster, state.spec.training.precision.value
        rates = sorted(rate for name in self._on if (rate := roster.gflops(name, precision)))
        return 1e9 * rates[len(rates) // 2] if rates else USUAL_FLOPS


def expected(found: Allotment, job: str, among: Collection[str]) -> str:
    """Return why a job waits, and for which running job; "" where it does not wait for workers."""
    waits = found.waits.get(job)
    if waits is None:
        return ""
    return f"{WAITS} {waits.after if waits.after in among else 'its turn'}: {waits.reason}"
