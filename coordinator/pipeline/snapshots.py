"""What a job's machine knows of the snapshots that a plan's ranks keep for each other (``ring``). Pure."""

from __future__ import annotations

from dataclasses import replace

from atoll.transitions import Transitions
from coordinator.messages.events import StateStored
from coordinator.messages.facts import CheckpointStored
from coordinator.messages.jobs import (
    PREPARING,
    WAITING,
    Dropped,
    Event,
    FromRank,
    JobState,
    Phase,
    Record,
    Recovered,
    Ring,
    RingChanged,
    Snapshot,
    Todo,
)

Outcome = tuple[JobState, list[Todo]]
TRANSITIONS: Transitions[JobState, [float], Outcome] = Transitions(Phase, Event)


def begun(state: JobState, done: int, now_s: float, *, last: bool, store: bool) -> Ring:
    """Return the ring after a commit: with a snapshot under way where one is due. One copy of the state at a
    time waits in a worker's memory, so not beside a checkpoint."""
    ring, plan = state.ring, state.plan
    if not ring.due or ring.taking is not None or last or store or state.storing.parts or plan is None:
        return ring
    return replace(ring, due=(), taking=Snapshot(done, now_s, plan, ring.due), asked_s=now_s)


def kept(state: JobState, event: FromRank[StateStored]) -> Outcome:
    """A rank has its part of a snapshot on its own disk, or has not."""
    report, taking = event.message, state.ring.taking
    done = report.step + 1
    if taking is None or taking.step != done or event.rank in taking.parts:
        return state, [Dropped(f"rank {event.rank} kept step {done}, which nobody awaits")]
    if report.error:
        failed = f"rank {event.rank} could not keep its state: {report.error}"
        return replace(state, ring=replace(state.ring, taking=None, failed=failed)), []
    parts = {**taking.parts, event.rank: report.tensors}
    return replace(state, ring=replace(state.ring, taking=replace(taking, parts=parts))), []


def reconfigured(ring: Ring) -> Ring:
    """Return the ring of a plan in which somebody is lost or has come: what is whole counts, what was under
    way does not, nor why other links had no time for one."""
    return replace(ring, due=(), taking=None, failed="", took_s=0.0 if ring.failed else ring.took_s)


def again_words(state: JobState) -> str:
    """Say how much is done again when a job goes back as far as it must, "" where nothing is."""
    steps = state.step - state.back_to
    if steps <= 0:
        return ""
    seconds = steps * (state.median_step_s or 0.0)
    took = f", {seconds:.0f} s of training," if seconds else ""
    return f"; {steps} step{'s'[: steps != 1]}{took} {'are' if steps != 1 else 'is'} done again"


@TRANSITIONS.on(*Phase)
def _change(state: JobState, event: RingChanged, now_s: float) -> Outcome:
    return replace(state, ring=event.ring), []


@TRANSITIONS.on(*WAITING, *PREPARING)
def _recover(state: JobState, event: Recovered, now_s: float) -> Outcome:
    checkpoint = event.checkpoint
    if checkpoint.step <= state.checkpoint.step:
        return state, [Dropped(f"step {checkpoint.step} was recovered, {state.checkpoint.step} is stored")]
    fact = CheckpointStored(state.job, checkpoint.step, checkpoint.tensors, checkpoint.at_s)
    return replace(state, checkpoint=checkpoint, ring=Ring()), [Record(fact)]
