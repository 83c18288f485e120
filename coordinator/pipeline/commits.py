"""What the commit of a step says: by how much gradients are scaled, and what is stored or evaluated. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from atoll.messages.from_worker import MAX_WATTS
from atoll.step_loss import StepLoss, step_loss
from coordinator.messages.credits import MAX_BYTES
from coordinator.messages.events import EvalReady, StepReady
from coordinator.messages.facts import StepCommitted
from coordinator.messages.instructions import StepCommit, StepStart
from coordinator.messages.jobs import (
    Dropped,
    FromRank,
    JobState,
    OddLoss,
    OwnSteps,
    Phase,
    Point,
    Todo,
    ToRanks,
)
from coordinator.pipeline import history, periods
from coordinator.pipeline.joined import ranks_of
from coordinator.pipeline.tuning import link_policy, relink

if TYPE_CHECKING:
    from atoll.exchange import Exchange


Work = tuple[tuple[int, ...], ...]
"""By rank: milliseconds of computing, bytes sent and received, and where anybody measures it millijoules."""


def work_of(state: JobState, ready: Mapping[int, StepReady], took_s: float | None) -> Work:
    """Return what each rank reports of a step, as far as that is possible in the time that the step took.
    Bytes at both ends of a link are those that its sender reports."""
    most_ms = MAX_BYTES if took_s is None else 1e3 * took_s
    most_mj = 0.0 if took_s is None else 1e3 * MAX_WATTS * took_s
    sent, received = dict.fromkeys(state.present, 0), dict.fromkeys(state.present, 0)
    for rank in state.present:
        for link in ready[rank].links:
            size, peer = min(MAX_BYTES, max(0, link.n_bytes)), state.rank_of(link.peer)
            sent[rank] += size
            if peer in received:
                received[peer] += size
    computed = tuple(int(min(most_ms, max(0.0, 1e3 * ready[rank].computed_s))) for rank in state.present)
    energy = tuple(int(min(most_mj, max(0.0, 1e3 * ready[rank].energy_j))) for rank in state.present)
    return computed, tuple(sent.values()), tuple(received.values()), energy if any(energy) else ()


def fact_of(
    commit: StepCommit,
    loss: float,
    now_s: float,
    reports: Sequence[StepReady],
    work: Work = (),
) -> StepCommitted:
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
        *work,
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


def evaluated(state: JobState, loss: float, report: EvalReady) -> JobState:
    """Take in what an evaluation gave."""
    return replace(
        state,
        run=replace(state.run, awaiting_eval=None),
        eval_loss=loss,
        coded_loss=report.coded_loss,
        eval_metrics=report.metrics,
        held_out=state.held_out.after(report.step + 1, loss),
    )


def stopped_early(state: JobState, stored: int) -> str:
    """Say why training ends before its last step, "" while it goes on: as many evaluations as the job's
    ``patience`` gave no better loss, and the checkpoint of ``stored`` steps is no older than the best one."""
    patience, best = state.spec.training.patience, state.held_out.best
    if not patience or state.held_out.since < patience or state.step >= state.steps:
        return ""
    if best is None:
        return (
            f"stopped after {state.step} of {state.steps} steps: no held-out loss was finite"
            if stored
            else ""
        )
    if stored < best.step:
        return ""
    return (
        f"stopped after {state.step} of {state.steps} steps: {state.held_out.since} evaluations without a "
        f"held-out loss below {best.loss:.4f}, that of step {best.step}; "
        f"`atoll export {state.job} --step best` writes the checkpoint nearest to it"
    )


def evaluation_points(done: int, report: EvalReady) -> list[Todo]:
    """Show what an evaluation gave."""
    found: dict[str, float | None] = {f"eval_{name}": value for name, value in report.metrics.items()}
    found |= {"eval_loss": report.loss, "eval_loss_coded": report.coded_loss}
    return [Point(done, name, value) for name, value in found.items() if value is not None]


def reached(state: JobState, done: int, every: int) -> bool:
    """Whether a multiple of ``every`` steps is reached with the commit after which ``done`` are."""
    return done // every > state.step // every


def store_due(state: JobState, done: int, now_s: float, *, evaluate: bool) -> bool:
    """Every ``checkpoint_every`` steps; where the job does not say, by the clock since the last one. And
    whatever is evaluated where that may be the last of it."""
    if evaluate and state.spec.training.patience:
        return True
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


def evaluation_waits(state: JobState) -> bool:
    """Whether an evaluation waits for the checkpoint that is being stored: a job that stores as often as it
    evaluates has every evaluated state stored, so that the best is none that is gone."""
    training = state.spec.training
    return 0 < training.checkpoint_every == training.eval_every and bool(state.storing.parts)


# ---------------------------------------------------------------- steps of a peer that is a pipeline
#
# Within a period of local steps a step is committed for the stages of that peer alone, as soon as all of
# them have its gradients ready, with the norm and the loss of the peer's own share. The job's step is the
# period's.
#
# Where a round waits for a quorum, the commit of a peer's last step waits for those of the others. Once there
# are as many as the quorum and the grace is over, a peer that is late ends with the step that it is at. When
# all have reported their last ones, these are committed together, and say what each peer brings.


def own_ready(state: JobState, event: FromRank[StepReady], now_s: float) -> tuple[JobState, list[Todo]]:
    """Take the report of a step; commit it once it is the last of its peer, or all at the end of a period."""
    plan, report, rank = state.adopted, event.message, event.rank
    number = plan.places[rank].replica
    own = state.run.own.get(number, OwnSteps(state.step))
    if report.step != own.step or own.step > state.due:
        return state, _own_late(own, rank, report.step)
    if rank in own.ready:
        return state, [Dropped(f"rank {rank} reports step {report.step} twice")]
    own = replace(own, ready={**own.ready, rank: report})
    state = replace(state, run=replace(state.run, own={**state.run.own, number: own}))
    if len(own.ready) < len(ranks_of(plan, number)):
        return state, []
    if plan.exchange is None or not plan.exchange.early:
        waits = state.phase is Phase.LOADING and own.step == state.due  # a round would begin with its commit
        return (state, []) if waits else _own_committed(state, [number])
    state = _with_quorum(state, plan.exchange, now_s)
    waits_until_s = inf if state.run.quorum_s is None else state.run.quorum_s + plan.exchange.grace_s
    if own.step < state.due and now_s < waits_until_s:
        return _own_committed(state, [number])
    peers = plan.present_replicas
    if all(_reported(state, peer) for peer in peers):
        return _own_committed(state, peers, _shares(state))
    return state, []


def _with_quorum(state: JobState, exchange: Exchange, now_s: float) -> JobState:
    """Know since when as many peers as a round waits for have their last step."""
    if state.run.quorum_s is not None:
        return state
    plan, own = state.adopted, state.run.own
    peers = plan.present_replicas
    last = sum(_reported(state, peer) and own[peer].step == state.due for peer in peers)
    enough = last >= min(len(peers), exchange.awaited(len(plan.replicas)))
    return replace(state, run=replace(state.run, quorum_s=now_s)) if enough else state


def _reported(state: JobState, peer: int) -> bool:
    """Whether all stages of a peer have reported the step that it is at."""
    own = state.run.own.get(peer)
    return own is not None and len(own.ready) == len(ranks_of(state.adopted, peer))


def _shares(state: JobState) -> tuple[float, ...]:
    """Return the samples that each peer brings to the round, over the most of any; 0 of who is lost."""
    plan, own = state.adopted, state.run.own
    samples = [0] * len(plan.replicas)
    for peer in plan.present_replicas:
        first, stop = plan.replicas[peer].micros
        samples[peer] = (own[peer].step + 1 - state.step) * (stop - first)
    return tuple(each / max(samples) for each in samples)


def _own_committed(
    state: JobState, peers: Sequence[int], shares: tuple[float, ...] = ()
) -> tuple[JobState, list[Todo]]:
    """Commit the step that each of these peers has reported. ``shares``: it is the period's last of each."""
    plan, todo, known = state.adopted, list[Todo](), dict(state.run.own)
    heard = state.run.heard
    for peer in peers:
        own, ranks = known[peer], ranks_of(plan, peer)
        commit = replace(_own_commit(state, [own.ready[at] for at in ranks]), shares=shares)
        taken = own.step + 1 - state.step if shares and own.step < state.due else None
        spent = {at: own.figures[at].energy_j for at in ranks if at in own.figures}
        figures = {at: _with_energy(report, spent.get(at, 0.0)) for at, report in own.ready.items()}
        known[peer] = OwnSteps(state.due + 1 if shares else own.step + 1, taken, {}, commit, figures)
        heard = history.heard(state, heard, [peer], commit)
        todo += [ToRanks(commit, at) for at in ranks]
    return replace(state, run=replace(state.run, own=known, heard=heard)), todo


def peer_begins(state: JobState, rank: int) -> list[Todo]:
    """Have a peer take steps of its own that is whole again, or connected anew, while others are loading. Who
    is takes no message of a round yet, so it does not come to that: see ``own_ready``."""
    plan = state.adopted
    if not (state.run.moving and state.repeats_own and plan.in_pipe(rank)) or state.run.unfit:
        return []
    ranks = ranks_of(plan, plan.places[rank].replica)
    _, joining = state.due_of(rank)
    if joining or state.step >= state.steps or not state.run.loaded.issuperset(ranks):
        return []
    return [ToRanks(StepStart(state.job, state.version, state.due), at) for at in ranks]


def kept_back(state: JobState) -> tuple[JobState, list[Todo]]:
    """Commit the last steps of peers that were taken while others were loading."""
    exchange = state.adopted.exchange
    if not state.local or exchange is None or exchange.early:
        return state, []
    return _own_committed(state, [peer for peer in state.run.own if _reported(state, peer)])


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
        replay_from=min(step + 1, state.replay_from),
    )  # fmt: skip


def _with_energy(report: StepReady, before_j: float) -> StepReady:
    """Return a report with the joules of earlier steps of its period, too."""
    return replace(report, energy_j=report.energy_j + before_j) if before_j else report


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
        energy_j=step.energy_j + report.energy_j,
    )
