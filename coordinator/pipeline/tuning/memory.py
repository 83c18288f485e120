"""Memory of a running job's stages: what is measured, and a stage that was killed for want of it. Pure.

Being killed for memory is a fact about the plan, not about the worker. The figure that the plan counted with
is raised for the job on that class of device, and nobody is suspected. Another worker that has the room takes
the stage over. Where none has, its own worker loads it once more and repeats the steps since the checkpoint,
which took less than what killed it; then all store the step as it is, and the job is planned anew from there.
Where it is killed again before that, the newest checkpoint is what is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.messages.jobs import FromRank, JobState

if TYPE_CHECKING:
    from atoll.plan import StagePrediction
    from coordinator.membership.roster import Roster
    from coordinator.messages.events import StageFailed

MIB = float(2**20)
TELLING_SHARE = (
    0.5  # of the plan's largest stage: what a smaller one takes is mostly the process's own growth
)


def learn(roster: Roster, state: JobState) -> None:
    """Take in what the stages of a job have held so far, as their heartbeats say."""
    recall(roster, state)
    for told in state.predicted:
        beat = roster.beat_of(told.worker, state.job)
        if beat is None or beat.version < state.run.assigned:
            continue
        intro = roster.workers[told.worker].introduction
        if not intro.memory_in_figures:
            bytes_ = _telling_bytes(state, told)
            roster.memory.measured(state.job, intro.device_class, bytes_, beat.memory_peak_bytes)


def recall(roster: Roster, state: JobState) -> None:
    """Know again what a job's plan was made with, as after our restart."""
    for told in state.predicted:
        known = roster.workers.get(told.worker)
        if known is not None:
            roster.memory.raised(state.job, known.introduction.device_class, told.memory_scale)


def measured_bytes(roster: Roster, state: JobState, rank: int) -> int:
    """Return the most that a rank's worker has held since it was given its stage; 0 where it is not known."""
    beat = roster.beat_of(state.workers[rank], state.job) if state.plan is not None else None
    return beat.memory_peak_bytes if beat is not None else 0


def killed(roster: Roster, state: JobState, failed: FromRank[StageFailed], label: str) -> str:
    """Learn from a stage that was killed for memory; returns what happened, in a sentence for people."""
    recall(roster, state)
    told, n_bytes = state.predicted[failed.rank : failed.rank + 1], failed.message.memory_bytes
    worker = state.workers[failed.rank]
    words = f"stage {state.adopted.places[failed.rank].stage} was killed for memory on {label} at "
    words += f"{n_bytes / MIB:.0f} MiB"
    known = roster.workers.get(worker)
    if not told or known is None:
        return words
    device, planned = known.introduction.device_class, told[0].memory_bytes
    factor = roster.memory.killed(state.job, device, _telling_bytes(state, told[0]), n_bytes)
    words += f", {planned / MIB:.0f} were planned"
    return f"{words}; such devices count {factor:.2f} x the model's figure from now on"


def _telling_bytes(state: JobState, told: StagePrediction) -> float:
    """Return the model's bytes of a stage, 0 where it is too small to tell a factor for larger ones."""
    largest = max(stage.model_bytes for stage in state.predicted)
    return told.model_bytes if told.model_bytes >= TELLING_SHARE * largest else 0.0
