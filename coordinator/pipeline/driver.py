"""The driver of jobs that are cut into stages: from events to their machines, and what those want.

A job waits for its turn, is profiled and planned on the idle fleet, and holds the plan's workers until
it ends or loses one. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from coordinator.membership import member as members
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import CheckpointStored, CheckpointTorn, JobRecord, RatioCapped, RoundMet
from coordinator.messages.jobs import (
    BESIDE,
    ENDED,
    FEDERATING,
    PREPARING,
    RUNNING,
    STEPPING,
    UNFIT,
    WAITING,
    Broken,
    Cancelled,
    Dropped,
    Event,
    Exclude,
    FromRank,
    JobState,
    LinksDue,
    LogsShort,
    OddLoss,
    Phase,
    Picked,
    Placed,
    PlanChange,
    Planned,
    Point,
    Profiled,
    Record,
    Redo,
    Resumed,
    Todo,
    ToRanks,
    Torn,
    Waits,
    anew,
)
from coordinator.pipeline import history, machine, periods, restart
from coordinator.pipeline.assigning import assignment, of_neighbours, reconfiguration, said_to
from coordinator.pipeline.beside import Beside
from coordinator.pipeline.changes import reconfigure
from coordinator.pipeline.changes.losses import Losses
from coordinator.pipeline.changes.seats import Seats
from coordinator.pipeline.health.doubt import as_failure, left_out
from coordinator.pipeline.health.stuck import Stuck
from coordinator.pipeline.health.suspicion import Suspicion
from coordinator.pipeline.history import current
from coordinator.pipeline.restart import Returning, kept_out
from coordinator.pipeline.tuning import memory
from coordinator.pipeline.tuning.calibration import learn
from coordinator.pipeline.tuning.link_adaptation import Adapting, capped
from coordinator.pipeline.tuning.pair_tables import PairTables
from coordinator.pipeline.tuning.profiling import Hold, Profiling
from coordinator.pipeline.tuning.round_codecs import RoundCodecs
from protos.telemetry import Event as Name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from atoll.job import JobSpec
    from coordinator.config import CoordinatorConfig
    from coordinator.membership.effects import Effects
    from coordinator.membership.measuring import Measuring

RESTART_GRACE_S = 15.0  # for the workers of a running job to come back after our restart, ...
REPLACED_AFTER_S = 4.0  # ... unless others can take over: who holds a stage tries every second


@dataclass(slots=True)
class PipelineDriver:
    """All jobs of this kind."""

    config: CoordinatorConfig
    effects: Effects
    measuring: Measuring
    jobs: dict[str, JobState] = field(default_factory=dict)
    returning: dict[str, Returning] = field(default_factory=dict)  # by job, after our restart
    profiling: Profiling = field(init=False)
    adapting: Adapting = field(init=False)
    stuck: Stuck = field(init=False)
    suspicion: Suspicion = field(init=False)
    losses: Losses = field(init=False)
    seating: Seats = field(init=False)
    pair_tables: PairTables = field(init=False)
    round_codecs: RoundCodecs = field(init=False)
    beside: Beside = field(init=False)
    _committed: JobState | None = None  # after its newest step, not learned from yet

    def __post_init__(self) -> None:
        self.profiling = Profiling(self.effects, self.measuring)
        self.adapting = Adapting(self.effects, self.config.adaptation)
        self.stuck = Stuck(self.effects.roster, self.effects.label)
        self.suspicion = Suspicion(self.effects, self.stuck)
        self.beside = Beside(
            self.effects,
            self.jobs,
            self.config.concurrent_jobs,
            self._put,
            self._step,
            self.suspicion,
            self.profiling.newcomers_timed,
        )
        dead_after_s, make_way = self.config.liveness.dead_after_s, self.beside.checks.make_way
        self.losses = Losses(self.effects, self.profiling, dead_after_s, self._step, make_way)
        self.seating = Seats(self.effects, self._step, self.beside.replanning, make_way)
        self.pair_tables = PairTables(self.effects, self._step)
        self.round_codecs = RoundCodecs(self._step)

    # ------------------------------------------------------------ jobs

    def takes(self, spec: JobSpec) -> bool:
        """Whether the job is of this kind."""
        return spec.federated is None

    def not_resumable(self, before: JobSpec, spec: JobSpec) -> str | None:
        """Why ``spec`` cannot go on with what ``before`` left; both are of this kind."""
        held, wanted = before.training.optimizer.name, spec.training.optimizer.name
        if held == wanted:
            return None
        return f"{spec.resume_of} holds the state of {held}, this one {wanted}; take the same optimizer"

    def restore(self, record: JobRecord) -> None:
        """Make a job's machine from what the ledger knows."""
        job, checkpoint = record.submitted.job, record.last_checkpoint
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
            eval_metrics=record.eval_metrics,
        )
        if record.outcome:
            state = replace(state, phase=Phase(record.outcome), reason=record.reason, step=record.steps)
        elif record.version:
            state = self._awaited(state, record)
        self._put(state)

    def _awaited(self, state: JobState, record: JobRecord) -> JobState:
        """Go on with the plan that ran when we stopped once its workers are back; plan anew where the journal
        does not say enough."""
        until_s = self.effects.now_s + RESTART_GRACE_S
        plan = record.plan
        workers = frozenset(plan.places[rank].worker for rank in plan.present) if plan else frozenset()
        running = restart.running(state, record, self.effects.now_s)
        if running is not None:
            since = {plan.places[rank].worker: record.given(rank) for rank in plan.present} if plan else {}
            self.returning[state.job] = Returning(record.assigned, workers, set(workers), until_s, since)
            return running
        self.profiling.holds[state.job] = Hold(until_s, workers)
        reason = f"the coordinator was restarted; goes on from step {state.checkpoint.step}"
        return replace(state, phase=Phase.PAUSED, reason=reason)

    def _put(self, state: JobState) -> None:
        self.jobs[state.job] = self.effects.jobs[state.job] = state

    def submitted(self, job: str, ops: Mapping[str, int]) -> None:
        """Take in the ops of a new job."""
        self.profiling.know(job, ops)

    def forget(self, job: str) -> None:
        """Let go of a job that has ended."""
        del self.jobs[job]
        self.profiling.forget(job)

    def on(self, event: ev.JobEvent) -> None:
        """Handle an event about one of these jobs."""
        match event:
            case ev.JobRead(job, ops):
                self.profiling.know(job, ops)
            case ev.TornFound():
                self._torn(event)
            case ev.JobUnreadable(job, reason) if self.jobs[job].phase not in WAITING | PREPARING:
                self.profiling.unreadable(job, reason)
            case ev.JobUnreadable(job, reason, hopeless):
                self.profiling.read_later(job)
                self._step(job, Broken(reason) if hopeless else Waits(reason))
            case ev.CancelAsked(job, reason):
                self._step(job, Cancelled(reason))
            case ev.PlanMade():
                self._plan_made(event)
            case ev.PlanFailed():
                self._plan_failed(event)
            case ev.LinksChosen():
                self._links_chosen(event)
            case ev.LinksFailed():
                self.adapting.failed(event)
            case ev.SwapsJudged() | ev.SwapsFailed() | ev.FleetJudged() | ev.FleetFailed():
                self.beside.judged(event)
            case _:
                self.effects.drop(type(event).__name__, f"{event.job} is cut into stages", event.job)

    def inquired(self, event: ev.PlanAsked) -> None:
        """Plan a job of this kind for somebody who does not want it run."""
        self.profiling.inquire(event.inquiry, event.spec, event.ops)

    def _torn(self, event: ev.TornFound) -> None:
        """Take the checkpoint before: the newest cannot be loaded."""
        state = self.jobs[event.job]
        if state.phase not in WAITING | PREPARING or state.checkpoint.step != event.step:
            self.effects.drop("TornFound", f"{event.job} is {state.phase.value}", event.job)
            return
        self.effects.record(CheckpointTorn(event.job, event.step, event.reason))
        self._step(event.job, Torn(self.effects.ledger.jobs[event.job].last_checkpoint, event.reason))

    def _plan_made(self, event: ev.PlanMade) -> None:
        if not self.profiling.awaited(event.job, event.attempt):
            return
        plan, roster = event.plan, self.effects.roster
        missing = [place.worker for place in plan.places if not roster.is_idle(place.worker)]
        if missing or self.effects.storage:
            why = self.effects.storage or f"{missing[0]} went away while the plan was made"
            self._step(event.job, Waits(why))
            return
        if not self._training and self.profiling.refine(event.job, plan):
            return
        self.effects.log(
            Name.PLAN_MADE,
            job=event.job,
            version=plan.version,
            stages=len(plan.places),
            predicted_s=plan.prediction.step_s if plan.prediction else None,
        )
        self._step(event.job, Planned(plan))

    def _plan_failed(self, event: ev.PlanFailed) -> None:
        if not self.profiling.awaited(event.job, event.attempt):
            return
        self.effects.log(Name.PLAN_FAILED, "warning", job=event.job, reason=event.reason)
        if event.hopeless:
            self._step(event.job, Broken(event.reason))
            return
        rest = self.profiling.rest(event.job)
        if rest:  # the fleet cannot spare those that it should do without
            self._plan(self.jobs[event.job], rest)
            return
        self.profiling.wait_for_change(event.job)
        self._step(event.job, Waits(f"{UNFIT}: {event.reason}"))

    def _links_chosen(self, event: ev.LinksChosen) -> None:
        state = self.jobs[event.job]
        if state.phase not in STEPPING:
            return
        wish = self.adapting.chosen(state, event)
        if wish is not None:
            self._step(event.job, wish)

    # ------------------------------------------------------------ workers

    def uses(self, job: str, worker: str) -> bool:
        """Whether the worker holds a stage of the job, or repeats its steps."""
        state = self.jobs[job]
        beside = self.beside.standbys.uses(state, worker) or self.beside.checks.repeats(job, worker)
        return state.rank_of(worker) is not None or beside

    def current(self, job: str, version: int) -> bool:
        """Whether ``version`` is one that the plan has had since it was adopted or reconfigured, or that of
        who repeats its steps now."""
        state = self.jobs[job]
        if version >= BESIDE:
            return self.beside.checks.current(job, version)
        return version >= state.assigned and current(state, version)

    def keeps(self, job: str) -> bool:
        """Whether a worker that is not this job's may go on holding it: never."""
        return False

    def admitted(self, worker: str) -> None:
        """Give a worker its rank again after our restart. Else release the stage that one which was away may
        still hold: it would refuse to be measured."""
        held = self.effects.roster.workers[worker].introduction.held
        for state in list(self.jobs.values()):
            if state.phase in ENDED:
                continue
            if state.rank_of(worker) is None:
                if held is not None and held.job == state.job:  # it stood by
                    self._take_back(state, worker)
                continue
            back = self.returning.get(state.job)
            if back is None or worker not in back.missing:
                self._take_back(state, worker)
                continue
            wrong = kept_out(self.effects.roster.workers[worker]) or back.unfit(state, worker, held)
            if not wrong:
                self._returned(state, back, worker)
                continue
            self._take_back(state, worker)
            self._missed(state, back, worker, f"came back {wrong}")

    def _take_back(self, state: JobState, worker: str) -> None:
        reason = "the stage was taken back while you were away"
        self.effects.send(worker, do.Release(state.job, state.version, reason))

    def _missed(self, state: JobState, back: Returning, worker: str, why: str) -> None:
        """Who is awaited after our restart is lost: it is replaced when the others are back."""
        if not history.begun(state):
            self._step(state.job, anew(state, f"{self.effects.label(worker)} {why}"))
            return
        back.missing.discard(worker)
        back.lost[worker] = why
        self._all_back(state.job)

    def _returned(self, state: JobState, back: Returning, worker: str) -> None:
        rank, job = state.rank_of(worker), state.job
        assert rank is not None  # noqa: S101 - the caller has looked
        back.missing.discard(worker)
        self.effects.move(worker, members.AssignedTo(job, rank))
        held = self.effects.roster.workers[worker].introduction.held
        if state.phase is not Phase.LOADING:
            self.reconnected(job, worker)
        elif back.has_loaded(held):
            self._step(job, FromRank(rank, ev.Loaded(job, back.assigned)))
        self._all_back(job)

    def _all_back(self, job: str) -> None:
        """Go on once every worker of the plan is back, or known to be lost; those may be replaced by workers
        that come back later."""
        back, state = self.returning.get(job), self.jobs[job]
        early_s = RESTART_GRACE_S - REPLACED_AFTER_S
        if back is None or (back.missing and self.effects.now_s < back.until_s - early_s):
            return
        lost = back.gone() | dict.fromkeys(back.missing, "did not come back after our restart")
        if not lost:
            self._resume(job)
            return
        ranks = {rank for worker in lost if (rank := state.rank_of(worker)) is not None}
        words = "; ".join(f"{self.effects.label(worker)} {why}" for worker, why in sorted(lost.items()))
        roster = self.effects.roster
        here = tuple(w for w in lost if roster.is_idle(w) or reconfigure.at_hand(roster, w, job))
        chosen = self.losses.choose(state, ranks, here)
        if isinstance(chosen, PlanChange):
            del self.returning[job]
            self.losses.act(state, chosen, words)
        elif self.effects.now_s >= back.until_s or not (back.missing or chosen.for_now):
            self._step(job, anew(state, f"{words}; {chosen.reason}"))

    def _resume(self, job: str) -> None:
        """Every worker of the plan is back: who has not loaded its stage is given it again."""
        del self.returning[job]
        state = self.jobs[job]
        self.adapting.adopted(state, self.effects.ledger.jobs[job].cap)
        for rank, worker in _present(state):
            if state.phase is Phase.LOADING and rank not in state.loaded:
                self.reconnected(job, worker)
        self._step(job, Resumed())

    def reconnected(self, job: str, worker: str) -> None:
        """Repeat what was under way to a worker; its own last words it repeats itself."""
        state = self.jobs[job]
        rank = state.rank_of(worker)
        if state.phase in RUNNING and job not in self.returning:
            self.beside.standbys.reconnected(state, worker)
            state = self.jobs[job]
        if rank is None:
            return
        if state.phase is Phase.LOADING and job in self.returning:
            return  # the addresses of its neighbours come with them
        if state.phase is Phase.LOADING and rank not in state.loaded:
            self._give(state, rank)
        elif state.phase in STEPPING and state.step == state.first_step:
            self.effects.send(worker, do.StepStart(state.job, state.version, state.due))
        elif state.last_commit is not None:
            self.effects.send(worker, said_to(state, rank, state.last_commit))

    def _give(self, state: JobState, rank: int) -> None:
        """Send a rank its stage, or what changes for the one that it keeps."""
        assert state.plan is not None  # noqa: S101 - it has ranks
        record, roster = self.effects.ledger.jobs[state.job], self.effects.roster
        worker, since = state.plan.places[rank].worker, record.given(rank)
        if since == state.assigned:
            source = state.source or state.checkpoint
            replay = history.replay(state, record, rank, source) if state.moving else None
            holders = self.beside.copies.holders(state, rank, worker)
            self.effects.send(worker, assignment(state, rank, roster, source, replay, holders))
            return
        if state.last_commit is not None:
            self.effects.send(worker, said_to(state, rank, state.last_commit))
        store = history.stores_anew(state, record, rank)
        self.effects.send(worker, reconfiguration(state, rank, roster, since, store=store))

    # ------------------------------------------------------------ losses

    def lost(self, job: str, worker: str, reason: str) -> None:
        """Go on without a worker that is gone, or must not be used any more."""
        state, back = self.jobs[job], self.returning.get(job)
        rank = state.rank_of(worker)
        self.beside.checks.lost(job, worker)
        if self.beside.standbys.lost(state, worker, reason) or state.phase not in RUNNING or rank is None:
            return
        if back is not None:
            self._missed(state, back, worker, f"is lost: {reason}")
        else:
            self.losses.replace(state, rank, reason)

    def _place(self, state: JobState, todo: Placed) -> None:
        """Have every worker hold the part of the plan that it has now."""
        roster, goes_on = self.effects.roster, state.phase in RUNNING
        (self.losses.forget if goes_on else self.losses.over)(state.job)
        replaced = set[int]()
        if goes_on:
            self.adapting.adopted(state, self.effects.ledger.jobs[state.job].cap)
            now = {rank: roster.workers[worker].member for rank, worker in _present(state)}
            replaced = {rank for rank, m in now.items() if (m.job, m.rank) != (state.job, rank)}
            if state.standbys and state.plan is not None and len(state.plan.replicas) > 1:
                self.beside.standbys.give_up(state, "the plan has a replica more")
                state = self.jobs[state.job]
            state = self.beside.standbys.reassigned(state, replaced)
        for worker in todo.left:
            self._let_go(state, worker, todo.reason)
        if not goes_on:
            return
        for rank, worker in _present(state):
            if rank in replaced:
                self.effects.move(worker, members.AssignedTo(state.job, rank))
            self._give(state, rank)
        self.beside.standbys.follow(state)

    def _failed(self, state: JobState, failed: FromRank[ev.StageFailed]) -> None:
        """A stage broke: whoever comes back with it after our restart is as good as lost."""
        back, message = self.returning.get(state.job), failed.message
        if back is not None and not message.lost_peer and history.begun(state) and state.plan is not None:
            self._missed(state, back, state.plan.places[failed.rank].worker, f"failed: {message.reason}")
        else:
            self.losses.failed(state, failed, back.until_s if back is not None else 0.0)

    def _unstored(self, state: JobState, stored: FromRank[ev.StateStored]) -> bool:
        """Have another take over from a worker that could not store its part; whether that was so."""
        back, why = self.returning.get(state.job), self.losses.unstored(state, stored)
        if why and back is not None and state.plan is not None:
            self._missed(state, back, state.plan.places[stored.rank].worker, why)
            return True
        return bool(why) and self.losses.moved(state, stored.rank, why)

    def slowed(self, worker: str, factor: float) -> None:
        """Deadlines and plans look at the limits themselves."""

    def heard(self, worker: str, message: ev.JobMessage) -> None:
        """Handle a message of a worker about one of these jobs."""
        state = self.jobs[message.job]
        if isinstance(message, ev.CopyHeld | ev.CopyStored):
            self.beside.heard(worker, message)
            return
        if not isinstance(message, ev.StageMessage):
            self.effects.drop(type(message).__name__, f"of {worker}: {message.job} has stages", message.job)
            return
        if self.beside.checks.repeats(state.job, worker):
            self.beside.checks.heard(state, message)
            return
        rank, standby = state.rank_of(worker), state.standby_of(worker)
        if rank is None and standby is not None:
            self.beside.standbys.heard(state, standby, message)
            return
        if rank is None:
            why = f"of {worker}, which has no rank in {message.job}"
            self.effects.drop(type(message).__name__, why)
            return
        wrong = self.suspicion.untrue(state, rank, worker, message)
        if wrong is not None:
            self.effects.quarantine(worker, wrong)
            return
        if isinstance(message, ev.StepReady) and state.plan is not None:
            message = as_failure(state, of_neighbours(state.plan, rank, message))
            if isinstance(message, ev.StageFailed) and self.losses.diverged(state, FromRank(rank, message)):
                return
        if isinstance(message, ev.StateStored) and rank not in state.store_ranks:
            self.effects.drop("StateStored", f"of rank {rank}, which stores nothing", message.job)
            return
        if isinstance(message, ev.Loaded) and self._has_repeated(state, rank, message):
            self.beside.checks.replayed(state, rank, worker, message.digests)
        if isinstance(message, ev.StageFailed):
            self._failed(state, FromRank(rank, message))
            return
        if isinstance(message, ev.StateStored) and self._unstored(state, FromRank(rank, message)):
            return
        if isinstance(message, ev.EvalReady) and message.step + 1 == state.awaiting_eval:
            self.stuck.evaluated(state, rank)
        self._step(message.job, FromRank(rank, message))
        if self.jobs[message.job].step > state.step:
            self._committed = self.jobs[message.job]
            self.beside.standbys.swap(self.jobs[message.job])

    def _has_repeated(self, state: JobState, rank: int, message: ev.Loaded) -> bool:
        """Whether a rank is loaded now that has taken over a lost one's steps."""
        fresh = message.version == state.assigned and rank not in state.loaded
        return state.moving and fresh and self.effects.ledger.jobs[state.job].given(rank) == state.assigned

    # ------------------------------------------------------------ time and storage

    def before_event(self) -> None:
        """Learn from the last committed step: at the next event, as workers wait for the commit."""
        state, self._committed = self._committed, None
        if state is not None:
            self.adapting.committed(state)
            self.suspicion.committed(state)
            self.beside.checks.committed(state)
            learn(self.effects.roster, state, follows=state.job in self.adapting.of)

    def tick(self) -> None:
        """Let time pass; jobs that stand still lose who is to blame."""
        self.profiling.end_holds()
        self.losses.judge(self.jobs, self.returning)
        for job in list(self.returning):
            self._all_back(job)
        for state in list(self.jobs.values()):
            if history.logs_short(state, self.effects.roster):
                self._step(state.job, LogsShort())
        # Who has not come back after our restart has a deadline of its own.
        here = {job: state for job, state in self.jobs.items() if job not in self.returning}
        for blamed, seconds in self.stuck.tick(here, self.effects.now_s):
            self.effects.quarantine(blamed.worker, f"{blamed.reason}; for {seconds:.0f} s", seconds)
        self.suspicion.tick(self.jobs)
        for state in list(self.jobs.values()):
            self.seating.look(state)
            self.pair_tables.look(self.jobs[state.job])
            self.round_codecs.look(self.jobs[state.job])
        self.beside.tick(self.returning)

    def storage_failed(self, reason: str) -> None:
        """Stop every job where it is: nothing can be made durable."""
        for state in list(self.jobs.values()):
            if state.phase in RUNNING:
                self._step(state.job, anew(state, reason))
            elif state.phase not in ENDED:
                self._step(state.job, Waits(reason))

    def storage_recovered(self) -> None:
        """Plan those anew that had to stop."""
        self.profiling.anything_changed()

    def blobs_in_flight(self) -> set[str]:
        """Return the blobs that checkpoints under way rest on, and those that are being loaded though newer
        ones are stored; those of stored ones the ledger knows."""
        running = [state for state in self.jobs.values() if state.phase in RUNNING]
        stored = [tensors for s in running for parts in s.stores.values() for tensors in parts.values()]
        loaded = [source for s in running for source in history.sources(s)] + self.beside.sources()
        return {blob for tensors in (*stored, *(c.tensors for c in loaded)) for blob in tensors.values()}

    # ------------------------------------------------------------ what runs next

    def advance(self) -> None:
        """Pick jobs while there is room, measure what they need, plan them."""
        self.beside.make_way()
        busy = [s for s in self.jobs.values() if s.phase in RUNNING | PREPARING]
        waiting = [s for s in self.jobs.values() if s.phase in WAITING]
        for state in sorted(waiting, key=lambda s: s.created_s):
            if len(busy) < self.config.concurrent_jobs and self._may_start(state):
                self._step(state.job, Picked("measuring devices and links"))
                busy.append(self.jobs[state.job])
            elif len(busy) >= self.config.concurrent_jobs and state.phase is Phase.QUEUED:
                first = busy[0]
                reason = f"waits for {first.job} ({first.phase.value}, step {first.step} of {first.steps})"
                if not state.reason.startswith(f"waits for {first.job} "):
                    self._step(state.job, Waits(reason))
        self._prepare()

    def _may_start(self, state: JobState) -> bool:
        if not self.effects.roster.idle_count:
            reason = "no worker is in the pool; start some with `atoll-worker join`"
            if reason not in state.reason:
                prefix = f"{state.reason}; " if state.phase is Phase.PAUSED else ""
                self._step(state.job, Waits(prefix + reason))
            return False
        return self.profiling.may_plan(state.job) and not self.beside.rings.gathers(state.job)

    @property
    def _training(self) -> bool:
        """Whether a job runs whose links must not be disturbed."""
        return any(s.phase in (RUNNING | FEDERATING) - {Phase.CONSENTING} for s in self.effects.jobs.values())

    def _prepare(self) -> None:
        training = self._training
        for state in list(self.jobs.values()):
            if state.phase is Phase.PROFILING and self.profiling.profiled(state.job, state.spec, training):
                self._step(state.job, Profiled())
                self._plan(state)
            elif state.phase is Phase.PLANNING and self.profiling.refined(state.job, training):
                self._plan(state)
        self.profiling.answer_inquiries(training)
        if not training:
            self.measuring.measure_links(fresh=False)

    def _plan(self, state: JobState, rest: Iterable[Iterable[str]] = ()) -> None:
        spec = capped(state.spec, self.effects.ledger.jobs[state.job].cap)
        memory.recall(self.effects.roster, state)
        self.profiling.plan(state.job, state.version + 1, spec, rest or left_out(state))

    # ------------------------------------------------------------ a job's machine

    def _step(self, job: str, event: Event) -> None:
        """Step a job's machine and carry out what it wants."""
        before = self.jobs[job]
        state, todo = machine.step(before, event, self.effects.now_s)
        self._put(state)
        for item in todo:
            self._obey(before if state.plan is None else state, item)
        both_step = before.phase in STEPPING and state.phase in STEPPING
        changed = (before.phase, before.reason) != (state.phase, state.reason)
        if changed:
            level = "warning" if state.phase in (Phase.PAUSED, Phase.FAILED) else "info"
            level = "debug" if both_step else level
            self.effects.log(Name.JOB_STATE, level, job=job, state=state.phase, reason=state.reason)
        if before.phase is not state.phase and not both_step:
            self.effects.advance = True
        if changed or before.step != state.step or before.eval_loss != state.eval_loss:
            self.effects.emit(do.Notify(job))
        if before.moving and not state.moving:  # newcomers have what they began with
            self.effects.emit(do.SweepBlobs())
        if before.awaiting_eval is not None and state.awaiting_eval is None and not state.moving:
            self._evaluated(state)
        if before.phase in PREPARING and state.phase not in PREPARING:
            self.profiling.stop(job)
        back = self.returning.pop(job, None) if state.phase not in RUNNING else None
        if back is not None and state.phase is Phase.PAUSED:
            self.profiling.holds.setdefault(job, Hold(back.until_s, back.workers))
        if state.phase in ENDED:
            self.adapting.over(job)
            self.round_codecs.over(job)
        self.suspicion.stepped(before, state)
        evaluated = before.awaiting_eval is not None and state.awaiting_eval is None
        if before.checkpoint.step != state.checkpoint.step or evaluated:
            self.seating.look(state)
        if before.phase in RUNNING and self.jobs[job].phase not in RUNNING:
            self.beside.over(self.jobs[job])
        self.beside.checks.stepped(before, state)

    def _evaluated(self, state: JobState) -> None:
        at_end = state.phase is Phase.STORING
        if at_end or state.phase in STEPPING:
            cap = self.adapting.evaluated(state, at_end)
            if cap is not None:
                self.effects.record(RatioCapped(state.job, state.step, cap))

    def _obey(self, state: JobState, todo: Todo) -> None:
        match todo:
            case Record(fact):
                self.effects.record(fact)
                if isinstance(fact, RoundMet):
                    level = "warning" if fact.missing else "info"
                    fields = periods.met_fields(fact, self.effects.label)
                    self.effects.log(Name.ROUND_MET, level, job=state.job, **fields)
                # Who has stood by may take its rank while it loads an older one.
                if isinstance(fact, CheckpointStored) and not state.moving:
                    self.effects.emit(do.SweepBlobs())
            case ToRanks(message, rank):
                for at, worker in _present(state):
                    if rank is None or rank == at:
                        self.effects.send(worker, said_to(state, at, message))
                if rank is None and isinstance(message, do.StepCommit):
                    self.beside.standbys.committed(state, message)
            case LinksDue():
                self.adapting.due(state, todo)
            case Redo(reason):
                self.losses.doubted(self.jobs[state.job], reason)
            case Exclude(ranks, reason):
                self.losses.exclude(self.jobs[state.job], ranks, reason)
            case Placed():
                self._place(state, todo)
            case Point(step, name, value):
                self.effects.emit(do.Measured(state.job, step, name, value))
            case OddLoss():
                self.effects.log(Name.LOSS_ODD, "warning", job=state.job, **todo.fields)
            case Dropped(why):
                self.effects.drop("stage message", why, state.job)

    def _let_go(self, state: JobState, worker: str, reason: str) -> None:
        known = self.effects.roster.workers.get(worker)
        if known is not None and known.member.job == state.job:
            self.effects.send(worker, do.Release(state.job, state.version, reason))
            self.effects.move(worker, members.Released(f"released by {state.job}"))


def _present(state: JobState) -> list[tuple[int, str]]:
    """Return the ranks of a job's plan that have a worker, with it."""
    return [(rank, state.plan.places[rank].worker) for rank in state.present] if state.plan else []
