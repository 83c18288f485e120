"""A session's transitions of a federated job: join, train rounds, evaluate, learn what became of an update.

The coordinator alone closes rounds, so a later order replaces the one under way, and word that a round
is closed ends its training at once. An answer is kept, by round, until the coordinator shows that it
knows: asked again for the same round, as after a reconnection, the session gives the same answer
without training twice.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.secure import Stage
from atoll.transitions import Transitions
from worker.session import events as ev
from worker.session import instructions as do
from worker.session.state import WELCOMED, Kind, Phase, Session, Step, acknowledged, clear, drop, ignore, send

TRANSITIONS: Transitions[Session, [], Step] = Transitions(Phase, ev.Event)
MEMBERS = (Phase.ENROLLED, Phase.TRAINING_ROUND, Phase.EVALUATING_ROUND)


@TRANSITIONS.on(*WELCOMED)
def _invited(state: Session, event: ev.Participate) -> Step:
    """Join the job, unless it is held already; any other job that is held is dropped."""
    if event.job == state.job:
        if event.version < state.version or (event.version == state.version and state.phase is Phase.JOINING):
            return ignore(state)
        if event.version == state.version and state.phase in MEMBERS:
            return state, (do.Send(state.joined),) if state.joined else ()
    dropped = drop(state, f"replaced by {event.job} version {event.version}")
    eras = ((0, event.version),)
    joining = clear(
        state, Phase.JOINING, job=event.job, assigned=event.version, eras=eras, step=0, whole=False
    )
    return joining, (*dropped, event)


@TRANSITIONS.on(Phase.JOINING)
def _joined(state: Session, event: ev.Loaded) -> Step:
    return send(replace(state, phase=Phase.ENROLLED, joined=event), Kind.LOADED, event)


@TRANSITIONS.on(*MEMBERS)
def _train(state: Session, event: ev.TrainRound) -> Step:
    answer = _answer(state, Kind.UPDATE, event.round, event.order)
    if answer:
        return state, answer
    training = state.phase is Phase.TRAINING_ROUND and event.order == state.key
    if event.round < state.step or (event.round == state.step and training):
        return ignore(state)
    stopped = _stopped(state, f"round {event.round} begins")
    state = replace(
        _silenced(state, event.round), phase=Phase.TRAINING_ROUND, step=event.round, key=event.order
    )
    return state, (*stopped, event)


@TRANSITIONS.on(*MEMBERS)
def _secure(state: Session, event: ev.SecureOrder) -> Step:
    """Pass on what a member of a secure round is asked for. New keys are for a new attempt: what is trained
    for the one before is of no use."""
    if (
        event.stage is not Stage.KEYS
        or state.phase is not Phase.TRAINING_ROUND
        or state.key == event.exchange
    ):
        return state, (event,)
    stopped = _stopped(state, f"round {event.round} starts again")
    return replace(state, phase=Phase.ENROLLED), (*stopped, event)


@TRANSITIONS.on(*MEMBERS)
def _secured(state: Session, event: ev.SecureAnswer) -> Step:
    return state, (do.Send(event),)


@TRANSITIONS.on(*MEMBERS)
def _evaluate(state: Session, event: ev.EvaluateRound) -> Step:
    answer = _answer(state, Kind.ROUND_EVALUATED, event.round)
    training = state.phase is Phase.TRAINING_ROUND
    if answer and not training:
        return state, answer
    # The model after a round is made when that round is closed: training of it, or later, is not over.
    behind = event.round <= state.step if training else event.round < state.step
    if behind or (event.round == state.step and state.phase is Phase.EVALUATING_ROUND):
        return ignore(state)
    stopped = _stopped(state, f"round {state.step} is closed")
    state = replace(_silenced(state, event.round), phase=Phase.EVALUATING_ROUND, step=event.round)
    return state, (*stopped, event)


@TRANSITIONS.on(*MEMBERS)
def _settled(state: Session, event: ev.RoundTaken) -> Step:
    state = acknowledged(state, Kind.UPDATE, round=event.round, key=event.order)
    under_way = event.round == state.step and event.order in ("", state.key)
    if state.phase is Phase.TRAINING_ROUND and under_way:
        reason = f"round {event.round} was closed: {event.reason}"
        return replace(state, phase=Phase.ENROLLED), (do.Interrupt(reason), event)
    return state, (event,)


@TRANSITIONS.on(Phase.TRAINING_ROUND)
def _stored(state: Session, event: ev.UpdateReady) -> Step:
    if (event.round, event.order) != (state.step, state.key):
        return ignore(state)
    return send(replace(state, phase=Phase.ENROLLED), Kind.UPDATE, event, event.round, event.order)


@TRANSITIONS.on(Phase.EVALUATING_ROUND)
def _evaluated(state: Session, event: ev.ClientEvaluated) -> Step:
    if event.round != state.step:
        return ignore(state)
    return send(replace(state, phase=Phase.ENROLLED), Kind.ROUND_EVALUATED, event, event.round)


@TRANSITIONS.on(Phase.JOINING, Phase.TRAINING_ROUND, Phase.EVALUATING_ROUND)
def _broke(state: Session, event: ev.ClientFailed) -> Step:
    if event.round != state.step:
        return ignore(state)
    loading = state.phase is Phase.JOINING
    return send(replace(state, phase=Phase.FAILED if loading else Phase.ENROLLED), Kind.FAILED, event)


def _answer(state: Session, kind: Kind, at_round: int, key: str = "") -> tuple[do.Send, ...]:
    """The answer that was given for this round and these clients, to be sent again."""
    kept = (k for k in state.unacknowledged if (k.kind, k.round, k.key) == (kind, at_round, key))
    return tuple(do.Send(k.message) for k in kept)


def _silenced(state: Session, at_round: int) -> Session:
    """Forget what an order for ``at_round`` shows to have arrived, or to be of no use any more. An update
    stays until the coordinator reports its outcome, or a later round replaces it."""
    updates = [k for k in state.unacknowledged if k.kind is Kind.UPDATE]
    latest = tuple(k for k in updates[-1:] if k.round is not None and k.round >= at_round - 1)
    return replace(state, unacknowledged=latest)


def _stopped(state: Session, reason: str) -> tuple[do.Instruction, ...]:
    at_work = state.phase in (Phase.TRAINING_ROUND, Phase.EVALUATING_ROUND)
    return (do.Interrupt(reason),) if at_work else ()
