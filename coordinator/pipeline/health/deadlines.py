"""Deadlines of a running job's waits, from what its plan predicts and what its steps took. Pure.

There are two. ``still_s``: nobody who has something to do counts any progress for so long. ``silent_s``: the
job itself comes no further, whatever its workers count. Both are long enough for the slowest honest work
that the plan knows of: a false alarm costs a re-plan, and each one doubles the second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.messages.jobs import Phase
from coordinator.pipeline.health.anomalies import FIRST_STEPS

if TYPE_CHECKING:
    from coordinator.messages.jobs import JobState

STILL_S, STILL_STEPS = 4.0, 3.0  # and up to 1 s from a count to its heartbeat and the tick that looks at it
SILENT_S, SILENT_STEPS = 60.0, 10.0
FIRST_STILL_S, FIRST_SILENT_S = 30.0, 180.0
BORDER_STILL_S = 30.0  # where a commit asked for a snapshot or an evaluation
MOVING_STILL_S, MOVING_SILENT_S = 60.0, 180.0  # loading and storing: connections, folders, allocations
SLOWEST_BYTES_PER_S = 50e3  # of a link to the coordinator
MOST_DOUBLINGS = 4


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that a job's workers may be without progress, and the job without a result of theirs."""

    still_s: float
    silent_s: float


def deadlines(state: JobState, slowdown: float = 1.0) -> Deadlines:
    """Return the deadlines of what a running job does now.

    ``slowdown``: of its slowest worker, by limits that were set since its plan was made; measured steps may
    have been slowed by them already.
    """
    if state.phase in (Phase.LOADING, Phase.STORING):
        found = Deadlines(MOVING_STILL_S, storing_s(state) + _replay_s(state))
    else:
        step_s = _step_s(state)
        period_s = step_s * (state.due + 1 - state.step)  # peers with local steps report once a period
        known = len(state.run.step_times_s) >= FIRST_STEPS
        still_s = max(STILL_S if known else FIRST_STILL_S, STILL_STEPS * step_s)
        silent_s = max(
            SILENT_S if known else FIRST_SILENT_S, SILENT_STEPS * (period_s + _evaluation_s(state, step_s))
        )
        last = state.run.last_commit
        if last is not None and (last.store or last.evaluate):
            still_s = max(still_s, BORDER_STILL_S)
        found = Deadlines(still_s * slowdown, silent_s * slowdown)
    doubled = 2 ** min(state.failures, MOST_DOUBLINGS)
    return Deadlines(found.still_s, found.silent_s * doubled)


def storing_s(state: JobState) -> float:
    """Return how long the stages may take to load or to store what they hold."""
    most = max((stage.memory_bytes for stage in state.predicted), default=0)
    return MOVING_SILENT_S + most / SLOWEST_BYTES_PER_S


def _replay_s(state: JobState) -> float:
    """Return how long a newcomer may take to repeat the steps since its checkpoint."""
    done = max((own.step for own in state.run.own.values()), default=state.step)
    steps = done - state.run.source.step if state.run.source is not None else 0
    return SILENT_STEPS * _step_s(state) * steps


def _step_s(state: JobState) -> float:
    """Return the longest of what was predicted and measured; 0 when neither is known."""
    predicted_s = state.prediction.step_s if state.prediction is not None else 0.0
    return max((predicted_s if math.isfinite(predicted_s) else 0.0, *state.run.step_times_s))


def _evaluation_s(state: JobState, step_s: float) -> float:
    training = state.spec.training
    return step_s * training.eval_batches / training.n_micro if state.run.awaiting_eval is not None else 0.0
