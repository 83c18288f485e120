"""A running job on a fleet that has grown: another way to train it, where that pays for standing still. Pure.

Idle workers that were not there when the job was planned may be worth another cut, a replica, or steps of
their own. Once no more have come for a while, the job is planned twice on the same figures: on its own
workers, and on those and the idle ones. Where the steps that are left are faster with the second plan by more
than storing, planning and loading take, the next commit stores the state, and the job is planned anew from
there. No step is repeated, and an exact plan has the same bits as before.

Links of newcomers cannot be measured while the job trains. They are taken to be as good as the best between
its own workers; once it has stopped they are measured before it is planned, so a hope that fails costs the
stop, and the next one is further off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from coordinator.messages import instructions as do
from coordinator.messages.jobs import STEPPING, Cause, anew
from coordinator.pipeline.changes.price import pause_s, priced
from coordinator.pipeline.health.doubt import left_out
from coordinator.pipeline.tuning.link_adaptation import capped
from coordinator.planning.costs.losses import PLANNED_WITHIN_S
from protos.telemetry import Event as Name

if TYPE_CHECKING:
    from atoll.job import JobSpec
    from coordinator.membership.effects import Effects
    from coordinator.membership.roster import Fingerprint
    from coordinator.messages.events import FleetFailed, FleetJudged
    from coordinator.messages.jobs import JobState, PlanChange

SETTLED_S = 30.0  # since the last worker came
FEWEST_STEPS = 5  # committed with the plan, so that its step's time is known
LEAST_GAIN = 0.1  # of a step: less is within what predictions are wrong by
AGAIN_S = 120.0  # after a stop, until the next one; twice as long each time

Process = tuple[str, int]
"""A worker and its incarnation."""


@dataclass(slots=True)
class _Known:
    fleet: tuple[Fingerprint, frozenset[str]]  # idle, standing by: as last looked at
    judged: set[Process]  # that the plan was made with, or has been compared with
    came_s: dict[Process, float] = field(default_factory=dict)  # the others


@dataclass(frozen=True, slots=True)
class _Asked:
    attempt: int
    assigned: int  # version of the plan that the larger fleet is compared with


@dataclass(frozen=True, slots=True)
class _Wish:
    words: str
    workers: frozenset[str]  # of the better plan
    assigned: int  # version of the plan that it is better than


@dataclass(slots=True)
class Replanning:
    """Of all jobs that are cut into stages; ``timed``: see ``Joining``."""

    effects: Effects
    timed: Callable[[str, JobSpec, list[str]], bool]
    _known: dict[str, _Known] = field(default_factory=dict)  # by job
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _wishes: dict[str, _Wish] = field(default_factory=dict)
    _stops: dict[str, tuple[int, float]] = field(default_factory=dict)  # how many, not again before
    _attempts: int = 0

    def tick(self, state: JobState, *, others_wait: bool) -> None:
        """Let time pass; ``others_wait``: the pool is wanted for something else."""
        if state.phase not in STEPPING:
            if not state.run.moving:  # a plan of this fleet is being loaded
                self.over(state.job)
            return
        known, now_s = self._look(state), self.effects.now_s
        if others_wait or not known.came_s or now_s - max(known.came_s.values()) < SETTLED_S:
            return
        if self._may(state) and self._ask(state):
            known.judged.update(known.came_s)
            known.came_s.clear()

    def _look(self, state: JobState) -> _Known:
        """Take in who has come and gone."""
        roster, standbys = self.effects.roster, frozenset(s.worker for s in state.standbys.values())
        fleet = roster.fingerprint(), standbys
        known = self._known.get(state.job)
        if known is not None and known.fleet == fleet and not known.came_s:  # as nearly always
            return known
        names = standbys.intersection(roster.workers).union(roster.idle())
        spare = {(name, roster.workers[name].member.incarnation) for name in names}
        if known is None:
            known = self._known[state.job] = _Known(fleet, spare)
        known.fleet = fleet
        known.came_s = {one: at_s for one, at_s in known.came_s.items() if self._usable(state, one[0])}
        new = spare - known.judged - known.came_s.keys()
        known.came_s.update(dict.fromkeys(new, self.effects.now_s))
        return known

    def over(self, job: str) -> None:
        """Forget what was thought of a job's fleet: it is planned on the whole of it, or has ended."""
        for known in (self._known, self._asked, self._wishes):
            known.pop(job, None)

    def due(self, state: JobState) -> str:
        """Return why the job is to be planned anew at its next commit, "" where it is not."""
        wish = self._wishes.get(state.job)
        if wish is None or state.plan is None:
            return ""
        own = {place.worker for place in state.plan.places}
        if self.effects.storage or state.run.moving:
            return ""
        current = state.run.assigned == wish.assigned  # a worker may have taken another's place since
        if current and all(self._usable(state, worker) for worker in wish.workers - own):
            return wish.words
        del self._wishes[state.job]
        return ""

    def stop(self, state: JobState) -> PlanChange:
        """Return the event that has the job planned anew, now that its state is stored."""
        times = self._stops.get(state.job, (0, 0.0))[0]
        self._stops[state.job] = times + 1, self.effects.now_s + AGAIN_S * 2.0**times
        words = self._wishes[state.job].words
        self.over(state.job)
        return anew(state, words, Cause.CHOSEN)

    # ------------------------------------------------------------ comparing

    def _usable(self, state: JobState, worker: str) -> bool:
        """Whether a worker is idle, or does something beside this job's plan."""
        known = self.effects.roster.workers.get(worker)
        if known is None or known.member.gone or known.quarantined or known.guest.paused:
            return False
        return self.effects.roster.is_idle(worker) or known.member.job == state.job

    def _may(self, state: JobState) -> bool:
        if state.spec.standbys == 0 or state.plan is None or state.plan.absent or state.failures:
            return False
        if state.run.moving or state.run.seating or self.effects.storage or state.job in self._asked:
            return False
        later = self.effects.now_s >= self._stops.get(state.job, (0, -inf))[1]
        return later and len(state.run.step_times_s) >= FEWEST_STEPS and state.job not in self._wishes

    def _ask(self, state: JobState) -> bool:
        """Have both plans made; whether that, or not asking at all, settles it."""
        roster, precision = self.effects.roster, state.spec.training.precision.value
        own = list(dict.fromkeys(place.worker for place in state.adopted.places))
        bad = {worker for some in left_out(state)[:1] for worker in some}
        beside = {name for name, _ in self._known[state.job].came_s}
        beside.update(s.worker for s in state.standbys.values() if self._usable(state, s.worker))
        spare = roster.in_order(beside.union(roster.idle()) - bad - set(own))
        spare = roster.plannable(spare, precision)
        if not spare or any(worker not in roster.workers for worker in own):
            return True
        if not self.timed(state.job, state.spec, [worker for worker in spare if roster.is_idle(worker)]):
            return False
        self._attempts += 1
        self._asked[state.job] = _Asked(self._attempts, state.run.assigned)
        spec = capped(state.spec, self.effects.ledger.jobs[state.job].cap)
        fleet = roster.fleet([*own, *spare], precision, unknown=roster.hoped(own), job=state.job)
        fleet = replace(fleet, losses_per_s=roster.losses.per_s(self.effects.now_s))
        self.effects.emit(
            do.JudgeFleet(state.job, self._attempts, state.version + 1, spec, fleet, tuple(own))
        )
        return True

    def _answered(self, job: str, attempt: int) -> _Asked | None:
        """Return the question of which this is the answer, None where it is not the one that is awaited."""
        asked = self._asked.get(job)
        return self._asked.pop(job) if asked is not None and asked.attempt == attempt else None

    def failed(self, event: FleetFailed) -> None:
        """Everything stays as it is."""
        if self._answered(event.job, event.attempt) is not None:
            self.effects.log(Name.PLAN_FAILED, "warning", job=event.job, reason=event.reason)

    def judged(self, state: JobState, event: FleetJudged) -> None:
        """Have the job planned anew where the steps that are left save more than standing still takes."""
        asked = self._answered(state.job, event.attempt)
        if asked is None or state.phase not in STEPPING or not event.step_s > 0.0:
            return
        price = priced(state, event.step_s, event.grown_s, pause_s(state) + PLANNED_WITHIN_S)
        pays = price.pays(LEAST_GAIN)
        words = (
            f"{event.shape} on a fleet that has grown: a step of {price.usual_s - price.saved_s:.3g} s "
            f"instead of {price.usual_s:.3g} s saves {price.saved_s * price.left:.0f} s in {price.left} "
            f"steps, and costs {price.pause_s:.0f} s"
        )
        self.effects.log(Name.FLEET_JUDGED, job=state.job, pays=pays, reason=words)
        if pays:
            self._wishes[state.job] = _Wish(words, frozenset(event.workers), asked.assigned)
            self.effects.emit(do.Notify(state.job))
