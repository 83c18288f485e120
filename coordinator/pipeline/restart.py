"""A running job after our restart: its machine made from the journal, and who may take a rank again. Pure.

The workers still hold their stages. The journal says which steps are committed and with what words. So a plan
goes on when each of its workers comes back with the state after as many steps, or with one step less and
that step ready: it hears the last commit again. Where no step is committed yet, some may not have heard of
the plan: they are given their stage again, as long as nobody has loaded (who has is connected to the others).
The same holds for a plan that was being reconfigured; who stays in it may not have heard of that. Who does
not come back, or with something else, is replaced as if it had been lost otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from atoll.job import CHECKPOINT_EVERY_S
from coordinator.membership import member as members
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.events import Held
from coordinator.messages.facts import JobRecord
from coordinator.messages.instructions import Relink, StepCommit
from coordinator.messages.jobs import (
    ENDED,
    RESTART_GRACE_S,
    Cause,
    Event,
    FromRank,
    JobState,
    Phase,
    Resumed,
    anew,
)
from coordinator.pipeline.changes.recovery import at_hand
from coordinator.pipeline.history import begun
from coordinator.pipeline.tuning.profiling import Hold
from coordinator.pipeline.tuning.relink import AHEAD

if TYPE_CHECKING:
    from coordinator.membership.effects import Effects
    from coordinator.membership.roster import Worker
    from coordinator.pipeline.changes.losses import Losses
    from coordinator.pipeline.tuning.link_adaptation import Adapting
    from coordinator.pipeline.tuning.profiling import Profiling


REPLACED_AFTER_S = 4.0  # of our restart, where others can take over: who holds a stage tries every second


@dataclass(slots=True)
class Returning:
    """A plan whose workers are awaited: those in ``missing``, until ``until_s``."""

    assigned: int  # version that the plan was adopted, or last reconfigured, under
    workers: frozenset[str]
    missing: set[str]
    until_s: float
    since: Mapping[str, int] = field(default_factory=dict)  # worker -> version that its stage was given under
    loaded: bool = False  # somebody came back with a stage of this version, whole,
    empty: set[str] = field(default_factory=set)  # and who with none of it
    lost: dict[str, str] = field(default_factory=dict)  # who cannot go on, and why

    def unfit(self, state: JobState, worker: str, held: Held | None) -> str:
        """Return why a worker with this in its hands cannot take its rank again, "" when it can."""
        if held is not None and held.job != state.job:
            return f"with a stage of {held.job}"
        since = self.since.get(worker, self.assigned)
        if state.phase is Phase.LOADING and since == self.assigned:
            mine = held is not None and held.version == self.assigned
            if not mine:
                self.empty.add(worker)
            self.loaded |= mine and held is not None and held.loaded
            partly = self.empty and self.loaded and not state.run.moving
            return "and only some have loaded their stages" if partly else ""
        if held is None:
            return "without its stage"
        oldest = since if state.run.moving else self.assigned
        if not oldest <= held.version <= self.assigned:
            return f"with its stage of plan {held.version}, awaited is that of plan {self.assigned}"
        self.loaded |= state.run.moving and held.loaded and held.version == self.assigned
        plan = state.plan
        reported = (held.step if plan is None else plan.last_step(held.step, state.steps)) + 1
        if held.step == state.step or (held.ready and reported == state.step):
            return ""
        return f"with its stage after {held.step} steps, {state.step} are committed"

    def has_loaded(self, held: Held | None) -> bool:
        """Whether a worker that is fit holds its stage whole."""
        return held is not None and held.loaded and held.version == self.assigned

    def gone(self) -> dict[str, str]:
        """Return who cannot go on, and why, once all are back: of those that others were connected with
        and that hold nothing now, nobody knows what they have sent."""
        if self.loaded:
            return {**self.lost, **dict.fromkeys(self.empty, "without its stage")}
        return dict(self.lost)


@dataclass(slots=True)
class Returns:
    """Jobs that ran when we stopped; ``step``: step a job's machine, ``reconnected``: repeat to a worker what
    was under way."""

    effects: Effects
    jobs: Mapping[str, JobState]
    profiling: Profiling
    adapting: Adapting
    losses: Losses
    step: Callable[[str, Event], None]
    reconnected: Callable[[str, str], None]
    of: dict[str, Returning] = field(default_factory=dict)

    def restored(self, record: JobRecord) -> JobState:
        """Make a job's machine from what the ledger knows."""
        job, checkpoint = record.submitted.job, record.last_checkpoint
        state = JobState(
            job,
            record.submitted.spec,
            checkpoint,
            record.submitted.created_s,
            version=record.version,
            step=record.steps,
            plan=record.plan,
            loss=record.loss,
            eval_loss=record.eval_loss,
            eval_metrics=record.eval_metrics,
            held_out=record.held_out,
        )
        if record.outcome:
            state = replace(state, phase=Phase(record.outcome), reason=record.reason)
        elif record.version:
            state = self._awaited(state, record)
        return state

    def _awaited(self, state: JobState, record: JobRecord) -> JobState:
        """Go on with the plan that ran when we stopped once its workers are back; plan anew where the journal
        does not say enough."""
        until_s = self.effects.now_s + RESTART_GRACE_S
        plan = record.plan
        workers = frozenset(plan.places[rank].worker for rank in plan.present) if plan else frozenset()
        found = running(state, record, self.effects.now_s)
        if found is not None:
            since = {plan.places[rank].worker: record.given(rank) for rank in plan.present} if plan else {}
            self.of[state.job] = Returning(record.assigned, workers, set(workers), until_s, since)
            return found
        self.profiling.holds[state.job] = Hold(until_s, workers)
        reason = f"the coordinator was restarted; continues from step {state.checkpoint.step}"
        return replace(state, phase=Phase.PAUSED, reason=reason)

    def failed(self, state: JobState, failed: FromRank[ev.StageFailed]) -> None:
        """A stage broke: whoever comes back with it after our restart is as good as lost."""
        back, message = self.of.get(state.job), failed.message
        if back is not None and not message.lost_peer and begun(state) and state.plan is not None:
            self.missed(state, back, state.plan.places[failed.rank].worker, f"failed: {message.reason}")
        else:
            self.losses.failed(state, failed, back.until_s if back is not None else 0.0)

    def unstored(self, state: JobState, stored: FromRank[ev.StateStored]) -> bool:
        """Have another take over from a worker that could not store its part; whether that was so."""
        back, why = self.of.get(state.job), self.losses.unstored(state, stored)
        if why and back is not None and state.plan is not None:
            self.missed(state, back, state.plan.places[stored.rank].worker, why)
            return True
        if not why:
            return False
        words = f"{self.effects.label(state.workers[stored.rank])} {why}"
        return self.losses.go_on(state, {stored.rank}, words, Cause.BROKEN, back=False)

    def tick(self) -> None:
        """Let time pass."""
        for job in list(self.of):
            self.all_back(job)

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
            back = self.of.get(state.job)
            if back is None or worker not in back.missing:
                self._take_back(state, worker)
                continue
            wrong = kept_out(self.effects.roster.workers[worker]) or back.unfit(state, worker, held)
            if not wrong:
                self._returned(state, back, worker)
                continue
            self._take_back(state, worker)
            self.missed(state, back, worker, f"came back {wrong}")

    def _take_back(self, state: JobState, worker: str) -> None:
        reason = "the stage was taken back while you were away"
        self.effects.send(worker, do.Release(state.job, state.version, reason))

    def missed(self, state: JobState, back: Returning, worker: str, why: str) -> None:
        """Who is awaited after our restart is lost: it is replaced when the others are back."""
        if not begun(state):
            self.step(state.job, anew(state, f"{self.effects.label(worker)} {why}"))
            return
        back.missing.discard(worker)
        back.lost[worker] = why
        self.all_back(state.job)

    def _returned(self, state: JobState, back: Returning, worker: str) -> None:
        rank, job = state.rank_of(worker), state.job
        assert rank is not None  # noqa: S101 - the caller has looked
        back.missing.discard(worker)
        self.effects.move(worker, members.AssignedTo(job, rank))
        held = self.effects.roster.workers[worker].introduction.held
        if state.phase is not Phase.LOADING:
            self.reconnected(job, worker)
        elif back.has_loaded(held):
            self.step(job, FromRank(rank, ev.Loaded(job, back.assigned)))
        self.all_back(job)

    def all_back(self, job: str) -> None:
        """Go on once every worker of the plan is back, or known to be lost; those may be replaced by workers
        that come back later."""
        back, state = self.of.get(job), self.jobs[job]
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
        here = tuple(w for w in lost if roster.is_idle(w) or at_hand(roster, w, job))
        chosen = self.losses.choose(state, ranks, here)
        if chosen.plan is not None:
            del self.of[job]
            self.losses.act(state, chosen, words)
        elif self.effects.now_s >= back.until_s or not (back.missing or chosen.for_now):
            self.step(job, anew(state, f"{words}; {chosen.reason}"))

    def _resume(self, job: str) -> None:
        """Every worker of the plan is back: who has not loaded its stage is given it again."""
        del self.of[job]
        state = self.jobs[job]
        self.adapting.adopted(state, self.effects.ledger.jobs[job].cap)
        for rank in state.present:
            if state.phase is Phase.LOADING and rank not in state.run.loaded:
                self.reconnected(job, state.plan.places[rank].worker)  # type: ignore[union-attr]
        self.step(job, Resumed())


def kept_out(known: Worker) -> str:
    """Return why a worker that came back has no part any more, whatever it holds, "" where it may have."""
    if known.quarantined:
        return f"and is quarantined: {known.quarantined}"
    return f"and took part in {known.member.job}" if known.member.job else ""


def running(waiting: JobState, record: JobRecord, now_s: float) -> JobState | None:
    """Return ``waiting`` as it was when we stopped, None when the journal does not say that.

    Reports of the step in flight, and parts of a checkpoint, are lost with us: workers repeat them.
    """
    plan, commit = record.plan, record.commit
    if plan is None or not record.lineage or (commit is not None and commit.scale is None):
        return None  # written by an older coordinator
    if plan.piped:
        return None  # how far its pipelines were within their period, the journal does not say
    phase = _phase(waiting, record)
    if phase is None:
        return None
    announced, forgone = record.relink, _forgone(record, waiting.steps)
    # Peers that have begun go on without others, also before their first commit.
    moving = record.moving or (plan.local and phase is Phase.LOADING)
    return replace(
        waiting,
        phase=phase,
        reason="the coordinator was restarted; waits for its workers to come back",
        version=record.lineage[-1][0],
        step=record.steps,
        run=replace(
            waiting.run,
            assigned=record.assigned,
            first_step=record.steps if phase is Phase.LOADING else -1,
            moving=moving,
            source=record.last_checkpoint if moving else None,
            last_commit=_said(record),
            awaiting_eval=record.awaiting_eval,
            loaded=frozenset() if phase is Phase.LOADING else frozenset(plan.present),
            lost=dict.fromkeys(plan.absent, "was lost before the coordinator was restarted"),
            relink=Relink(announced.version, announced.first_step, announced.links) if announced else None,
            lineage=record.lineage,
        ),
        storing=replace(
            waiting.storing,
            parts={done: {} for done in record.storing if done not in forgone},
            owed=bool(forgone),
            asked_s=now_s,
            due_s=now_s + CHECKPOINT_EVERY_S,
        ),
    )


def _forgone(record: JobRecord, steps: int) -> set[int]:
    """Return the checkpoints under way of which a part may be lost with us: its worker is gone, and who took
    over had not to store it again. The result is waited for whatever that takes."""
    begun = dict(record.lineage)
    newest = max((begun.get(record.given(rank), 0) for rank in range(len(record.since))), default=0)
    return {done for done in record.storing if done <= newest and done < steps}


def _phase(waiting: JobState, record: JobRecord) -> Phase | None:
    if record.commit is None or record.moving:
        return Phase.LOADING  # or the first step is under way: workers that are loaded say so
    if record.awaiting_eval is not None:
        return Phase.EVALUATING
    if record.steps < waiting.steps:
        return Phase.TRAINING
    return Phase.STORING if record.storing else None


def _said(record: JobRecord) -> StepCommit | None:
    """Return the newest commit with everything that it was sent with."""
    commit, announced = record.commit, record.relink
    if commit is None or commit.scale is None:
        return None
    relink = None
    if announced is not None and announced.first_step == commit.step + AHEAD:
        relink = Relink(announced.version, announced.first_step, announced.links)
    return StepCommit(
        commit.job,
        commit.version,
        commit.step,
        commit.scale,
        commit.store,
        commit.evaluate,
        commit.last,
        relink,
        evaluate_coded=commit.coded,
        replay_from=record.last_checkpoint.step,
    )
