"""The driver of jobs that are cut into stages: from events to their machines, and what those want.

A job waits for its turn, is profiled and planned on the idle fleet, and holds the plan's workers until
it ends or loses one. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from coordinator.membership import member as members
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import CheckpointStored, JobRecord, RatioCapped, RoundMet
from coordinator.messages.jobs import (
    BESIDE,
    ENDED,
    PREPARING,
    RUNNING,
    STEPPING,
    WAITING,
    Broken,
    Cancelled,
    Cause,
    Dropped,
    Event,
    Exclude,
    FromRank,
    JobState,
    LinksDue,
    LogsShort,
    OddLoss,
    Phase,
    Placed,
    Point,
    Record,
    Redo,
    Todo,
    ToRanks,
    Waits,
    anew,
)
from coordinator.pipeline import commits, history, machine, periods
from coordinator.pipeline.assigning import assignment, of_neighbours, reconfiguration, said_to
from coordinator.pipeline.beside import Beside
from coordinator.pipeline.changes.choice import Changes
from coordinator.pipeline.changes.losses import Losses
from coordinator.pipeline.changes.seats import places
from coordinator.pipeline.changes.shares import Shares
from coordinator.pipeline.health.doubt import as_failure
from coordinator.pipeline.health.evidence import Guilt
from coordinator.pipeline.health.stuck import Stuck
from coordinator.pipeline.health.suspicion import Suspicion
from coordinator.pipeline.history import current
from coordinator.pipeline.restart import Returns
from coordinator.pipeline.tuning.calibration import learn
from coordinator.pipeline.tuning.link_adaptation import Adapting
from coordinator.pipeline.tuning.profiling import Hold, Profiling
from coordinator.pipeline.tuning.rounds import Rounds
from coordinator.pipeline.turns import Turns
from coordinator.sharing.policies import policy_of
from protos.telemetry import Event as Name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.job import JobSpec
    from coordinator.config import CoordinatorConfig
    from coordinator.membership.effects import Effects
    from coordinator.membership.measuring import Measuring


@dataclass(slots=True)
class PipelineDriver:
    """All jobs of this kind."""

    config: CoordinatorConfig
    effects: Effects
    measuring: Measuring
    jobs: dict[str, JobState] = field(default_factory=dict)
    profiling: Profiling = field(init=False)
    adapting: Adapting = field(init=False)
    stuck: Stuck = field(init=False)
    suspicion: Suspicion = field(init=False)
    losses: Losses = field(init=False)
    changes: Changes = field(init=False)
    rounds: Rounds = field(init=False)
    beside: Beside = field(init=False)
    shares: Shares = field(init=False)
    returns: Returns = field(init=False)
    turns: Turns = field(init=False)
    _committed: JobState | None = None  # after its newest step, not learned from yet

    def __post_init__(self) -> None:
        self.profiling = Profiling(self.effects, self.measuring)
        self.adapting = Adapting(self.effects, self.config.adaptation)
        guilt = Guilt(self.effects)
        self.stuck, self.suspicion = Stuck(self.effects, guilt), Suspicion(self.effects, guilt)
        gathers = lambda job: self.beside.rings.gathers(job)  # noqa: E731 - made below
        self.shares = Shares(self.effects, self.jobs, self.profiling, policy_of(self.config.policy), gathers)
        most, step, timed = self.config.concurrent_jobs, self._step, self.profiling.newcomers_timed
        self.beside = Beside(
            self.effects, self.jobs, most, self._put, step, self.suspicion, timed, self.shares.wants
        )
        dead_after_s, make_way = self.config.liveness.dead_after_s, self.beside.checks.make_way
        self.losses = Losses(self.effects, self.profiling, dead_after_s, self._step, make_way)
        self.rounds = Rounds(self.effects)
        at_places = partial(places, roster=self.effects.roster)
        others = (self.shares.candidates, self.beside.newcomers.candidates, self.rounds.candidates)
        self.changes = Changes(self.effects, self._step, make_way, at_places, others)
        self.returns = Returns(
            self.effects, self.jobs, self.profiling, self.adapting, self.losses, self._step, self.reconnected
        )
        self.turns = Turns(
            self.effects, self.jobs, self.measuring, self.profiling, self.beside, self.shares, most, step
        )

    # ------------------------------------------------------------ jobs

    def takes(self, spec: JobSpec) -> bool:
        """Whether the job is of this kind."""
        return spec.federated is None

    def not_resumable(self, before: JobSpec, spec: JobSpec) -> str | None:
        """Why ``spec`` cannot go on with what ``before`` left; both are of this kind."""
        held, wanted = (each.training.optimizer for each in (before, spec))
        if held.names == wanted.names:
            return None
        return f"{spec.resume_of} holds the state of {held}, this one {wanted}; take the same optimizer"

    def restore(self, record: JobRecord) -> None:
        """Make a job's machine from what the ledger knows."""
        self._put(self.returns.restored(record))

    def _put(self, state: JobState) -> None:
        self.jobs[state.job] = self.effects.jobs[state.job] = state

    def submitted(self, job: str, ops: Mapping[str, int], needs: ev.Needs) -> None:
        """Take in the ops of a new job, and what it asks of a fleet."""
        self.shares.needs[job] = needs
        self.profiling.know(job, ops)

    def forget(self, job: str) -> None:
        """Let go of a job that has ended."""
        del self.jobs[job]
        self.shares.forget(job)
        self.profiling.forget(job)

    def on(self, event: ev.JobEvent) -> None:
        """Handle an event about one of these jobs."""
        match event:
            case ev.JobRead(job, ops, needs):
                self.shares.needs[job] = needs
                self.profiling.know(job, ops)
            case ev.TornFound():
                self.turns.torn(event)
            case ev.JobUnreadable(job, reason) if self.jobs[job].phase not in WAITING | PREPARING:
                self.profiling.unreadable(job, reason)
            case ev.JobUnreadable(job, reason, hopeless):
                self.profiling.read_later(job)
                self._step(job, Broken(reason) if hopeless else Waits(reason))
            case ev.CancelAsked(job, reason):
                self._step(job, Cancelled(reason))
            case ev.PlanMade():
                self.turns.made(event)
            case ev.PlanFailed():
                self.turns.failed(event)
            case ev.LinksChosen():
                self._links_chosen(event)
            case ev.LinksFailed():
                self.adapting.failed(event)
            case ev.FleetJudged(job):
                self.beside.newcomers.judged(self.jobs[job], event)
            case ev.FleetFailed():
                self.beside.newcomers.failed(event)
            case _:
                self.effects.drop(type(event).__name__, f"{event.job} is cut into stages", event.job)

    def inquired(self, event: ev.PlanAsked) -> None:
        """Plan a job of this kind for somebody who does not want it run."""
        self.profiling.inquire(event.inquiry, event.spec, event.ops)

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
        return version >= state.run.assigned and current(state, version)

    def keeps(self, job: str) -> bool:
        """Whether a worker that is not this job's may go on holding it: never."""
        return False

    def reconnected(self, job: str, worker: str) -> None:
        """Repeat what was under way to a worker; its own last words it repeats itself."""
        state = self.jobs[job]
        rank = state.rank_of(worker)
        if state.phase in RUNNING and job not in self.returns.of:
            self.beside.standbys.reconnected(state, worker)
            state = self.jobs[job]
        if rank is None:
            return
        if state.phase is Phase.LOADING and job in self.returns.of:
            return  # the addresses of its neighbours come with them
        if state.phase is Phase.LOADING and rank not in state.run.loaded:
            self._give(state, rank)
        elif state.phase is Phase.LOADING:
            for item in commits.peer_begins(state, rank):
                self._obey(state, item)
        elif state.phase in STEPPING and state.step == state.run.first_step:
            self.effects.send(worker, said_to(state, rank, do.StepStart(state.job, state.version, state.due)))
        elif state.run.last_commit is not None:
            self.effects.send(worker, said_to(state, rank, state.run.last_commit))

    def _give(self, state: JobState, rank: int) -> None:
        """Send a rank its stage, or what changes for the one that it keeps."""
        record, roster = self.effects.ledger.jobs[state.job], self.effects.roster
        worker, since = state.adopted.places[rank].worker, record.given(rank)
        if since == state.run.assigned:
            source = state.run.source or state.checkpoint
            replay = history.replay(state, record, rank, source) if state.run.moving else None
            holders = self.beside.copies.holders(state, rank, worker)
            self.effects.send(worker, assignment(state, rank, roster, source, replay, holders))
            return
        if state.run.last_commit is not None:
            self.effects.send(worker, said_to(state, rank, state.run.last_commit))
        store = history.stores_anew(state, record, rank)
        self.effects.send(worker, reconfiguration(state, rank, roster, since, store=store))

    # ------------------------------------------------------------ losses

    def lost(self, job: str, worker: str, reason: str) -> None:
        """Go on without a worker that is gone, or must not be used any more."""
        state, back = self.jobs[job], self.returns.of.get(job)
        rank = state.rank_of(worker)
        self.beside.checks.lost(job, worker)
        if self.beside.standbys.lost(state, worker, reason) or state.phase not in RUNNING or rank is None:
            return
        if back is not None:
            self.returns.missed(state, back, worker, f"is lost: {reason}")
        else:
            self.losses.go_on(state, {rank}, reason)

    def _place(self, state: JobState, todo: Placed) -> None:
        """Have every worker hold the part of the plan that it has now."""
        roster, goes_on = self.effects.roster, state.phase in RUNNING
        (self.losses.forget if goes_on else self.losses.over)(state.job)
        replaced = set[int]()
        if goes_on:
            self.adapting.adopted(state, self.effects.ledger.jobs[state.job].cap)
            now = {rank: roster.workers[worker].member for rank, worker in _present(state)}
            replaced = {rank for rank, m in now.items() if (m.job, m.rank) != (state.job, rank)}
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

    def slowed(self, worker: str, factor: float) -> None:
        """Deadlines and plans look at the limits themselves."""

    def heard(self, worker: str, message: ev.JobMessage) -> None:
        """Handle a message of a worker about one of these jobs."""
        state = self.jobs[message.job]
        if isinstance(message, ev.CopyHeld | ev.CopyStored):
            self.beside.heard(worker, message)
            return
        if not isinstance(message, ev.StageMessage):
            self.turns.heard(state, worker, message)
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
        if self.suspicion.untrue(state, rank, worker, message):
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
            self.returns.failed(state, FromRank(rank, message))
            return
        if isinstance(message, ev.StateStored) and self.returns.unstored(state, FromRank(rank, message)):
            return
        if isinstance(message, ev.EvalReady) and message.step + 1 == state.run.awaiting_eval:
            self.stuck.evaluated(state, rank)
        self._step(message.job, FromRank(rank, message))
        if self.jobs[message.job].step > state.step:
            self._committed = self.jobs[message.job]
            if any(standby.swap for standby in state.standbys.values()):
                self.changes.look(self.jobs[message.job], self.beside.standbys.candidates)

    def _has_repeated(self, state: JobState, rank: int, message: ev.Loaded) -> bool:
        """Whether a rank is loaded now that has taken over a lost one's steps."""
        fresh = message.version == state.run.assigned and rank not in state.run.loaded
        return (
            state.run.moving
            and fresh
            and self.effects.ledger.jobs[state.job].given(rank) == state.run.assigned
        )

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
        self.losses.judge(self.jobs, self.returns.of)
        self.returns.tick()
        for state in list(self.jobs.values()):
            if history.logs_short(state, self.effects.roster):
                self._step(state.job, LogsShort())
        # Who has not come back after our restart has a deadline of its own.
        here = {job: state for job, state in self.jobs.items() if job not in self.returns.of}
        self.stuck.tick(here)
        self.suspicion.tick(self.jobs)
        for state in list(self.jobs.values()):
            self.changes.look(state)
        self.beside.tick(self.returns.of)
        self.shares.tick()

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
        stored = [
            tensors for s in running for parts in s.storing.parts.values() for tensors in parts.values()
        ]
        loaded = [source for s in running for source in history.sources(s)] + self.beside.sources()
        return {blob for tensors in (*stored, *(c.tensors for c in loaded)) for blob in tensors.values()}

    def admitted(self, worker: str) -> None:
        """Give a worker its rank again after our restart, or release the stage that it may still hold."""
        self.returns.admitted(worker)

    def advance(self) -> None:
        """Pick jobs while there is room, measure what they need, plan them."""
        self.turns.advance()

    # ------------------------------------------------------------ a job's machine

    def _step(self, job: str, event: Event) -> None:
        """Step a job's machine and carry out what it wants."""
        before = self.jobs[job]
        state, todo = machine.step(before, event, self.effects.now_s)
        self._put(state)
        for item in todo:
            self._obey(before if state.plan is None else state, item)
        for _, when, then in CONSEQUENCES:
            if when(before, state):
                then(self, before, state)

    def _shown(self, before: JobState, state: JobState) -> None:
        level = "warning" if state.phase in (Phase.PAUSED, Phase.FAILED) else "info"
        level = "debug" if _stepping(before, state) else level
        self.effects.log(Name.JOB_STATE, level, job=state.job, state=state.phase, reason=state.reason)

    def _stopped(self, before: JobState, state: JobState) -> None:
        self.shares.stopped(state)
        back = self.returns.of.pop(state.job, None)
        if back is not None and state.phase is Phase.PAUSED:
            self.profiling.holds.setdefault(state.job, Hold(back.until_s, back.workers))

    def _over(self, before: JobState, state: JobState) -> None:
        self.adapting.over(state.job)
        self.rounds.over(state.job)
        self.shares.forget(state.job)

    def _beside_over(self, before: JobState, state: JobState) -> None:
        if self.jobs[state.job].phase not in RUNNING:
            self.beside.over(self.jobs[state.job])

    def _evaluated(self, before: JobState, state: JobState) -> None:
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
                if isinstance(fact, CheckpointStored) and not state.run.moving:
                    self.effects.emit(do.SweepBlobs())
            case ToRanks(message, rank):
                for at, worker in _present(state):
                    if rank is None or rank == at:
                        self.effects.send(worker, said_to(state, at, message))
                if isinstance(message, do.StepCommit):
                    self.beside.standbys.committed(state, message, rank)
            case LinksDue():
                self.adapting.due(state, todo)
            case Redo(reason):
                self.losses.doubted(self.jobs[state.job], reason)
            case Exclude(ranks, reason):
                self.losses.go_on(self.jobs[state.job], ranks, reason, Cause.BROKEN)
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


def _stepping(before: JobState, state: JobState) -> bool:
    return before.phase in STEPPING and state.phase in STEPPING


def _reworded(before: JobState, state: JobState) -> bool:
    return (before.phase, before.reason) != (state.phase, state.reason)


def _evaluation_over(before: JobState, state: JobState) -> bool:
    return before.run.awaiting_eval is not None and state.run.awaiting_eval is None


When = Callable[[JobState, JobState], bool]
Then = Callable[[PipelineDriver, JobState, JobState], None]
CONSEQUENCES: tuple[tuple[str, When, Then], ...] = (
    ("people read what a job does", _reworded, PipelineDriver._shown),
    (
        "workers may be free, or wanted",
        lambda before, state: before.phase is not state.phase and not _stepping(before, state),
        lambda driver, before, state: setattr(driver.effects, "advance", True),
    ),
    (
        "who watches the job sees its newest figures",
        lambda was, now: _reworded(was, now) or (was.step, was.eval_loss) != (now.step, now.eval_loss),
        lambda driver, before, state: driver.effects.emit(do.Notify(state.job)),
    ),
    (
        "newcomers have what they began with: its blobs are needed no more",
        lambda before, state: before.run.moving and not state.run.moving,
        lambda driver, before, state: driver.effects.emit(do.SweepBlobs()),
    ),
    (
        "both held-out losses show what codecs cost",
        lambda before, state: _evaluation_over(before, state) and not state.run.moving,
        PipelineDriver._evaluated,
    ),
    (
        "a job that has its plan, or waits, measures nothing",
        lambda before, state: before.phase in PREPARING and state.phase not in PREPARING,
        lambda driver, before, state: driver.profiling.stop(state.job),
    ),
    (
        "nobody is awaited in a plan that is over, but its workers may be back in a moment",
        lambda before, state: state.phase not in RUNNING,
        PipelineDriver._stopped,
    ),
    (
        "what was learnt of a job's links goes with it",
        lambda before, state: state.phase in ENDED,
        PipelineDriver._over,
    ),
    (
        "who was asked for the job's data, and has no stage, hears that it is over",
        lambda before, state: state.phase in ENDED,
        lambda driver, before, state: driver.turns.over(state),
    ),
    (
        "a doubt that is settled shows whose fault it was",
        lambda before, state: True,
        lambda driver, before, state: driver.suspicion.stepped(before, state),
    ),
    (
        "newcomers begin with what is stored, once nothing is evaluated",
        lambda was, now: was.checkpoint.step != now.checkpoint.step or _evaluation_over(was, now),
        lambda driver, before, state: driver.changes.look(state),
    ),
    (
        "who works beside a plan goes with it",
        lambda before, state: before.phase in RUNNING,
        PipelineDriver._beside_over,
    ),
    (
        "steps are repeated of the plan that runs",
        lambda before, state: True,
        lambda driver, before, state: driver.beside.checks.stepped(before, state),
    ),
)
"""What follows when a job goes from one state to the next, in this order: why, when, and what."""
