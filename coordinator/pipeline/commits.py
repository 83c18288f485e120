"""What the commit of a step says: by how much gradients are scaled, and what is stored or evaluated. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from coordinator.messages.events import StepReady
from coordinator.messages.facts import StepCommitted
from coordinator.messages.instructions import StepCommit
from coordinator.messages.jobs import JobState, Point, Todo
from coordinator.pipeline import link_policy, periods, relink

CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_


def clip_scale(square_norms: list[float], clip_norm: float | None) -> float:
    """min(1, clip / (||g|| + 1e-6)); 1 when not clipped.

    The squares are added one by one in canonical parameter order, so that the sum is the same
    whatever stage each parameter is on.
    """
    if clip_norm is None:
        return 1.0
    total = 0.0
    for square in square_norms:
        total += square
    return min(1.0, clip_norm / (math.sqrt(total) + CLIP_EPS))


def fact_of(commit: StepCommit, loss: float, now_s: float, reports: Sequence[StepReady]) -> StepCommitted:
    """Everything that the commit says, so that it can be repeated after a restart; and the ranks' digests,
    for who repeats the step."""
    digests = tuple(report.digest.gradients + report.digest.inputs for report in reports)
    return StepCommitted(
        commit.job,
        commit.version,
        commit.step,
        loss,
        now_s,
        commit.gradient_scale,
        commit.store,
        commit.evaluate,
        commit.last,
        commit.evaluate_coded,
        digests if any(digests) else (),
    )


def losses(state: JobState, ready: Mapping[int, StepReady], loss: float) -> list[Todo]:
    """Show the loss of a step, or of each of a period's."""
    if state.plan is None or not state.local:
        return [Point(state.step + 1, "loss", loss)]
    return [
        Point(at, "loss", value)
        for at, value in enumerate(periods.step_losses(state.plan, ready), state.step + 1)
    ]


def reached(state: JobState, done: int, every: int) -> bool:
    """Whether a multiple of ``every`` steps is reached with the commit after which ``done`` are."""
    return done // every > state.step // every


def store_due(state: JobState, done: int, now_s: float) -> bool:
    """Every ``checkpoint_every`` steps; where the job does not say, by the clock since the last one."""
    every = state.spec.training.checkpoint_every
    return reached(state, done, every) if every else now_s >= state.store_due_s and not state.stores


def can_evaluate(state: JobState) -> bool:
    """Whether there is held-out data and a cut of the evaluation graph that goes with the plan."""
    held_out = state.spec.eval_data is not None and state.spec.training.eval_batches > 0
    return held_out and state.plan is not None and all(r.stages[-1].eval_stop for r in state.plan.replicas)


def evaluation_due(state: JobState, done: int) -> bool:
    """Every ``eval_every`` steps; where the job does not say, as often as the guard looks at what codecs
    lose, so only at the end where they lose nothing."""
    every, plan = state.spec.training.eval_every, state.plan
    if not every and plan is not None and relink.lossy(plan):
        every = link_policy.look_every(state.spec.training, plan)
    return every > 0 and reached(state, done, every)
