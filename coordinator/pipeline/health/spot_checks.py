"""Spot checks: now and then an idle worker repeats a stage's newest steps, and has to agree. Pure.

Which rank is checked when, ``digests`` draws; who repeats loads the newest checkpoint and is sent what the
neighbours' send logs hold, beside the plan and without disturbing a step. Whoever departs from what a rank
has reported is one word against another: a third worker of the same class repeats the same steps, and two
that agree outvote one. Without a third both are named, and the job goes on. Who is needed elsewhere is
let go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from coordinator.membership import member as members
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import Checkpoint, SpotChecked, WorkRejected
from coordinator.messages.jobs import (
    BESIDE,
    ENDED,
    STEPPING,
    WAITING,
    Cause,
    Event,
    JobState,
    LogsWanted,
    Phase,
    anew,
)
from coordinator.pipeline import history
from coordinator.pipeline.assigning import neighbours, repetition
from coordinator.pipeline.health.digests import Difference, Verdict, compare, drawn, judge
from coordinator.pipeline.health.evidence import Culprit, Evidence
from protos.telemetry import Event as Name

if TYPE_CHECKING:
    from atoll.device_class import DeviceClass
    from coordinator.membership.effects import Effects
    from coordinator.membership.roster import Roster, Worker
    from coordinator.messages.facts import JobRecord
    from coordinator.pipeline.health.suspicion import Suspicion

MOST_TRIES = 3  # of workers to repeat the same steps, before that is given up
PATIENCE = 10.0  # times as long as training took for the steps, and ...
LEAST_S = 120.0  # ... for loading


@dataclass(frozen=True, slots=True)
class Case:
    """A rank's steps since ``source``, up to ``end`` - 1: what was ``said`` of each, by whom, and what others
    who repeated them arrived at. None: not to be compared, as it was computed by another class of device."""

    rank: int
    source: Checkpoint
    end: int
    replay: do.Replay
    said: tuple[str | None, ...]
    workers: tuple[str, ...]
    device_class: DeviceClass
    opinions: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def first(self) -> int:
        return self.source.step

    def worker_at(self, step: int) -> str:
        return self.workers[min(max(step - self.first, 0), len(self.workers) - 1)]


@dataclass(frozen=True, slots=True)
class _Running:
    case: Case
    worker: str
    version: int
    until_s: float


@dataclass(slots=True)
class SpotChecks:
    """All jobs of stages; ``step``: step a job's machine. ``wanted``: whether workers are needed. ``alike``:
    idle workers of a class of device that could hold a rank, the quickest first."""

    effects: Effects
    suspicion: Suspicion
    step: Callable[[str, Event], None]
    wanted: Callable[[], bool]
    alike: Callable[[JobState, Roster, int, DeviceClass], list[str]]
    _due: dict[str, int] = field(default_factory=dict)  # job -> rank
    _disputes: dict[str, Case] = field(default_factory=dict)  # job -> what a third worker is to repeat
    _running: dict[str, _Running] = field(default_factory=dict)  # by job
    _failures: dict[str, int] = field(default_factory=dict)  # by job, to repeat what is due or in dispute
    _count: int = 0

    # ------------------------------------------------------------ what jobs do

    def committed(self, state: JobState) -> None:
        """Begin a check where one is due after the newest committed step."""
        record = self.effects.ledger.jobs[state.job]
        secret = f"{state.job} {record.submitted.submission} {record.submitted.created_s!r}"
        rank = drawn(secret, state.step - 1, state.spec.training.spot_checks, state.n_ranks)
        if rank is not None:
            self._due[state.job] = rank
            self._failures.pop(state.job, None)
        self._begin(self.effects.jobs[state.job])

    def replayed(self, state: JobState, rank: int, worker: str, digests: tuple[ev.Digest, ...]) -> None:
        """Compare what a newcomer arrived at, which has repeated a lost worker's steps."""
        case = self._case(state, rank, state.run.source or state.checkpoint, worker) if digests else None
        if case is not None and state.job not in self._disputes:
            self._heard(state, case, worker, _joined(digests))

    def stepped(self, before: JobState, state: JobState) -> None:
        """Follow a job from one state to the next: checks are of the plan that runs."""
        moved = before.run.assigned != state.run.assigned
        if moved or state.phase not in STEPPING | {Phase.STORING}:
            self._end(state.job, again=True)
        if self._due.get(state.job, 0) >= state.n_ranks:  # replicas were lost
            self._due.pop(state.job, None)
        if state.phase in ENDED or state.phase in WAITING:
            self._due.pop(state.job, None)
            self._failures.pop(state.job, None)
            if self._disputes.pop(state.job, None) is not None:
                self._log(state.job, "nobody is left who could repeat the steps in dispute", "warning")
                self._want_logs(state.job)
        if state.phase in ENDED:
            self.suspicion.dispute(state, {})

    def tick(self, jobs: Mapping[str, JobState]) -> None:
        """Begin what is due, and end what takes too long."""
        for job, running in list(self._running.items()):
            if self.effects.now_s > running.until_s:
                self._log(job, f"{self._label(running.worker)} took too long to repeat steps")
                self._end(job, again=True, failed=True)
        if self.wanted():
            self.make_way()
            return
        for job in sorted({*self._due, *self._disputes}):
            self._begin(jobs[job])

    def make_way(self) -> None:
        """Let everybody go who repeats steps: workers are needed."""
        for job in list(self._running):
            self._end(job, again=True)

    # ------------------------------------------------------------ who repeats

    def case_of(self, job: str, worker: str) -> Case | None:
        """Return what a worker repeats beside a job's plan, None where it does not."""
        running = self._running.get(job)
        return running.case if running is not None and running.worker == worker else None

    def repeats(self, job: str, worker: str) -> bool:
        """Whether a worker repeats steps of a job beside its plan."""
        return self.case_of(job, worker) is not None

    def current(self, job: str, version: int) -> bool:
        """Whether somebody repeats steps of a job as a plan of that version."""
        running = self._running.get(job)
        return running is not None and running.version == version

    def sources(self) -> list[Checkpoint]:
        """Return the checkpoints that are still to be loaded for a check."""
        return [case.source for case in (*(r.case for r in self._running.values()), *self._disputes.values())]

    def lost(self, job: str, worker: str) -> None:
        """Who repeats steps is gone."""
        if self.repeats(job, worker):
            self._end(job, again=True, failed=True)

    def heard(self, state: JobState, message: ev.StageMessage) -> None:
        """Handle what who repeats steps says."""
        running = self._running[state.job]
        if message.version != running.version:
            self.effects.drop(type(message).__name__, f"of plan {message.version} beside the plan", state.job)
        elif isinstance(message, ev.Loaded):
            self._end(state.job, again=False)
            self._heard(state, running.case, running.worker, _joined(message.digests))
        elif isinstance(message, ev.StageFailed):
            words = f"{self._label(running.worker)} could not repeat steps of rank {running.case.rank}"
            self._log(state.job, f"{words}: {message.reason}")
            self._end(state.job, again=True, failed=True)

    # ------------------------------------------------------------ beginning and ending

    def _begin(self, state: JobState) -> None:
        job = state.job
        if job in self._running or state.phase not in STEPPING or self.effects.storage or self.wanted():
            return
        case = self._disputes.get(job)
        if case is not None and not self._has_evidence(state, case):
            del self._disputes[job]
            self._log(job, "the messages of the steps in dispute have left the send logs", "warning")
            self._want_logs(job)
            case = None
        if case is None and job in self._due:
            worker = state.workers[self._due[job]] if state.plan is not None else ""
            case = self._case(state, self._due[job], state.checkpoint, worker)
            if case is not None and not self._has_evidence(state, case):
                case = None
        if case is None:
            return
        # Who is timing ops would not answer: it may be about to join the plan.
        ops = self.effects.roster.ops
        heard = {worker for worker, _ in case.opinions}
        for worker in self.alike(state, self.effects.roster, case.rank, case.device_class):
            if worker not in heard and worker not in case.workers and not ops.asked(worker):
                self._start(state, case, worker)
                return

    def _case(self, state: JobState, rank: int, source: Checkpoint, worker: str) -> Case | None:
        """Return what is known of a rank's steps since ``source``, to be compared with one of the class of
        ``worker``; None where nothing can be."""
        record, workers = self.effects.ledger.jobs[state.job], self.effects.roster.workers
        known = workers.get(worker)
        replay = history.replay(state, record, rank, source)
        count = state.step - source.step
        if known is None or replay is None or not history.ran_alike(record, source.step):
            return None
        if not 0 < count <= min(len(record.digests), len(record.scales)):
            return None
        wanted = known.introduction.device_class
        who = tuple(record.worker_at(rank, step) for step in range(source.step, state.step))
        said = tuple(
            step[rank] if rank < len(step) and _class_is(workers, name, wanted) else None
            for step, name in zip(record.digests[-count:], who, strict=True)
        )
        if said[-1] is None:
            return None
        return Case(rank, source, state.step, replace(replay, stores=()), said, who, wanted)

    def _has_evidence(self, state: JobState, case: Case) -> bool:
        """Whether the neighbours' send logs reach back to the first step of a case."""
        if state.plan is None or len(state.plan.replicas) != 1 or case.rank >= state.n_ranks:
            return False
        others = neighbours(state.plan, case.rank)
        return all(history.logged_from(state, self.effects.roster, other) <= case.first for other in others)

    def _start(self, state: JobState, case: Case, worker: str) -> None:
        effects, job = self.effects, state.job
        self._due.pop(job, None)
        self._count += 1
        version = BESIDE + self._count
        each_s = state.median_step_s or 0.0
        until_s = effects.now_s + LEAST_S + PATIENCE * (case.end - case.first) * each_s
        self._running[job] = _Running(case, worker, version, until_s)
        assign, said = repetition(state, case, worker, version, effects.roster)
        effects.move(worker, members.AssignedTo(job, members.NO_RANK))
        for neighbour, message in said.items():
            effects.send(neighbour, message)
        effects.send(worker, assign)
        self.step(job, LogsWanted(case.first))
        effects.log(
            Name.CHECK_BEGUN,
            "debug",
            job=job,
            rank=case.rank,
            worker=worker,
            step=case.first,
            steps=case.end - case.first,
        )

    def _end(self, job: str, *, again: bool, failed: bool = False) -> None:
        """Release who repeats steps; ``again``: they are to be repeated by somebody, unless that ``failed``
        often."""
        running = self._running.pop(job, None)
        if running is None:
            return
        effects, case, worker = self.effects, running.case, running.worker
        known = effects.roster.workers.get(worker)
        if known is not None and known.member.job == job:
            effects.send(worker, do.Release(job, running.version, "the steps were repeated"))
            effects.move(worker, members.Released("has repeated steps"))
        state = effects.jobs[job]
        if state.plan is not None and case.rank < state.n_ranks:
            for other in neighbours(state.plan, case.rank):
                effects.send(
                    state.plan.places[other].worker, do.StandbysHere(job, state.version, (), checks=True)
                )
        if failed:
            self._failures[job] = self._failures.get(job, 0) + 1
        if self._failures.get(job, 0) >= MOST_TRIES:
            self._disputes.pop(job, None)
        elif again and not case.opinions:
            self._due.setdefault(job, case.rank)
        self._want_logs(job)
        effects.emit(do.SweepBlobs())

    def _want_logs(self, job: str) -> None:
        """Have send logs trimmed again, unless steps are in dispute."""
        if job not in self._disputes and self.effects.jobs[job].logs_from is not None:
            self.step(job, LogsWanted(None))

    # ------------------------------------------------------------ what comes of it

    def _heard(self, state: JobState, case: Case, worker: str, opinion: tuple[str, ...]) -> None:
        if case.opinions:
            self._judge(state, case, worker, opinion)
            return
        difference = compare(case.said, opinion, case.first)
        if difference is None:
            self._agreed(state, case, worker)
            return
        place, step = self._place(state, case), difference.step + 1
        holder = case.worker_at(difference.step)
        what = "were sent different messages for" if difference.inputs else "do not agree on"
        words = f"suspected: {self._label(holder)} and {self._label(worker)} {what} step {step} of {place}"
        self._log(state.job, words, "warning", worker=holder, by=worker, step=difference.step)
        self.suspicion.dispute(state, dict.fromkeys((holder, worker), words))
        if state.spec.training.spot_checks:
            self._disputes[state.job] = replace(case, opinions=((worker, opinion),))
            self.step(state.job, LogsWanted(case.first))
            self._begin(self.effects.jobs[state.job])

    def _agreed(self, state: JobState, case: Case, worker: str) -> None:
        self.effects.record(SpotChecked(state.job, case.rank, case.first, case.end, worker))
        self._log(
            state.job,
            f"{self._label(worker)} repeated steps {case.first + 1} to {case.end} of "
            f"{self._place(state, case)} with the same result",
            by=worker,
            step=case.end - 1,
        )

    def _judge(self, state: JobState, case: Case, second: str, opinion: tuple[str, ...]) -> None:
        """Two have repeated the same steps, and the first did not agree with who computed them."""
        first, earlier = case.opinions[0]
        self._disputes.pop(state.job, None)
        verdict, difference = judge(case.said, earlier, opinion, case.first)
        holder, place, at = case.worker_at(difference.step), self._place(state, case), difference.step + 1
        labels = {name: self._label(name) for name in (holder, first, second)}
        if verdict is Verdict.FIRST:
            self.suspicion.dispute(state, {})
            self._agreed(state, case, second)
            self._want_logs(state.job)
            words = (
                f"wrong: {labels[first]} repeated step {at} of {place} otherwise than {labels[holder]} and "
                f"{labels[second]}"
            )
            self.suspicion.guilt.found(Evidence.OUTVOTED, Culprit(first, words))
        elif verdict is Verdict.HOLDER:
            self.suspicion.dispute(state, {})
            self._reject(
                state,
                case,
                difference,
                f"wrong: {labels[holder]} computed step {at} of {place} otherwise than {labels[first]} and "
                f"{labels[second]}",
            )
        else:
            why = "a neighbour may have sent other messages" if difference.inputs else "all three differ"
            words = (
                f"suspected: {labels[holder]} or {labels[first]} computed step {at} of {place} wrong, which "
                f"{labels[second]} could not decide: {why}"
            )
            self._log(state.job, words, "warning", worker=holder, by=first, step=difference.step)
            self.suspicion.dispute(
                state, dict.fromkeys(self._suspects(state, case, difference, first), words)
            )
            self._want_logs(state.job)

    def _suspects(self, state: JobState, case: Case, difference: Difference, first: str) -> list[str]:
        found = [case.worker_at(difference.step), first]
        if difference.inputs and state.plan is not None:
            found += [state.plan.places[other].worker for other in neighbours(state.plan, case.rank)]
        return found

    def _reject(self, state: JobState, case: Case, difference: Difference, reason: str) -> None:
        """Have steps done anew that rest on a wrong one, without who computed it."""
        worker = case.worker_at(difference.step)
        before = trusted(self.effects.ledger.jobs[state.job], case.rank, case.first, difference.step)
        self.effects.record(WorkRejected(state.job, before.step, worker, reason))
        self._want_logs(state.job)
        self.step(state.job, anew(state, reason, Cause.WRONG, before))
        self.suspicion.guilt.found(Evidence.OUTVOTED, Culprit(worker, reason))

    # ------------------------------------------------------------ words

    def words(self, state: JobState) -> str:
        """Return what a job's spot checks have shown so far, for its owner; "" without any."""
        share, record = state.spec.training.spot_checks, self.effects.ledger.jobs[state.job]
        if not share or not record.agreed or state.plan is None:
            return ""
        places = state.plan.places
        agreed = ", ".join(
            f"stage {places[rank].stage} {f'through step {step}' if step > record.start.step else 'not yet'}"
            for rank, step in enumerate(record.agreed[: len(places)])
        )
        words = f"spot checks, 1 in {round(1.0 / share)} steps; repeated with the same result: {agreed}"
        running = self._running.get(state.job)
        if running is not None:
            where = f"{self._place(state, running.case)} from step {running.case.first + 1}"
            words = f"{words}; {self._label(running.worker)} repeats {where}"
        if state.job in self._disputes:
            words = f"{words}; {self._place(state, self._disputes[state.job])} is in dispute"
        return words

    def _place(self, state: JobState, case: Case) -> str:
        return (
            f"stage {state.plan.places[case.rank].stage}" if state.plan is not None else f"rank {case.rank}"
        )

    def _label(self, worker: str) -> str:
        return self.effects.label(worker)

    def _log(self, job: str, words: str, level: str = "info", **fields: object) -> None:
        self.effects.log(Name.STEPS_CHECKED, level, job=job, reason=words, **fields)


def trusted(record: JobRecord, rank: int, base: int, step: int) -> Checkpoint:
    """Return the state to go back to where a rank's ``step`` is wrong, repeated from the checkpoint of
    ``base``: the newest that the rank had not gone beyond when it was last found to compute as others do.

    A checkpoint from which already the first step comes out otherwise may not be what the rank had.
    """
    through = record.agreed[rank] if rank < len(record.agreed) else record.start.step
    for checkpoint in reversed(record.checkpoints):
        forged = checkpoint.step == base == step
        if checkpoint.step <= min(through, step) and not forged:
            return checkpoint
    return record.start


def _joined(digests: tuple[ev.Digest, ...]) -> tuple[str, ...]:
    return tuple(digest.gradients + digest.inputs for digest in digests)


def _class_is(workers: Mapping[str, Worker], name: str, wanted: DeviceClass) -> bool:
    known = workers.get(name)
    return known is not None and known.introduction.device_class == wanted
