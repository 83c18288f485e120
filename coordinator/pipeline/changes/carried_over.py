"""A plan change in a job's state: what is known of the plan that was, under the next one. Pure.

Everybody keeps what is committed. What follows for each worker is the difference of the two plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from coordinator.messages.facts import Reconfigured, began
from coordinator.messages.jobs import Cause, JobState, OwnSteps, Phase
from coordinator.pipeline import snapshots

if TYPE_CHECKING:
    from atoll.plan import Plan
    from coordinator.messages.jobs import PlanChange

FigureT = TypeVar("FigureT", int, float)
KnownT = TypeVar("KnownT")


def carried_over(state: JobState, change: PlanChange, before: Plan, plan: Plan, counts: bool) -> JobState:
    """Return the job's state under the next plan: everybody keeps what is committed, and the step in flight
    begins anew. ``counts``: as an interruption."""
    reshared = _reshares(before, plan)
    if reshared:
        state = _renumbered(state, before, plan)
    elif change.cause is Cause.UNFIT and state.step > state.checkpoint.step:
        state = replace(
            state,
            run=replace(state.run, unfit=True),
            storing=replace(state.storing, parts={state.step: {}, **state.storing.parts}),
        )
    # Of steps before, who has stood by stores nothing: a checkpoint that lacks its part will not be whole.
    promoted = {
        rank: state.standbys[rank].source if rank in state.standbys else None
        for rank, (was, is_now) in enumerate(zip(before.places, plan.places, strict=False))
        if not reshared and was.worker != is_now.worker and rank not in change.sources
    }
    stores = {done: parts for done, parts in state.storing.parts.items() if promoted.keys() <= parts.keys()}
    return replace(
        state,
        phase=Phase.LOADING,
        reason=change.reason,
        version=plan.version,
        plan=plan,
        failures=state.failures + counts,
        broken=state.broken + (counts and change.cause is Cause.BROKEN),
        stumbled=state.stumbling(change.cause),
        ring=snapshots.reconfigured(state.ring),
        run=replace(
            state.run,
            lost={rank: state.run.lost.get(rank, change.reason) for rank in plan.absent},
            seating=False,
            unfit=state.run.unfit and (state.step in stores or state.step == state.checkpoint.step),
            assigned=plan.version,
            first_step=state.step,
            moving=True,
            source=state.checkpoint,
            loaded=frozenset(),
            promoted=promoted,
            ready={},
            own=_of_peers(state.run.own, before, plan, _begun_anew),
            heard=_of_peers(state.run.heard, before, plan, tuple),
            alike_from=state.run.alike_from if _exchanges_alike(before, plan) else state.step,
            quorum_s=None,
            reports={},
            awaiting_eval=None,
            eval_owed=state.run.eval_owed or state.run.awaiting_eval is not None,
            begun_s=None,
            wanted=None,
            relink=None,
            lineage=began(state.run.lineage, plan.version, state.step),
        ),
        storing=replace(
            state.storing, parts=stores, owed=state.storing.owed or len(stores) < len(state.storing.parts)
        ),
    )


def fact_of(state: JobState, before: Plan, plan: Plan, event: PlanChange) -> Reconfigured:
    """Return what the journal keeps of a change: how the next plan differs."""
    reshared = _reshares(before, plan)
    return Reconfigured(
        state.job,
        plan.version,
        state.step,
        state.run.assigned,
        event.workers,
        tuple(sorted(event.sources)),
        event.reason,
        tuple(sorted(plan.absent)),
        plan.exchange if plan.exchange != before.exchange and not reshared else None,
        replace(plan, version=before.version) if reshared else None,
    )


def _reshares(before: Plan, after: Plan) -> bool:
    """Whether a plan goes on with fewer replicas, or with one more: shares and ranks are others then."""
    return len(before.replicas) != len(after.replicas)


def _renumbered(state: JobState, before: Plan, after: Plan) -> JobState:
    """Know a job's ranks by their numbers in a plan of fewer replicas, or of one more. Nobody can repeat the
    steps before, so the state as it is gets stored, by whoever does that now, unless it is."""
    ranks = after.ranks_in(before)

    def of(figures: Mapping[int, FigureT]) -> dict[int, FigureT]:
        return {new: figures[old] for new, old in enumerate(ranks) if old is not None and old in figures}

    stores = dict(state.storing.parts) if before.storers == after.storers else {}
    if state.step > state.checkpoint.step:
        stores.setdefault(state.step, {})
    return replace(
        state,
        run=replace(state.run, load_s=of(state.run.load_s), fetched_s=of(state.run.fetched_s)),
        storing=replace(state.storing, part_bytes=of(state.storing.part_bytes), parts=stores),
    )


def _of_peers(
    known: Mapping[int, KnownT], before: Plan, plan: Plan, of: Callable[[KnownT], KnownT]
) -> dict[int, KnownT]:
    """Return what is known ``of`` peers under a plan that goes on with them; who joins begins with a
    period."""
    stay = set(plan.present_replicas).intersection(before.present_replicas)
    return {number: of(each) for number, each in known.items() if number in stay}


def _begun_anew(own: OwnSteps) -> OwnSteps:
    """Return how far a peer is whose step in flight begins anew."""
    return OwnSteps(own.step, own.taken, figures=own.figures)


def _exchanges_alike(before: Plan, after: Plan) -> bool:
    """Whether the rounds of a period that is repeated are those of the plan that is."""
    return (before.absent, before.exchange) == (after.absent, after.exchange)
