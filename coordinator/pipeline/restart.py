"""A running job after our restart: its machine made from the journal, and who may take a rank again. Pure.

The workers still hold their stages. The journal says which steps are committed and with what words, so a plan
goes on when each of its workers comes back with the state after as many steps, or with one step less and
that step ready: it hears the last commit again. Where no step is committed yet, some may not have heard of
the plan: they are given their stage again, as long as nobody has loaded (who has is connected to the others).
The same holds for a plan that was being reconfigured; who stays in it may not have heard of that. Who does
not come back, or with something else, is replaced as if it had been lost otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from atoll.job import CHECKPOINT_EVERY_S
from coordinator.messages.events import Held
from coordinator.messages.facts import JobRecord
from coordinator.messages.instructions import Relink, StepCommit
from coordinator.messages.jobs import JobState, Phase
from coordinator.pipeline.tuning.relink import AHEAD

if TYPE_CHECKING:
    from coordinator.membership.roster import Worker


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
            partly = self.empty and self.loaded and not state.moving
            return "and only some have loaded their stages" if partly else ""
        if held is None:
            return "without its stage"
        oldest = since if state.moving else self.assigned
        if not oldest <= held.version <= self.assigned:
            return f"with its stage of plan {held.version}, awaited is that of plan {self.assigned}"
        self.loaded |= state.moving and held.loaded and held.version == self.assigned
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
        and that hold nothing now, nobody knows what they have said."""
        if self.loaded:
            return {**self.lost, **dict.fromkeys(self.empty, "without its stage")}
        return dict(self.lost)


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
        assigned=record.assigned,
        first_step=record.steps if phase is Phase.LOADING else -1,
        moving=moving,
        source=record.last_checkpoint if moving else None,
        step=record.steps,
        last_commit=_said(record),
        awaiting_eval=record.awaiting_eval,
        stores={done: {} for done in record.storing if done not in forgone},
        store_owed=bool(forgone),
        storing_s=now_s,
        store_due_s=now_s + CHECKPOINT_EVERY_S,
        loaded=frozenset() if phase is Phase.LOADING else frozenset(plan.present),
        lost=dict.fromkeys(plan.absent, "was lost before the coordinator was restarted"),
        relink=Relink(announced.version, announced.first_step, announced.links) if announced else None,
        lineage=record.lineage,
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
    """Return the newest commit with every word that it was said with."""
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
