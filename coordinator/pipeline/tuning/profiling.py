"""Profiling: from a job that was picked to a request for its plan, once every figure is there. Pure.

A job whose fleet did not suffice waits until the fleet is another; one that lost a worker waits for a
moment, in case it comes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from atoll.job import JobSpec
from atoll.plan import Plan
from coordinator.membership.effects import Effects
from coordinator.membership.measuring import Measuring
from coordinator.membership.roster import Fingerprint
from coordinator.messages import instructions as do

READ_AGAIN_S = 10.0  # after which a job is read once more that the store would not give
REFINEMENTS = 2  # plans made once more for pairs of theirs that had to be estimated


@dataclass(frozen=True, slots=True)
class Hold:
    """Reason for which a job is not planned yet."""

    until_s: float
    for_workers: frozenset[str] = frozenset()  # all back in the pool: no need to wait longer
    unless_gone: str = ""  # its death settles what we wait for


@dataclass(slots=True)
class Profiling:
    """Ops of jobs that are to be planned, plans in progress, and inquiries: plans of jobs not to be run."""

    effects: Effects
    measuring: Measuring
    holds: dict[str, Hold] = field(default_factory=dict)
    granted: dict[str, frozenset[str]] = field(default_factory=dict)  # workers to plan a job with
    _ops_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _reading: set[str] = field(default_factory=set)
    _unreadable: set[str] = field(default_factory=set)  # while they run
    _suspect: set[str] = field(default_factory=set)  # whose checkpoint a worker could not load
    _attempts: dict[str, int] = field(default_factory=dict)  # job -> the one being planned
    _asked_on: dict[str, Fingerprint] = field(default_factory=dict)  # of the plan asked for last
    _planned_on: dict[str, Fingerprint] = field(default_factory=dict)  # ... did not suffice
    _inquiries: dict[str, JobSpec] = field(default_factory=dict)
    _begun_s: dict[str, float] = field(default_factory=dict)  # since when figures are asked for
    _chosen: dict[str, list[str]] = field(default_factory=dict)  # workers to plan with, of a huge fleet
    _wanted: dict[str, frozenset[str]] = field(default_factory=dict)  # whose pairs a plan waits for
    _refined: Counter[str] = field(default_factory=Counter)
    _rest: dict[str, tuple[frozenset[str], ...]] = field(default_factory=dict)  # to be left out instead

    def know(self, job: str, ops: Mapping[str, int]) -> None:
        """Take in the distinct ops of a job: signature -> forward FLOPs."""
        self._ops_of[job] = tuple(ops)
        self.effects.roster.ops.flops.update(ops)
        self._reading.discard(job)
        self._suspect.discard(job)
        self.effects.advance = True

    def read_again(self, job: str) -> None:
        """Read the job and its checkpoints to the last byte before it is planned next: a worker could not
        load its part."""
        self._ops_of.pop(job, None)
        self._suspect.add(job)

    # ------------------------------------------------------------ when to plan again

    def may_plan(self, job: str) -> bool:
        """Whether nothing holds the job, and the fleet is another than the one that did not suffice."""
        if job in self.holds:
            return False
        planned_on = self._planned_on.get(job)
        return planned_on is None or planned_on != self.effects.roster.fingerprint()

    def wait_for_change(self, job: str) -> None:
        """Plan again only when the fleet is another than the one that was asked about, which does not
        suffice; it may be by now."""
        if job in self._asked_on:
            self._planned_on[job] = self._asked_on.pop(job)
        self.effects.advance = True

    def anything_changed(self) -> None:
        """Plan again: whatever kept jobs waiting may be over."""
        self._asked_on.clear()
        self._planned_on.clear()
        self.effects.advance = True

    def end_holds(self) -> None:
        """Drop holds whose time or cause is over."""
        roster = self.effects.roster
        for job, hold in list(self.holds.items()):
            blamed = roster.workers.get(hold.unless_gone)
            back = bool(hold.for_workers) and all(map(roster.is_idle, hold.for_workers))
            gone = bool(hold.unless_gone) and (blamed is None or blamed.member.gone)
            if self.effects.now_s >= hold.until_s or back or gone:
                del self.holds[job]
                self.effects.advance = True
        if self._begun_s:  # their survey may have taken long enough
            self.effects.advance = True

    # ------------------------------------------------------------ figures and plans

    def profiled(self, job: str, spec: JobSpec, training: bool) -> bool:
        """Ask for whatever is missing; True when a plan can be made.

        ``training``: another job runs and must not be disturbed, so links are taken as known.
        """
        self._unreadable.discard(job)
        if not self._read(job, spec):
            return False
        self._begun_s.setdefault(job, self.effects.now_s)
        precision = spec.training.precision.value
        if not training and not self._links_known(job, spec):
            return False
        return self.measuring.measure_ops(job, precision, self._ops_of[job], self._candidates(job, spec))

    def newcomers_timed(self, job: str, spec: JobSpec, workers: list[str]) -> bool:
        """Have idle workers time the ops of a job that runs; True when none of their answers is awaited."""
        if job in self._unreadable or not self._read(job, spec):
            return False
        precision = spec.training.precision.value
        return self.measuring.measure_ops(job, precision, self._ops_of[job], workers)

    def unreadable(self, job: str, reason: str) -> None:
        """Leave a job alone that could not be read, as its workers have what they need: it is read again when
        it is planned."""
        self.effects.drop("JobUnreadable", f"{reason}; {job} needs it for its next plan only", job)
        self._reading.discard(job)
        self._unreadable.add(job)

    def read_later(self, job: str) -> None:
        """Hold a job that could not be read for a while: it is read again when it is picked next."""
        self._reading.discard(job)
        self.holds[job] = Hold(self.effects.now_s + READ_AGAIN_S)

    def _read(self, job: str, spec: JobSpec) -> bool:
        """Return whether a job's ops are known; have it read where they are not, as after our restart."""
        if job not in self._ops_of and job not in self._reading:
            self._reading.add(job)
            self.effects.emit(do.ReadJob(job, spec, hashes=job in self._suspect))
        return job in self._ops_of

    def _candidates(self, job: str, spec: JobSpec) -> list[str]:
        """Return the idle workers to plan with. Of a huge fleet they stay the same until the plan is made:
        in one where somebody always comes, measuring would never end."""
        roster, free = self.effects.roster, self._free(job)
        if len(free) <= roster.probing.planned_workers and job not in self._chosen:
            return free
        idle = list(filter(roster.is_idle, self._chosen.get(job, ())))
        if not idle:
            plannable = roster.plannable(free, spec.training.precision.value)
            owner = [spec.data_of] if roster.is_idle(spec.data_of) else []
            idle = self._chosen[job] = list(dict.fromkeys((*owner, *plannable)))
        return idle

    def _free(self, job: str) -> list[str]:
        """Return the idle workers that a job was granted; of an inquiry all."""
        roster, granted = self.effects.roster, self.granted.get(job)
        return roster.idle() if granted is None else roster.in_order(filter(roster.is_idle, granted))

    def _links_known(self, job: str, spec: JobSpec) -> bool:
        roster = self.effects.roster
        if not self.measuring.measure_links(fresh=True):
            return False
        if (
            not self.measuring.large
            or self.effects.now_s - self._begun_s[job] >= roster.probing.survey_within_s
        ):
            return True
        return not roster.links.unsurveyed(self._chosen.get(job) or self._candidates(job, spec))

    def plan(self, job: str, version: int, spec: JobSpec, left_out: Iterable[Iterable[str]] = ((),)) -> None:
        """Ask the shell for a plan on the idle fleet, without the first of the sets ``left_out`` that leaves
        somebody; the others wait until that plan has failed."""
        attempt = self._attempts.get(job, 0) + 1
        self._attempts[job], self._asked_on[job] = attempt, self.effects.roster.fingerprint()
        precision, roster = spec.training.precision.value, self.effects.roster
        idle = self._candidates(job, spec)
        others = [worker for worker in idle if worker != spec.data_of]
        choices = dict.fromkeys(frozenset(some).intersection(others) for some in left_out)
        without, *rest = [some for some in choices if len(some) < len(idle)] or [frozenset()]
        self._rest[job] = tuple(rest)
        workers = [worker for worker in idle if worker not in without]
        fleet = replace(
            roster.fleet_for(job, workers, precision), losses_per_s=roster.losses.per_s(self.effects.now_s)
        )
        self._begun_s.pop(job, None)
        self._wanted.pop(job, None)
        self.measuring.stop(job)
        self.effects.emit(
            do.MakePlan(job, attempt, version, spec, fleet, beyond=len(self._free(job)) - len(idle))
        )

    def rest(self, job: str) -> tuple[frozenset[str], ...]:
        """Return the sets of workers that a plan could do without instead, where the one asked for fails."""
        return self._rest.get(job, ())

    def refine(self, job: str, plan: Plan) -> bool:
        """Return whether a large fleet's plan is to be made once more when the pairs of its workers, of
        which only some were measured, are known."""
        workers = self.effects.roster.in_order({place.worker for place in plan.places})
        unmeasured = self.measuring.large and self.effects.roster.links.unmeasured(workers)
        if unmeasured and self._refined[job] < REFINEMENTS:
            self._refined[job] += 1
            self._wanted[job] = frozenset(workers)
            self.effects.advance = True
            return True
        return False

    def refined(self, job: str, training: bool) -> bool:
        """Measure the pairs that a plan waits for; True when it is to be made with what is known."""
        wanted = self._wanted.get(job)
        if wanted is None:
            return False
        return training or self.measuring.measure_links(fresh=True, wanted=wanted)

    def stop(self, job: str) -> None:
        """Forget how far a job's planning is: it has a plan, or waits, or is over."""
        self.measuring.stop(job)
        for known in (self._begun_s, self._chosen, self._wanted, self._refined, self._rest):
            known.pop(job, None)

    def forget(self, job: str) -> None:
        """Forget everything about a job that is over."""
        self.stop(job)
        self.effects.roster.memory.forget(job)
        for known in (
            self.holds,
            self.granted,
            self._ops_of,
            self._attempts,
            self._asked_on,
            self._planned_on,
        ):
            known.pop(job, None)
        for jobs in (self._reading, self._unreadable, self._suspect):
            jobs.discard(job)

    def awaited(self, job: str, attempt: int) -> bool:
        """Whether this is the planning attempt that counts."""
        return self._attempts.get(job) == attempt

    def inquire(self, inquiry: str, spec: JobSpec, ops: Mapping[str, int]) -> None:
        """Make a plan for somebody who does not want it run."""
        self.know(inquiry, ops)
        self._inquiries[inquiry] = spec

    def answer_inquiries(self, training: bool) -> None:
        """Plan for those whose figures are there; while a job runs, with the figures at hand."""
        roster = self.effects.roster
        for name, spec in list(self._inquiries.items()):
            if not training and not self.profiled(name, spec, training):
                continue
            del self._inquiries[name]
            self._ops_of.pop(name, None)
            self.stop(name)
            workers = [w for w, x in roster.workers.items() if not x.member.gone and not x.quarantined]
            precision = spec.training.precision.value
            chosen = roster.plannable(workers, precision)
            rate = roster.losses.per_s(self.effects.now_s)
            fleet = replace(roster.fleet(chosen, precision), losses_per_s=rate)
            beyond = len(workers) - len(chosen)
            self.effects.emit(do.MakePlan(name, 0, 0, spec, fleet, beyond=beyond))
