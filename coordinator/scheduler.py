"""Members, rounds and plans behind one ``handle(event, now_s)``: events in, instructions out.

Pure: no clock, socket or file. The shell turns messages into events, carries the instructions
out in order, and makes a ``Journal`` durable before anything that follows it. What must survive a
restart is in the ledger, a fold over journalled facts; the rest is learnt again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from atoll.job import JobSpec
from coordinator.config import CoordinatorConfig
from coordinator.federated.driver import Federating, Hooks
from coordinator.membership import member as members
from coordinator.membership.link_table import judge_timing
from coordinator.membership.member import Member
from coordinator.membership.roster import Roster, refusal
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import Checkpoint, CheckpointStored, Fact, JobSubmitted, Ledger, RatioCapped
from coordinator.pipeline import machine
from coordinator.pipeline.calibration import learn
from coordinator.pipeline.driver import assignment, stage_of
from coordinator.pipeline.holds import Hold, Holds
from coordinator.pipeline.link_adaptation import Adapting, capped
from coordinator.pipeline.machine import JobState
from coordinator.pipeline.profiling import Preparer
from coordinator.pipeline.relink import changes, current
from coordinator.planning.ratios import label
from protos.telemetry import Event as Name

RESTART_GRACE_S = 15.0  # for the workers of a running job to come back after our restart
STALL_S = 0.25  # a tick later than this is our own stall


@dataclass(slots=True)
class Scheduler:
    """One coordinator's decisions; ``ledger`` may come from a replayed journal."""

    config: CoordinatorConfig
    ledger: Ledger
    now_s: float
    roster: Roster = field(init=False)
    preparer: Preparer = field(init=False)
    jobs: dict[str, JobState] = field(default_factory=dict)
    adapting: Adapting = field(init=False)
    federating: Federating = field(init=False)
    holds: Holds = field(default_factory=Holds)
    dropped: dict[str, int] = field(default_factory=dict)
    storage: str = ""  # why nothing can be stored now
    _out: list[do.Instruction] = field(default_factory=list)
    _dirty: bool = True
    _committed: JobState | None = None  # after its newest step, not learned from yet
    _tick_s: float | None = None

    def __post_init__(self) -> None:
        self.roster = Roster(self.config.liveness, self.config.probing)
        self.preparer = Preparer(self.roster, self.config.probing, self._emit)
        self.adapting = Adapting(self.roster, self.config.adaptation, self._emit)
        hooks = Hooks(
            emit=self._emit,
            record=self._record,
            send=self._send,
            log=self._log,
            drop=self._drop,
            move=self._move,
            label=self._label,
            shown=self._federated_shown,
        )
        self.federating = Federating(self.roster, hooks, self.config.concurrent_federations)
        for record in self.ledger.jobs.values():
            self._restore(record.submitted.job)

    def handle(self, event: ev.Event, now_s: float) -> list[do.Instruction]:
        """What is to be done after ``event``, in order."""
        self._out = []
        self.now_s = now_s
        self._learn()
        _HANDLERS[type(event)](self, event)
        if self._dirty:
            self._dirty = False
            self._advance()
        return self._out

    # ------------------------------------------------------------ views

    def spec_of(self, job: str, worker: str | None = None) -> JobSpec | None:
        """The spec of a job; with ``worker``, only where it holds a stage of it."""
        state = self.jobs.get(job)
        if state is None or (worker is not None and not self._uses(state, worker)):
            return None
        return state.spec

    def _uses(self, state: JobState, worker: str) -> bool:
        return stage_of(state, worker) is not None or self.federating.takes_part(state.job, worker)

    def refusal(self, spec: JobSpec) -> str | None:
        """Why this job cannot be accepted, None when it can."""
        waiting = sum(state.phase not in machine.ENDED for state in self.jobs.values())
        if waiting >= self.config.max_jobs:
            return f"{waiting} jobs wait or run already; cancel some or raise max_jobs"
        return self._not_resumable(spec) if spec.resume_of else None

    def _not_resumable(self, spec: JobSpec) -> str | None:
        """Why ``spec`` cannot go on from the job it names; shapes are the graphs' business."""
        old = self.ledger.jobs.get(spec.resume_of)
        if old is None:
            return f"no job {spec.resume_of} to resume; `atoll status` lists them"
        before, after = old.submitted.spec.federated, spec.federated
        if (before is None) != (after is None):
            return f"{spec.resume_of} and this job: only one of them is federated"
        if before is not None and after is not None:
            # Its clients' optimizers begin anew in every round: only the rule keeps a state.
            held, wanted, kind = before.rule.strategy, after.rule.strategy, "strategy"
        else:
            held, wanted = old.submitted.spec.training.optimizer.name, spec.training.optimizer.name
            kind = "optimizer"
        if held != wanted:
            return f"{spec.resume_of} holds the state of {held}, this one {wanted}; take the same {kind}"
        done = old.last_checkpoint.step
        if done >= spec.training.steps:
            return (
                f"{spec.resume_of} is at step {done} already, {spec.training.steps} steps asked for; "
                "raise --steps"
            )
        if old.submitted.spec.tensors.keys() != spec.tensors.keys():
            odd = sorted(old.submitted.spec.tensors.keys() ^ spec.tensors.keys())
            return f"{spec.resume_of} holds another model: {len(odd)} tensors differ, first {odd[0]}"
        return None

    # ------------------------------------------------------------ sessions

    def _opened(self, event: ev.SessionOpened) -> None:
        before = self.roster.open(event.worker, event.session, event.introduction, self.now_s)
        worker = self.roster.workers[event.worker]
        if before is not None:
            self._moved(event.worker, before, worker.member)
        wrong = refusal(event.introduction)
        if wrong is not None:
            self._set_aside(event.worker, wrong)
        if worker.member.phase is members.Phase.JOINED:
            self._move(event.worker, members.Admitted())
            self._take_back(event.worker)
            self.preparer.greet(event.worker, self.now_s)
        else:
            self._catch_up(event.worker)
        self._dirty = True

    def _take_back(self, worker: str) -> None:
        """A worker that was away may still hold a stage, and would refuse to be measured."""
        for state in self.jobs.values():
            if state.phase not in machine.ENDED and stage_of(state, worker) is not None:
                reason = "the stage was taken back while you were away"
                self._send(worker, do.ReleaseStage(state.job, state.version, reason))

    def _catch_up(self, worker: str) -> None:
        """What was under way to a worker when its connection broke is said again; its own last
        words it repeats itself."""
        member = self.roster.workers[worker].member
        self.federating.back(worker, self.now_s)
        state = self.jobs.get(member.job)
        stage = stage_of(state, worker) if state is not None else None
        if state is None or stage is None:
            return
        if state.phase is machine.Phase.LOADING and stage not in state.loaded:
            self._send(worker, assignment(state, stage, self.roster))
        elif state.phase in machine.STEPPING and state.last_commit is None:
            self._send(worker, do.StartStep(state.job, state.version, state.step))
        elif state.last_commit is not None:
            self._send(worker, state.last_commit)

    def _closed(self, event: ev.SessionClosed) -> None:
        worker = self.roster.workers.get(event.worker)
        if worker is None or worker.session != event.session:
            return
        worker.session = None
        self._move(event.worker, members.ConnectionLost())

    def _tick(self, event: ev.Tick) -> None:
        interval_s = self.config.liveness.heartbeat_s / 2
        if self._tick_s is not None and self.now_s - self._tick_s > interval_s + STALL_S:
            gap_s = self.now_s - self._tick_s - interval_s
            self.roster.forgive(gap_s)
            self._log(Name.SERVER_STALLED, "warning", stalled_s=round(gap_s, 3))
        self._tick_s = self.now_s
        for name, worker in list(self.roster.workers.items()):
            if not worker.member.gone:
                self._move(name, members.Tick())
        if self.preparer.expire(self.now_s) or self.holds.end(self.roster, self.now_s):
            self._dirty = True
        if self.federating.tick(self.now_s):
            self._dirty = True

    def _arrived(self, event: ev.Arrived) -> None:
        worker = self.roster.workers.get(event.worker)
        if worker is None or worker.session != event.session:
            self._drop(type(event.message).__name__, "of a session that was replaced")
            return
        self._move(event.worker, members.Heard())
        match event.message:
            case ev.Heartbeat():
                self._heartbeat(event.worker, event.message)
            case ev.Leaving(reason):
                self._move(event.worker, members.LeavingSaid(reason))
                self._lose_stage(event.worker, f"{self._label(event.worker)} left: {reason or 'asked to'}")
            case ev.Malformed(reason):
                self._set_aside(event.worker, reason)
                self._emit(do.CloseSession(event.worker, event.session, reason))
            case ev.CodecSpeeds(speeds):
                wrong = self.roster.codecs_timed(event.worker, speeds)
                if wrong is not None:
                    self._set_aside(event.worker, wrong)
            case ev.OpsProbed():
                self._ops_probed(event.worker, event.message)
            case ev.LinkProbed():
                self._link_probed(event.worker, event.message)
            case ev.StepReady():
                self._step_ready(event.worker, event.message)
            case ev.UpdateReady() | ev.ClientEvaluated() | ev.ClientFailed():
                self.federating.heard(event.worker, event.message, self.now_s)
            case ev.Loaded(job) if job in self.federating.jobs:
                self.federating.heard(event.worker, event.message, self.now_s)
            case _:
                self._from_stage(event.worker, event.message)

    def _uploading(self, event: ev.Uploading) -> None:
        worker = self.roster.workers.get(event.worker)
        if worker is not None and not worker.member.gone:
            self._move(event.worker, members.Heard())

    def _heartbeat(self, name: str, beat: ev.Heartbeat) -> None:
        worker = self.roster.workers[name]
        worker.memory_bytes = beat.memory_bytes
        self.roster.heard(name, beat.worker_time_s, self.now_s)
        held = (beat.job, beat.version)
        # Twice the same: not just a release that is on its way. After our restart a client keeps what it
        # has of a federated job until that invites it again.
        stays = beat.job == worker.member.job or self.federating.holds(beat.job)
        if beat.job and not stays and held == worker.heard_job:
            self._send(name, do.ReleaseStage(beat.job, beat.version, "this job does not use you any more"))
        worker.heard_job = held

    # ------------------------------------------------------------ figures

    def _ops_probed(self, worker: str, message: ev.OpsProbed) -> None:
        request = self.preparer.ops_answered(worker, message, self.now_s)
        self._dirty = True
        if request is None:
            return
        known = self.preparer.flops
        for signature, (forward_s, backward_s) in message.timings.items():
            for seconds in (forward_s, backward_s):
                wrong = judge_timing(worker, f"op {signature}", seconds, known.get(signature, 0))
                if wrong is not None:
                    self.roster.ops.timings.pop((worker, request.precision), None)
                    self._set_aside(worker, wrong)
                    return
        self._log(
            Name.OPS_PROBED, worker=worker, ops=len(message.timings), error=message.error, job=request.job
        )
        self._dirty = True

    def _link_probed(self, worker: str, message: ev.LinkProbed) -> None:
        wrong = self.roster.links.answered(worker, message, self.now_s)
        if wrong is not None:
            self._set_aside(worker, wrong)
        self._log(
            Name.LINK_PROBED,
            source=worker,
            target=message.peer,
            bandwidth_bps=round(message.bandwidth_bps) if math.isfinite(message.bandwidth_bps) else 0,
            rtt_s=message.rtt_s,
            error=message.error,
        )
        self._dirty = True

    def _step_ready(self, worker: str, report: ev.StepReady) -> None:
        state = self.jobs.get(report.job)
        elapsed_s = self.now_s - state.begun_s if state is not None and state.begun_s is not None else None
        wrong = self.roster.judge(worker, report, elapsed_s)
        if wrong is not None:
            self._set_aside(worker, wrong)
            return
        self._from_stage(worker, report)
        if state is not None and self.jobs[report.job].step > state.step:
            self._committed = self.jobs[report.job]

    def _learn(self) -> None:
        """Take in what the last committed step shows: at the next event, as workers wait for the commit."""
        state, self._committed = self._committed, None
        if state is not None:
            self.adapting.committed(state)
            learn(self.roster, state, follows=state.job in self.adapting.of)

    # ------------------------------------------------------------ jobs

    def _submitted(self, event: ev.Submitted) -> None:
        spec = event.spec
        start = Checkpoint(0, {})
        if spec.resume_of in self.ledger.jobs:
            start = self.ledger.jobs[spec.resume_of].last_checkpoint
        self.preparer.know(event.job, event.ops)
        self._record(JobSubmitted(event.job, event.submission, spec, start.step, start.tensors, self.now_s))
        self._restore(event.job)
        self._log(Name.JOB_SUBMITTED, job=event.job, name=spec.name, steps=spec.training.steps)
        self._emit(do.Notify(event.job))
        self._dirty = True

    def _restore(self, job: str) -> None:
        """A job's machine from what the ledger knows."""
        record = self.ledger.jobs[job]
        if record.submitted.spec.federated is not None:
            self.jobs[job] = self.federating.restore(record, self.now_s)
            return
        checkpoint = record.last_checkpoint
        state = JobState(
            job,
            record.submitted.spec,
            checkpoint,
            record.submitted.created_s,
            version=record.version,
            step=checkpoint.step,
            plan=record.plan,
            loss=record.loss,
            eval_loss=record.eval_loss,
        )
        if record.outcome:
            state = replace(
                state, phase=machine.Phase(record.outcome), reason=record.reason, step=record.steps
            )
        elif record.version:
            reason = f"the coordinator was restarted; goes on from step {checkpoint.step}"
            state = replace(state, phase=machine.Phase.PAUSED, reason=reason)
            workers = frozenset(s.worker for s in record.plan.stages) if record.plan else frozenset()
            self.holds.put(job, Hold(self.now_s + RESTART_GRACE_S, workers))
        self.jobs[job] = state

    def _read(self, event: ev.JobRead) -> None:
        self.preparer.know(event.job, event.ops)
        self._dirty = True

    def _unreadable(self, event: ev.JobUnreadable) -> None:
        if event.job in self.federating.jobs:
            self.federating.unreadable(event.job, event.reason, self.now_s)
            return
        self._job(event.job, machine.Broken(event.reason))

    def _plan_made(self, event: ev.PlanMade) -> None:
        state = self.jobs.get(event.job)
        if state is None or not self.preparer.awaited(event.job, event.attempt):
            return
        idle = set(self.roster.idle())
        missing = [s.worker for s in event.plan.stages if s.worker not in idle]
        if missing or self.storage:
            why = self.storage or f"{missing[0]} went away while the plan was made"
            self._job(event.job, machine.Waits(why))
            return
        plan = event.plan
        self._log(
            Name.PLAN_MADE,
            job=event.job,
            version=plan.version,
            stages=len(plan.stages),
            predicted_s=plan.prediction.step_s if plan.prediction else None,
        )
        self._job(event.job, machine.Planned(plan))

    def _plan_failed(self, event: ev.PlanFailed) -> None:
        if event.job not in self.jobs or not self.preparer.awaited(event.job, event.attempt):
            return
        self._log(Name.PLAN_FAILED, "warning", job=event.job, reason=event.reason)
        if event.hopeless:
            self._job(event.job, machine.Broken(event.reason))
            return
        self.preparer.wait_for_change(event.job)
        self._job(event.job, machine.Waits(f"waits for a fleet that suffices: {event.reason}"))

    def _links_chosen(self, event: ev.LinksChosen) -> None:
        state = self.jobs.get(event.job)
        if state is None or state.phase not in machine.STEPPING:
            return
        wish = self.adapting.chosen(state, event)
        if wish is not None:
            self._job(event.job, wish)

    def _links_due(self, state: JobState, due: machine.LinksDue) -> None:
        """Say once for each link that changes: from what, to what, from which step on, and why."""
        stages = state.plan.stages if state.plan else ()
        for (source, target), (was, new) in changes(due.before, due.relink.links).items():
            self._log(
                Name.LINK_CHANGED,
                job=state.job,
                source=stages[source].worker,
                target=stages[target].worker,
                before=label(was),
                after=label(new),
                first_step=due.relink.first_step,
                version=due.relink.version,
                reason=new.reason,
            )

    def _aggregator_moved(self, event: ev.AggregatorOpened | ev.AggregatorBroke) -> None:
        self.federating.answered(event, self.now_s)
        self._dirty = True

    def _aggregator_answered(self, event: ev.Aggregated | ev.CentrallyEvaluated) -> None:
        self.federating.answered(event, self.now_s)

    def _plan_asked(self, event: ev.PlanAsked) -> None:
        self.preparer.inquire(event.inquiry, event.spec, event.ops)
        self._dirty = True

    def _cancel(self, event: ev.CancelAsked) -> None:
        if event.job in self.federating.jobs:
            self.federating.cancel(event.job, event.reason, self.now_s)
        elif event.job in self.jobs:
            self._job(event.job, machine.Cancelled(event.reason))

    def _from_stage(self, worker: str, message: ev.JobMessage) -> None:
        state = self.jobs.get(message.job)
        stage = stage_of(state, worker) if state is not None else None
        if state is None or stage is None:
            self._drop(type(message).__name__, f"of {worker}, which holds no stage of {message.job}")
            return
        if isinstance(message, ev.StageFailed) and message.lost_peer and current(state, message.version):
            # Who is to blame shows within the time in which the dead are noticed.
            until_s = self.now_s + self.config.liveness.dead_after_s
            self.holds.put(state.job, Hold(until_s, unless_gone=message.lost_peer))
        if isinstance(message, ev.StateStored) and not message.tensors.keys() <= state.spec.tensors.keys():
            odd = sorted(message.tensors.keys() - state.spec.tensors.keys())[0]
            self._set_aside(worker, f"{worker} stored {odd!r}, which {state.job} does not have")
            return
        self._job(message.job, machine.FromStage(stage, message))

    def _job(self, job: str, event: machine.Event) -> None:
        """Step a job's machine and translate what it wants."""
        before = self.jobs[job]
        state, todo = machine.step(before, event, self.now_s)
        self.jobs[job] = state
        for item in todo:
            self._obey(before if state.plan is None else state, item)
        changed = (before.phase, before.reason) != (state.phase, state.reason)
        if changed:
            level = "warning" if state.phase in (machine.Phase.PAUSED, machine.Phase.FAILED) else "info"
            quiet = before.phase in machine.STEPPING and state.phase in machine.STEPPING
            self._log(
                Name.JOB_STATE, "debug" if quiet else level, job=job, state=state.phase, reason=state.reason
            )
        if before.phase is not state.phase and not (
            before.phase in machine.STEPPING and state.phase in machine.STEPPING
        ):
            self._dirty = True
        if changed or before.step != state.step or before.eval_loss != state.eval_loss:
            self._emit(do.Notify(job))
        stepping, at_end = state.phase in machine.STEPPING, state.phase is machine.Phase.STORING
        if before.awaiting_eval is not None and state.awaiting_eval is None and (stepping or at_end):
            cap = self.adapting.evaluated(state, at_end)
            if cap is not None:
                self._record(RatioCapped(job, state.step, cap))
        if state.phase in machine.ENDED:
            self.adapting.over(job)

    def _obey(self, state: JobState, todo: machine.Todo) -> None:
        match todo:
            case machine.Record(fact):
                self._record(fact)
                if isinstance(fact, CheckpointStored):
                    self._emit(do.SweepBlobs())
            case machine.ToStages(message, stage):
                for at, spec in enumerate(state.plan.stages if state.plan else ()):
                    if stage is None or stage == at:
                        self._send(spec.worker, message)
            case machine.LinksDue():
                self._links_due(state, todo)
            case machine.AssignAll():
                self.adapting.adopted(state, self.ledger.jobs[state.job].cap)
                for at in range(state.n_stages):
                    self._assign(state, at)
            case machine.ReleaseAll(reason):
                self._release(state, reason)
            case machine.Point(step, name, value):
                self._emit(do.Measured(state.job, step, name, value))
            case machine.Dropped(why):
                self._drop("stage message", why, state.job)

    def _assign(self, state: JobState, stage: int) -> None:
        assert state.plan is not None  # noqa: S101 - a plan was just adopted
        worker = state.plan.stages[stage].worker
        self._move(worker, members.AssignedTo(state.job, stage))
        self._send(worker, assignment(state, stage, self.roster))

    def _release(self, state: JobState, reason: str) -> None:
        for spec in state.plan.stages if state.plan else ():
            worker = self.roster.workers.get(spec.worker)
            if worker is not None and worker.member.job == state.job:
                self._send(spec.worker, do.ReleaseStage(state.job, state.version, reason))
                self._move(spec.worker, members.Released(f"released by {state.job}"))

    # ------------------------------------------------------------ members

    def _move(self, worker: str, event: members.Event) -> None:
        before, after, refused = self.roster.move(worker, event, self.now_s)
        if refused is not None:
            self._drop(type(event).__name__, refused)
        self._moved(worker, before, after)

    def _moved(self, worker: str, before: Member, after: Member) -> None:
        restarted = before.incarnation != after.incarnation
        if before.phase is after.phase and not restarted:
            return
        self._dirty = True
        level = "warning" if after.phase in (members.Phase.SUSPECT, members.Phase.DEAD) else "info"
        self._log(Name.WORKER_STATE, level, worker=worker, state=after.phase, reason=after.reason)
        self._tell_moved(after, restarted=restarted)
        if restarted or after.gone:
            self.preparer.forget(worker)
            if before.job:
                self._lose_job(before.job, worker, f"{self._label(worker)} is lost: {after.reason}")
        known = self.roster.workers[worker]
        if after.gone and known.session is not None:
            self._emit(do.CloseSession(worker, known.session, after.reason))
            known.session = None

    def _lent(self, event: ev.AppLent) -> None:
        """A node of an app's run is busy like the holder of a stage; no plan uses it meanwhile."""
        worker = self.roster.workers[event.worker]
        if worker.idle:
            self._move(event.worker, members.AssignedTo(event.run, 0))
        else:
            self._tell_moved(worker.member, restarted=False)

    def _returned(self, event: ev.AppReturned) -> None:
        worker = self.roster.workers.get(event.worker)
        if worker is not None and worker.member.job == event.run:
            self._move(event.worker, members.Released(event.reason))

    def _tell_moved(self, member: Member, *, restarted: bool) -> None:
        self._emit(do.MemberMoved(member.worker, member.phase, member.job, restarted, member.reason))

    def _lose_stage(self, worker: str, reason: str) -> None:
        job = self.roster.workers[worker].member.job
        if job:
            self._lose_job(job, worker, reason)

    def _lose_job(self, job: str, worker: str, reason: str) -> None:
        if job in self.federating.jobs:
            self.federating.lost(job, worker, reason, self.now_s)
            return
        state = self.jobs.get(job)
        if state is not None and state.phase in machine.RUNNING and stage_of(state, worker) is not None:
            self._job(job, machine.StageLost(reason))

    def _set_aside(self, worker: str, reason: str) -> None:
        """No plan uses it until its process starts anew; the run goes on without it."""
        self.roster.workers[worker].aside = reason
        self._log(Name.WORKER_SET_ASIDE, "warning", worker=worker, reason=reason)
        self._dirty = True
        self._lose_stage(worker, f"{self._label(worker)} was set aside: {reason}")

    def _kick(self, event: ev.KickAsked) -> None:
        if event.worker not in self.roster.workers:
            return
        reason = event.reason or "asked by the owner"
        self._send(event.worker, do.Dismiss(reason, event.for_good))
        self._log(Name.WORKER_KICKED, "warning", worker=event.worker, reason=reason, for_good=event.for_good)
        self._move(event.worker, members.Kicked(reason))

    # ------------------------------------------------------------ storage

    def _storage_failed(self, event: ev.StorageFailed) -> None:
        if self.storage:
            return
        self.storage = event.reason
        self._log(Name.STORAGE_FAILED, "error", reason=event.reason)
        self.federating.storage_failed(event.reason, self.now_s)
        for state in self._pipeline().values():
            if state.phase in machine.RUNNING:
                self._job(state.job, machine.StageLost(event.reason))
            elif state.phase not in machine.ENDED:
                self._job(state.job, machine.Waits(event.reason))

    def _storage_recovered(self, event: ev.StorageRecovered) -> None:
        self.storage = ""
        self._log(Name.STORAGE_RECOVERED)
        self.preparer.anything_changed()
        self._dirty = True

    # ------------------------------------------------------------ what runs next

    def _advance(self) -> None:
        """Pick jobs while there is room, measure what they need, plan them."""
        if self.storage:
            return
        pipeline = self._pipeline()
        busy = [s for s in pipeline.values() if s.phase in machine.RUNNING | machine.PREPARING]
        waiting = [s for s in pipeline.values() if s.phase in machine.WAITING]
        for state in sorted(waiting, key=lambda s: s.created_s):
            if len(busy) < self.config.concurrent_jobs and self._may_start(state):
                self._job(state.job, machine.Picked("measuring devices and links"))
                busy.append(self.jobs[state.job])
            elif len(busy) >= self.config.concurrent_jobs and state.phase is machine.Phase.QUEUED:
                first = busy[0]
                reason = f"waits for {first.job} ({first.phase.value}, step {first.step} of {first.steps})"
                if not state.reason.startswith(f"waits for {first.job} "):
                    self._job(state.job, machine.Waits(reason))
        self._prepare()
        self.federating.advance(self._pipeline(), self.now_s)

    def _pipeline(self) -> dict[str, JobState]:
        """The jobs that are cut into stages."""
        return {job: state for job, state in self.jobs.items() if job not in self.federating.jobs}

    def _federated_shown(self, face: JobState) -> None:
        """A federated job has changed: its next part may be due, and its watchers want to know."""
        if self.jobs[face.job].phase is not face.phase:
            self._dirty = True
        self.jobs[face.job] = face
        self._emit(do.Notify(face.job))

    def _may_start(self, state: JobState) -> bool:
        if not self.roster.idle():
            reason = "no worker is in the pool; start some with `atoll-worker join`"
            if reason not in state.reason:
                prefix = f"{state.reason}; " if state.phase is machine.Phase.PAUSED else ""
                self._job(state.job, machine.Waits(prefix + reason))
            return False
        return state.job not in self.holds and self.preparer.changed(state.job)

    def _prepare(self) -> None:
        training = any(s.phase in machine.RUNNING | machine.FEDERATING for s in self.jobs.values())
        for state in self._pipeline().values():
            if state.phase is machine.Phase.PROFILING and self.preparer.profile(
                state.job, state.spec, training, self.now_s
            ):
                self._job(state.job, machine.Profiled())
                cap = self.ledger.jobs[state.job].cap
                self.preparer.plan(state.job, state.version + 1, capped(state.spec, cap))
        self.preparer.answer_inquiries(training, self.now_s)
        if not training:
            self.preparer.measure_links(fresh=False, now_s=self.now_s)

    # ------------------------------------------------------------ output

    def _emit(self, instruction: do.Instruction) -> None:
        self._out.append(instruction)

    def _send(self, worker: str, message: do.Message) -> None:
        known = self.roster.workers.get(worker)
        if known is not None and known.session is not None:
            self._emit(do.SendTo(worker, message))

    def _record(self, fact: Fact) -> None:
        self.ledger.apply(fact)
        self._emit(do.Journal(fact))
        line = do.line_of(fact)
        if line is not None:
            self._emit(line)

    def _log(self, event: Name, level: str = "info", job: str = "", **fields: Any) -> None:
        self._emit(do.Log(event.value, level, job, fields))

    def _drop(self, kind: str, why: str, job: str = "") -> None:
        self.dropped[kind] = self.dropped.get(kind, 0) + 1
        self._log(Name.MESSAGE_DROPPED, "debug", job=job, kind=kind, why=why)

    def _label(self, worker: str) -> str:
        known = self.roster.workers.get(worker)
        name = known.introduction.name if known is not None else ""
        return f"{name} ({worker})" if name and name != worker else worker


_HANDLERS: Mapping[type, Callable[[Scheduler, Any], None]] = {
    ev.SessionOpened: Scheduler._opened,
    ev.SessionClosed: Scheduler._closed,
    ev.Arrived: Scheduler._arrived,
    ev.Uploading: Scheduler._uploading,
    ev.Tick: Scheduler._tick,
    ev.Submitted: Scheduler._submitted,
    ev.JobRead: Scheduler._read,
    ev.JobUnreadable: Scheduler._unreadable,
    ev.PlanMade: Scheduler._plan_made,
    ev.PlanFailed: Scheduler._plan_failed,
    ev.PlanAsked: Scheduler._plan_asked,
    ev.LinksChosen: Scheduler._links_chosen,
    ev.LinksFailed: lambda self, event: self.adapting.failed(event),
    ev.CancelAsked: Scheduler._cancel,
    ev.AppLent: Scheduler._lent,
    ev.AppReturned: Scheduler._returned,
    ev.KickAsked: Scheduler._kick,
    ev.StorageFailed: Scheduler._storage_failed,
    ev.StorageRecovered: Scheduler._storage_recovered,
    **dict.fromkeys((ev.AggregatorOpened, ev.AggregatorBroke), Scheduler._aggregator_moved),
    **dict.fromkeys((ev.Aggregated, ev.CentrallyEvaluated), Scheduler._aggregator_answered),
}
