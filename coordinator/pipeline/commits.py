"""What the commit of a step says: by how much gradients are scaled, and what is stored or evaluated. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from atoll.step_loss import StepLoss, step_loss
from coordinator.messages.events import EvalReady, StepReady
from coordinator.messages.facts import StepCommitted
from coordinator.messages.instructions import StepCommit
from coordinator.messages.jobs import Dropped, FromRank, JobState, OddLoss, OwnSteps, Point, Todo, ToRanks
from coordinator.pipeline import periods
from coordinator.pipeline.joined import ranks_of
from coordinator.pipeline.tuning import link_policy, relink


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


# ---------------------------------------------------------------- steps of a peer that is a pipeline
#
# Within a period of local steps a step is committed for the stages of that peer alone, as soon as all of
# them have its gradients ready, with the norm and the loss of the peer's own share. The job's step is the
# period's.


def own_ready(state: JobState, event: FromRank[StepReady]) -> tuple[JobState, list[Todo]]:
    """Take the report of a step; commit it once it is the last of its peer."""
    plan, report, rank = state.adopted, event.message, event.rank
    number = plan.places[rank].replica
    own = state.run.own.get(number, OwnSteps(state.step))
    if report.step != own.step or own.step > state.due:
        return state, _own_late(own, rank, report.step)
    if rank in own.ready:
        return state, [Dropped(f"rank {rank} reports step {report.step} twice")]
    own = replace(own, ready={**own.ready, rank: report})
    ranks, todo = ranks_of(plan, number), list[Todo]()
    if len(own.ready) == len(ranks):
        reports = [own.ready[at] for at in ranks]
        commit = _own_commit(state, reports)
        own = OwnSteps(own.step + 1, {}, commit, own.ready)
        todo = [ToRanks(commit, at) for at in ranks]
    return replace(state, run=replace(state.run, own={**state.run.own, number: own})), todo


def _own_late(own: OwnSteps, rank: int, reported: int) -> list[Todo]:
    """A stage that asks again about its peer's last commit did not hear it: say it again."""
    if own.commit is not None and own.commit.step == reported:
        return [Dropped(f"rank {rank} repeats step {reported}"), ToRanks(own.commit, rank)]
    return [Dropped(f"rank {rank} reports step {reported}, its peer is at step {own.step}")]


def _own_commit(state: JobState, reports: list[StepReady]) -> StepCommit:
    """Return the commit of a step that all stages of a peer have reported."""
    found = step_loss(
        [loss for report in reports for loss in report.losses],
        [weight for report in reports for weight in report.weights],
    )
    norms = [square for report in reports for square in report.square_norms]
    scale = state.spec.training.optimizer.gradient_scale(norms, found.weight)
    step = reports[0].step
    return StepCommit(
        state.job, state.version, step, scale, store=False, evaluate=False, last=False, own=True,
        replay_from=step + 1,
    )  # fmt: skip


def with_figures(state: JobState, event: FromRank[StepReady]) -> StepReady:
    """Return the report of a round with the figures of the peer's last step, which it has none of itself."""
    report, own = event.message, state.run.own.get(state.adopted.places[event.rank].replica)
    step = own.figures.get(event.rank) if own is not None else None
    if step is None:
        return report
    measured = {link.peer for link in step.links}
    return replace(
        step,
        step=report.step,
        version=report.version,
        losses=report.losses,
        weights=report.weights,
        square_norms=(),
        finite=report.finite,
        waited_s=step.waited_s + report.waited_s,
        links=(*step.links, *(link for link in report.links if link.peer not in measured)),
        digest=report.digest,
        receipts=report.receipts,
    )
