"""A worker's session with its coordinator as a pure machine: events in, instructions out.

Connection and work are separate: losing the coordinator changes nothing in what is computed;
what was said and may have been lost is kept and said again after the next welcome. Every event
of a job carries (job, version, step); what does not match the state is late or duplicate, which
is normal on the internet: it is ignored and counted. A commit may announce that the stages change
their links two steps on: from that step everything carries the new version, before it the old.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from worker.session.events import (
    Assigned,
    Committed,
    Discarded,
    Disconnected,
    Dismissed,
    Drained,
    EvalDone,
    Event,
    Invited,
    LeaveAsked,
    LinkAsked,
    OpsAsked,
    PeerLost,
    Probed,
    Released,
    Relink,
    StageBroke,
    StageLoaded,
    Started,
    StepApplied,
    StepDone,
    Stored,
    Welcomed,
)
from worker.session.federated import RULES as ROUNDS
from worker.session.federated import invited
from worker.session.instructions import (
    ApplyStep,
    ChangeLinks,
    DiscardStep,
    Evaluate,
    Failed,
    Interrupt,
    Leaving,
    LoadStage,
    Quit,
    Reconnect,
    Refused,
    RunStep,
    Say,
    TimeLink,
    TimeOps,
)
from worker.session.state import RECENT, Phase, Session, Step, drop, heard, ignore, keep

__all__ = ["TRANSITIONS", "Phase", "Session", "Step", "handle"]

BACKOFF_FIRST_S = 0.2
BACKOFF_MOST_S = 4.0
MAX_ERAS = 32  # versions remembered of one assignment: a snapshot may be stored long after its step


def handle(state: Session, event: Event) -> Step:
    """Return the next state and what the shell must do, in order.

    An event that the table does not know in this phase, or that is of another plan or step, is
    ignored and counted.
    """
    recent = (*state.recent, f"{state.phase}:{type(event).__name__}")[-RECENT:]
    state = replace(state, recent=recent)
    rule = TRANSITIONS.get((state.phase, type(event)))
    if rule is None or not _current(state, event):
        return ignore(state)
    return rule(state, event)


def _current(state: Session, event: Event) -> bool:
    """Whether an event that names a plan names ours, and a step the version it runs under;
    Assigned, Invited and probes are judged by their rule."""
    if isinstance(event, Assigned | Released | Invited):
        return True
    job: str | None = getattr(event, "job", None)
    version: int | None = getattr(event, "version", None)
    if job is None:
        return True
    if version is None:  # of a federated job: its rule looks at the round
        return job == state.job
    if isinstance(event, Discarded):
        return job == state.job and version in state.versions
    return job == state.job and version == state.version_at(getattr(event, "step", 0))


# ---------------------------------------------------------------- rules: connection


def _welcomed(state: Session, event: Welcomed) -> Step:
    phase = Phase.IDLE if state.phase is Phase.CONNECTING else state.phase
    state = replace(state, phase=phase, worker=event.worker, connected=True, attempts=0)
    return state, tuple(Say(message) for _, message in state.kept)


def _disconnected(state: Session, event: Disconnected) -> Step:
    after = min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2.0 ** min(state.attempts, 16))
    state = replace(state, connected=False, attempts=state.attempts + 1)
    return state, (Reconnect(after * (0.5 + 0.5 * event.jitter), event.reason),)


def _leave(state: Session, event: LeaveAsked) -> Step:
    return replace(state, phase=Phase.DRAINING, kept=()), (
        *drop(state, event.reason),
        Say(Leaving(event.reason)),
        Quit(event.reason, dismissed=False),
    )


def _dismissed(state: Session, event: Dismissed) -> Step:
    state_after = replace(state, phase=Phase.DRAINING, kept=())
    return state_after, (
        *drop(state, event.reason),
        Quit(event.reason, dismissed=True, for_good=event.for_good),
    )


def _drained(state: Session, event: Drained) -> Step:
    return replace(state, phase=Phase.GONE), ()


# ---------------------------------------------------------------- rules: a job


def _assigned(state: Session, event: Assigned) -> Step:
    if event.job == state.job and event.version <= state.version:
        return ignore(state)
    # A newer plan, or another job, replaces what we hold: the coordinator alone decides.
    dropped = drop(state, f"replaced by {event.job} version {event.version}")
    state = replace(
        state,
        phase=Phase.LOADING,
        job=event.job,
        eras=((0, event.version),),
        peers=event.peers,
        step=0,
        commit=None,
        spoiled=False,
        kept=(),
    )
    return state, (*dropped, LoadStage(event.job, event.version, event.work))


def _released(state: Session, event: Released) -> Step:
    # A release of a version that we never heard of (its Assign was lost) still ends the older one.
    if event.job != state.job or event.version < state.versions[0]:
        return ignore(state)
    dropped = drop(state, event.reason)
    cleared = replace(state, phase=Phase.IDLE, job="", eras=(), peers=frozenset(), commit=None, kept=())
    return cleared, dropped


def _loaded(state: Session, event: StageLoaded) -> Step:
    state = keep(replace(state, phase=Phase.READY), "loaded", event.message)
    return state, (Say(event.message),)


def _started(state: Session, event: Started) -> Step:
    state = heard(replace(state, phase=Phase.TRAINING, step=event.step), "loaded", "failed")
    return state, (RunStep(state.job, state.version, event.step),)


def _done(state: Session, event: StepDone) -> Step:
    if event.step != state.step:
        return ignore(state)
    state = keep(replace(state, phase=Phase.WAITING), "ready", event.message)
    return state, (Say(event.message),)


def _committed(state: Session, event: Committed) -> Step:
    if event.step != state.step:
        return ignore(state)
    state = heard(replace(state, phase=Phase.APPLYING, commit=event), "ready")
    apply = ApplyStep(state.job, state.version, event.step, event.gradient_scale, event.store)
    relink = event.relink
    if relink is None:
        return state, (apply,)
    if relink.version <= state.versions[-1] or relink.first_step < event.step + 2:
        reason = f"links of version {relink.version} from step {relink.first_step} with commit {event.step}"
        return _broke(state, StageBroke(state.job, state.version, event.step, f"{reason} come too late"))
    change = ChangeLinks(state.job, state.version, event.step, relink)
    return _with_era(state, relink), (change, apply)


def _with_era(state: Session, relink: Relink) -> Session:
    """What was announced for that step or later before, and has not begun, no longer holds."""
    first, *later = (era for era in state.eras if era[0] < relink.first_step)
    kept = later[-MAX_ERAS:]
    return replace(state, eras=(first, *kept, (relink.first_step, relink.version)))


def _applied(state: Session, event: StepApplied) -> Step:
    if event.step != state.step or state.commit is None:
        return ignore(state)
    if state.commit.evaluate:
        evaluate = Evaluate(state.job, state.version, event.step, state.commit.evaluate_coded)
        return replace(state, phase=Phase.EVALUATING), (evaluate,)
    return _next(state)


def _evaluated(state: Session, event: EvalDone) -> Step:
    if event.step != state.step:
        return ignore(state)
    state, todo = _next(keep(state, "evaluated", event.message))
    return state, (Say(event.message), *todo)


def _next(state: Session) -> Step:
    last = state.commit is not None and state.commit.last
    state = replace(state, step=state.step + 1, commit=None)
    if last:
        return replace(state, phase=Phase.READY), ()
    return replace(state, phase=Phase.TRAINING), (RunStep(state.job, state.version, state.step),)


def _discarded(state: Session, event: Discarded) -> Step:
    """Back to ready; a step that runs again is started again, under a new plan version where
    neighbours may have messages of the first attempt under way."""
    if event.step != state.step or state.spoiled:
        return ignore(state)
    state = heard(state, "ready", "failed")
    discard = DiscardStep(state.job, state.version, event.step, event.reason)
    return replace(state, phase=Phase.READY), (discard,)


def _stored(state: Session, event: Stored) -> Step:
    return keep(state, "stored", event.message), (Say(event.message),)


def _broke(state: Session, event: StageBroke) -> Step:
    failed = Failed(event.job, event.version, event.step, event.reason, event.lost_peer)
    spoiled = state.spoiled or state.phase not in (Phase.TRAINING, Phase.WAITING)
    state = keep(replace(state, phase=Phase.FAILED, spoiled=spoiled), "failed", failed)
    return state, (Say(failed),)


def _peer_lost(state: Session, event: PeerLost) -> Step:
    if event.peer not in state.peers:
        return ignore(state)
    reason = f"lost {event.peer}: {event.reason}"
    state, said = _broke(state, StageBroke(state.job, state.version, state.step, reason, event.peer))
    return state, (Interrupt(reason), *said)


# ---------------------------------------------------------------- rules: probes


def _probed(state: Session, event: Probed) -> Step:
    return state, (Say(event.message),)


def _time_ops(state: Session, event: OpsAsked) -> Step:
    return state, (TimeOps(event.request, event.ops),)


def _refuse_ops(state: Session, event: OpsAsked) -> Step:
    return state, (Say(Refused(event.request, "", f"busy: {state.phase}")),)


def _time_link(state: Session, event: LinkAsked) -> Step:
    return state, (TimeLink(event.request, event.peer, event.target),)


def _refuse_link(state: Session, event: LinkAsked) -> Step:
    return state, (Say(Refused(event.request, event.peer, f"busy: {state.phase}")),)


# ---------------------------------------------------------------- the table

Rule = Callable[[Session, Any], Step]
_LIVE = tuple(p for p in Phase if p not in (Phase.DRAINING, Phase.GONE))
_WELCOMED = tuple(p for p in _LIVE if p is not Phase.CONNECTING)
_HOLDING = tuple(p for p in _WELCOMED if p is not Phase.IDLE)
_QUIET = (Phase.IDLE,)  # probing never disturbs training

TRANSITIONS: dict[tuple[Phase, type], Rule] = {
    **{(p, Welcomed): _welcomed for p in _LIVE},
    **{(p, Disconnected): _disconnected for p in _LIVE},
    **{(p, LeaveAsked): _leave for p in _LIVE},
    **{(p, Dismissed): _dismissed for p in _LIVE},
    (Phase.DRAINING, Drained): _drained,
    **{(p, Assigned): _assigned for p in _WELCOMED},
    **{(p, Released): _released for p in _HOLDING},
    **{(p, Invited): invited for p in _WELCOMED},
    **ROUNDS,
    (Phase.LOADING, StageLoaded): _loaded,
    (Phase.READY, Started): _started,
    (Phase.TRAINING, StepDone): _done,
    (Phase.WAITING, Committed): _committed,
    (Phase.APPLYING, StepApplied): _applied,
    (Phase.EVALUATING, EvalDone): _evaluated,
    **{(p, Discarded): _discarded for p in (Phase.TRAINING, Phase.WAITING, Phase.FAILED)},
    **{(p, Stored): _stored for p in _HOLDING},
    **{
        (p, StageBroke): _broke
        for p in (Phase.LOADING, Phase.READY, Phase.TRAINING, Phase.APPLYING, Phase.EVALUATING)
    },
    **{(p, PeerLost): _peer_lost for p in (Phase.TRAINING, Phase.EVALUATING)},
    **{(p, Probed): _probed for p in _WELCOMED},
    **{(p, OpsAsked): (_time_ops if p in _QUIET else _refuse_ops) for p in _WELCOMED},
    **{(p, LinkAsked): (_time_link if p in _QUIET else _refuse_link) for p in _WELCOMED},
}
