"""What the commit of a step says: by how much gradients are scaled, and what is stored or evaluated. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from atoll.job import scale_of
from atoll.step_loss import StepLoss
from coordinator.messages.events import EvalReady, StepReady
from coordinator.messages.facts import StepCommitted
from coordinator.messages.instructions import StepCommit
from coordinator.messages.jobs import JobState, OddLoss, Point, Todo
from coordinator.pipeline import periods
from coordinator.pipeline.tuning import link_policy, relink


def clip_scale(square_norms: list[float], clip_norm: float | None, weight: float = 1.0) -> float:
    """Return the factor of the step's gradients, ``atoll.job.scale_of``.

    The squares are added one by one in canonical parameter order, so that the sum is the same
    whatever stage each parameter is on.
    """
    total = 0.0
    for square in square_norms:
        total += square
    return scale_of(math.sqrt(total), clip_norm, weight)


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


def shown(found: StepLoss, before: float | None) -> float:
    """Return the loss that a job shows after a step: as before where the step has none."""
    return before if before is not None and not math.isfinite(found.mean) else found.mean


def losses(state: JobState, ready: Mapping[int, StepReady], found: StepLoss) -> list[Todo]:
    """Show the loss of a step, or of each of a period's, and what is odd about it."""
    steps = periods.step_losses(state.plan, ready) if state.plan is not None and state.local else [found]
    todo: list[Todo] = []
    for at, each in enumerate(steps, state.step + 1):
        if math.isfinite(each.mean):
            todo.append(Point(at, "loss", each.mean))
        if any(report.weights for report in ready.values()):
            todo.append(Point(at, "loss_weight", each.weight))
        if each.odd:
            todo.append(Point(at, "losses_not_finite", float(each.odd)))
        if each.words:
            todo.append(OddLoss(at, each))
    return todo


def evaluated(state: JobState, report: EvalReady) -> JobState:
    """Take in what an evaluation gave."""
    figures = {"eval_loss": report.loss, "coded_loss": report.coded_loss, "eval_metrics": report.metrics}
    return replace(state, run=replace(state.run, awaiting_eval=None), **figures)  # type: ignore[arg-type]


def evaluation_points(done: int, report: EvalReady) -> list[Todo]:
    """Show what an evaluation gave."""
    found: dict[str, float | None] = {f"eval_{name}": value for name, value in report.metrics.items()}
    found |= {"eval_loss": report.loss, "eval_loss_coded": report.coded_loss}
    return [Point(done, name, value) for name, value in found.items() if value is not None]


def reached(state: JobState, done: int, every: int) -> bool:
    """Whether a multiple of ``every`` steps is reached with the commit after which ``done`` are."""
    return done // every > state.step // every


def store_due(state: JobState, done: int, now_s: float) -> bool:
    """Every ``checkpoint_every`` steps; where the job does not say, by the clock since the last one."""
    every = state.spec.training.checkpoint_every
    return reached(state, done, every) if every else now_s >= state.storing.due_s and not state.storing.parts


def can_evaluate(state: JobState) -> bool:
    """Whether there is held-out data and a cut of the evaluation graph that goes with the plan."""
    held_out = state.spec.eval_data is not None and state.spec.training.eval_batches > 0
    return held_out and state.plan is not None and all(r.evaluated for r in state.plan.replicas)


def evaluation_due(state: JobState, done: int) -> bool:
    """Every ``eval_every`` steps; where the job does not say, as often as the guard looks at what codecs
    lose, so only at the end where they lose nothing."""
    every, plan = state.spec.training.eval_every, state.plan
    if not every and plan is not None and relink.lossy(plan):
        every = link_policy.look_every(state.spec.training, plan)
    return every > 0 and reached(state, done, every)
