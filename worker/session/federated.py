"""The session's rules of a federated job: join, train rounds, evaluate, hear what became of an update.

The coordinator alone closes rounds, so a later order replaces the one under way, and word that a round
is closed ends its training at once. An answer is kept, by round, until the coordinator shows that it
knows: asked again for the same round, as after a reconnection, the session gives the same answer
without training twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from worker.session.events import (
    EvaluationAsked,
    Invited,
    Joined,
    ModelTested,
    RoundSettled,
    TrainAsked,
    TurnBroke,
    UpdateStored,
)
from worker.session.instructions import (
    EvaluateLocally,
    Instruction,
    Interrupt,
    JoinFederation,
    Say,
    SettleRound,
    StillHeld,
    TrainLocally,
    TurnFailed,
)
from worker.session.state import Phase, Session, Step, drop, heard, ignore, keep

LOADED, FAILED, UPDATE, TESTED = "loaded", "failed", "update", "tested"
MEMBERS = (Phase.TAKING_PART, Phase.LEARNING, Phase.TESTING)


def invited(state: Session, event: Invited) -> Step:
    """Join, unless this very participation is held already; whatever else is held goes."""
    if event.job == state.job:
        if event.version < state.version or (event.version == state.version and state.phase is Phase.JOINING):
            return ignore(state)
        if event.version == state.version and state.phase in MEMBERS:
            return state, (Say(StillHeld(event.job, event.version)),)
    dropped = drop(state, f"replaced by {event.job} version {event.version}")
    state = replace(
        state,
        phase=Phase.JOINING,
        job=event.job,
        eras=((0, event.version),),
        peers=frozenset(),
        step=0,
        commit=None,
        spoiled=False,
        kept=(),
    )
    return state, (*dropped, JoinFederation(event.job, event.version, event.work))


def _joined(state: Session, event: Joined) -> Step:
    state = keep(replace(state, phase=Phase.TAKING_PART), LOADED, event.message)
    return state, (Say(event.message),)


def _train(state: Session, event: TrainAsked) -> Step:
    answer = _answer(state, UPDATE, event.round)
    if answer is not None:
        return state, (Say(answer),)
    if event.round < state.step or (event.round == state.step and state.phase is Phase.LEARNING):
        return ignore(state)
    stopped = _stopped(state, f"round {event.round} begins")
    state = replace(_silenced(state, event.round), phase=Phase.LEARNING, step=event.round)
    return state, (*stopped, TrainLocally(event.job, event.round, event.order))


def _evaluate(state: Session, event: EvaluationAsked) -> Step:
    answer = _answer(state, TESTED, event.round)
    if answer is not None and state.phase is not Phase.LEARNING:
        return state, (Say(answer),)
    # The model after a round is made when that round is closed: training of it, or later, is not over.
    behind = event.round <= state.step if state.phase is Phase.LEARNING else event.round < state.step
    if behind or (event.round == state.step and state.phase is Phase.TESTING):
        return ignore(state)
    stopped = _stopped(state, f"round {state.step} is closed")
    state = replace(_silenced(state, event.round), phase=Phase.TESTING, step=event.round)
    return state, (*stopped, EvaluateLocally(event.job, event.round, event.order))


def _settled(state: Session, event: RoundSettled) -> Step:
    state = heard(state, f"{UPDATE} {event.round}")
    settle = SettleRound(event.job, event.round, event.taken)
    if state.phase is Phase.LEARNING and event.round == state.step:
        reason = f"round {event.round} was closed: {event.reason}"
        return replace(state, phase=Phase.TAKING_PART), (Interrupt(reason), settle)
    return state, (settle,)


def _stored(state: Session, event: UpdateStored) -> Step:
    if event.round != state.step:
        return ignore(state)
    state = keep(replace(state, phase=Phase.TAKING_PART), f"{UPDATE} {event.round}", event.message)
    return state, (Say(event.message),)


def _tested(state: Session, event: ModelTested) -> Step:
    if event.round != state.step:
        return ignore(state)
    state = keep(replace(state, phase=Phase.TAKING_PART), f"{TESTED} {event.round}", event.message)
    return state, (Say(event.message),)


def _broke(state: Session, event: TurnBroke) -> Step:
    if event.round != state.step:
        return ignore(state)
    loading = state.phase is Phase.JOINING
    said = TurnFailed(event.job, event.round, event.reason, event.during)
    state = keep(replace(state, phase=Phase.FAILED if loading else Phase.TAKING_PART), FAILED, said)
    return state, (Say(said),)


def _answer(state: Session, kind: str, at_round: int) -> Any:
    return dict(state.kept).get(f"{kind} {at_round}")


def _silenced(state: Session, at_round: int) -> Session:
    """What an order for ``at_round`` shows to have arrived, or to be of no use any more. An update stays
    until the coordinator says what became of it, or a later round replaces it."""
    kept = tuple(entry for entry in state.kept if entry[0].startswith(f"{UPDATE} "))
    latest = kept[-1:] if kept and int(kept[-1][0].split()[1]) >= at_round - 1 else ()
    return replace(state, kept=latest)


def _stopped(state: Session, reason: str) -> tuple[Instruction, ...]:
    return (Interrupt(reason),) if state.phase in (Phase.LEARNING, Phase.TESTING) else ()


Rule = Callable[[Session, Any], Step]
RULES: dict[tuple[Phase, type], Rule] = {
    **{(p, TrainAsked): _train for p in MEMBERS},
    **{(p, EvaluationAsked): _evaluate for p in MEMBERS},
    **{(p, RoundSettled): _settled for p in MEMBERS},
    (Phase.JOINING, Joined): _joined,
    (Phase.LEARNING, UpdateStored): _stored,
    (Phase.TESTING, ModelTested): _tested,
    **{(p, TurnBroke): _broke for p in (Phase.JOINING, Phase.LEARNING, Phase.TESTING)},
}
"""All but ``invited``, which any welcomed session hears."""
