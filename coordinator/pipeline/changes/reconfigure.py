"""Who takes over the place of a worker that is lost, and what it repeats: all others keep their stage. Pure.

A stage is a function of its state and its messages. The newest checkpoint has the state; the neighbours' send
logs have the messages since; the journal has the scale of each step and the codecs of each version. So
whoever comes repeats those steps, up to the one that was in flight. Neighbours that are lost at once repeat
them together, each from what the other one sends anew. Who has stood by for a lost rank is there already: it
takes the place as those do who stay. Where no stage is left that holds newer state, or no worker fits, those
replicas that are whole go on without the others (``whole_replicas``); without one the job goes back to its
checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.plan import Plan
from coordinator.membership.member import Phase as Membership
from coordinator.messages.facts import began
from coordinator.messages.jobs import Cause, JobState, Phase, PlanChange, anew, moved
from coordinator.pipeline import snapshots
from coordinator.pipeline.assigning import neighbours
from coordinator.pipeline.changes import whole_replicas
from coordinator.pipeline.changes.successors import Successors
from coordinator.pipeline.changes.whole_replicas import renumbered, reshares
from coordinator.pipeline.history import begun, logged_from, not_repeatable

if TYPE_CHECKING:
    from coordinator.membership.roster import Roster
    from coordinator.messages.facts import JobRecord


def choose(
    state: JobState,
    record: JobRecord,
    roster: Roster,
    lost: Collection[int],
    again: Collection[str] = (),
) -> PlanChange:
    """Return who takes over the ``lost`` ranks, which replicas go on without them, or that the job goes back
    to its checkpoint, as nobody can; ``again``: workers of lost ranks that may have theirs once more where no
    other fits.

    Ranks that were loading already begin anew, and so do those whose standby was still taking them: it holds
    no whole state in between.
    """
    plan = state.plan
    if plan is None or not begun(state):
        return anew(state, "not all stages were loaded")
    loading = {r for r in plan.present if state.run.moving and record.given(r) == state.run.assigned}
    loading |= state.run.promoted.keys() if state.run.moving else set()
    if plan.local:
        return _without(state, roster, lost, loading)
    ready = standing_by_for(state, roster, lost)
    newcomers = frozenset(lost).difference(ready) | (loading - state.run.loaded)
    several = len(plan.replicas) > 1
    if several and state.failures and loading.difference(ready).intersection(lost):
        left = whole_replicas.without(state, roster, newcomers.union(lost))
        if isinstance(left, Plan):
            return _only(state, roster, left, "a newcomer's stage does not load")
    chosen = _taken_over(state, record, roster, lost, newcomers, ready, again)
    if chosen.plan is not None or not several:
        return chosen
    left = whole_replicas.without(state, roster, newcomers.union(lost))
    if isinstance(left, str):
        return replace(chosen, reason=f"{chosen.reason}, and {left}")
    return _only(state, roster, left, chosen.reason)


def once_more(state: JobState, record: JobRecord, roster: Roster, rank: int) -> PlanChange:
    """Have a rank's own worker load its stage again and repeat the steps since the checkpoint, though the
    plan may not fit it; or return why it cannot."""
    plan = state.plan
    if plan is None or plan.local or not begun(state) or state.step == state.checkpoint.step:
        return anew(state, "")  # nothing is to be repeated
    loading = {r for r in plan.present if state.run.moving and record.given(r) == state.run.assigned}
    newcomers = frozenset({rank} | (loading - state.run.loaded))
    wrong = not_repeatable(state, record) or _unlogged(state, roster, newcomers, {})
    if wrong or not at_hand(roster, plan.places[rank].worker, state.job):
        return anew(state, wrong or f"stage {plan.places[rank].stage}'s worker is not at hand")
    steps = state.step - state.checkpoint.step
    words = f"it repeats {steps} steps, then the job is planned anew from step {state.step}"
    return moved(state, [place.worker for place in plan.places], newcomers, Cause.UNFIT, words)


def _only(state: JobState, roster: Roster, left: Plan, why: str) -> PlanChange:
    """Have the replicas that are whole go on without the others."""
    stay = {place.worker for place in left.places}
    freed = [place.worker for place in state.adopted.places if place.worker not in stay]
    count, before = len(left.replicas), len(state.adopted.replicas)
    who = f"{count} of {before} replicas go on" if count > 1 else f"one of {before} replicas goes on"
    words = f"{why}: {who}, without {', '.join(map(roster.label, freed))}"
    return PlanChange(replace(left, version=state.next_version), {}, Cause.LOST, words, instead=why)


def _taken_over(
    state: JobState,
    record: JobRecord,
    roster: Roster,
    lost: Collection[int],
    newcomers: frozenset[int],
    ready: Mapping[int, str],
    again: Collection[str],
) -> PlanChange:
    """Have other workers take over the ``lost`` ranks; ``newcomers``: who is given a stage, with those who
    were loading already, ``ready``: by rank who takes one as it is."""
    plan = state.adopted
    wrong = (newcomers and not_repeatable(state, record)) or _unlogged(state, roster, newcomers, ready)
    if wrong:
        return anew(state, wrong)
    spare = [s.worker for s in state.standbys.values() if at_hand(roster, s.worker)]
    missing = frozenset(lost).difference(ready)
    chosen = Successors(state, roster, missing, again, ready, spare).chosen()
    if isinstance(chosen, tuple):
        stages = [plan.places[rank].stage for rank in chosen]
        if len(stages) == 1:
            return anew(state, f"no idle worker can take over stage {stages[0]}", for_now=True)
        words = f"{', '.join(map(str, stages[:-1]))} and {stages[-1]}"
        return anew(state, f"too few idle workers can take over stages {words}", for_now=True)
    taken = {**ready, **chosen}
    workers = [taken.get(rank, place.worker) for rank, place in enumerate(plan.places)]
    return moved(state, workers, newcomers, Cause.LOST, _taken_words(state, roster, workers, newcomers, lost))


def _taken_words(
    state: JobState,
    roster: Roster,
    workers: Sequence[str],
    newcomers: Collection[int],
    lost: Collection[int],
) -> str:
    """Say who takes over which lost rank, and repeats how much."""
    steps = state.step - state.checkpoint.step
    repeating = f", repeating {steps} steps from step {state.checkpoint.step}" if steps else ""
    taken = [
        f"{roster.label(workers[rank])} takes over rank {rank}{repeating}"
        if rank in newcomers
        else f"{roster.label(workers[rank])} takes rank {rank}, for which it stood by"
        for rank in sorted(lost)
    ]
    return ", ".join(taken) or "all connect anew"


def _without(state: JobState, roster: Roster, lost: Collection[int], loading: Collection[int]) -> PlanChange:
    """Have the other peers go on: they keep the local steps that they have taken."""
    absent = state.adopted.absent | frozenset(lost)
    newcomers = frozenset(loading) - state.run.loaded - absent
    stay = frozenset(state.present) - absent - newcomers
    if not stay:
        return anew(state, "no peer is left that holds its state")
    workers = [place.worker for place in state.adopted.places]
    without = ", ".join(roster.label(workers[rank]) for rank in sorted(lost))
    words = f"the others go on without {without}" if without else "all connect anew"
    return moved(state, workers, newcomers, Cause.LOST, words, absent=absent)


def standing_by_for(state: JobState, roster: Roster, lost: Collection[int]) -> dict[int, str]:
    """Return by rank who has stood by for one that is ``lost``, or is to be left, and can take it as it is.

    Not where the model is to be stored after the last step: a standby has stored nothing.
    """
    found: dict[int, str] = {}
    if state.plan is None or state.step >= state.steps:
        return found
    for rank in lost:
        standby = state.standbys.get(rank)
        if standby is None or not at_hand(roster, standby.worker):
            continue
        others = neighbours(state.plan, rank)
        behind = standby.step < state.step
        if behind and others.intersection(lost):
            continue  # what it has not heard is lost
        if not any(logged_from(state, roster, other) > standby.step for other in others.difference(lost)):
            found[rank] = standby.worker
    return found


def at_hand(roster: Roster, worker: str, job: str = "") -> bool:
    """Whether a worker that has a part, of ``job`` where that is given, is connected, and may be used."""
    known = roster.workers.get(worker)
    if known is None or known.quarantined or known.guest.paused or known.session is None:
        return False
    return known.member.phase is Membership.ASSIGNED and job in ("", known.member.job)


def _unlogged(state: JobState, roster: Roster, newcomers: frozenset[int], ready: Mapping[int, str]) -> str:
    """Return whose messages since the checkpoint nobody has any more, "" where all are there; ``ready``: who
    takes a rank as it is."""
    if state.plan is None or state.step == state.checkpoint.step:
        return ""
    places = state.plan.places
    if len(newcomers) == len(places) > 1:
        return "all stages are lost at once"
    for rank in sorted(newcomers):
        for other in sorted(neighbours(state.plan, rank) - newcomers):
            logged = logged_from(state, roster, other, ready.get(other))
            if logged > state.checkpoint.step:
                return f"stage {places[other].stage} has its messages from step {logged} on only"
    return ""


def carried_over(state: JobState, change: PlanChange, before: Plan, plan: Plan, counts: bool) -> JobState:
    """Return the job's state under the next plan: everybody keeps what is committed, and the step in flight
    begins anew. ``counts``: as an interruption."""
    reshared = reshares(before, plan)
    if reshared:
        state = renumbered(state, before, plan)
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
