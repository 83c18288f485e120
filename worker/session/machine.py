"""A worker's session with its coordinator as a pure machine: events in, instructions out.

Connection and work are separate: losing the coordinator changes nothing in what is computed;
a message that may have been lost is kept and sent again after the next welcome. Every event
of a job carries (job, version, step); what does not match the state is late or duplicate, which
is normal on the internet: it is ignored and counted. A commit may announce that the stages change
their links two steps on: from that step everything carries the new version, before it the old. Where the plan
is reconfigured the stage stays, and the step in flight begins anew under the new version.
A peer that takes steps of its own does those of a period in one order, which is named by its last step. One
of several stages has each of them committed, and then does the period's round under that name.
A hot standby loads a stage in the same way and repeats each step when it hears its commit, until it takes the
rank.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.backoff import doubled_s
from atoll.transitions import Transitions
from worker.session import events as ev
from worker.session import federated
from worker.session import instructions as do
from worker.session.state import (
    LIVE,
    RECENT,
    STAGED,
    WELCOMED,
    Kind,
    Phase,
    Session,
    Step,
    acknowledged,
    clear,
    drop,
    ignore,
    send,
)

__all__ = ["TRANSITIONS", "Phase", "Session", "Step", "handle"]

BACKOFF_FIRST_S = 0.2
BACKOFF_MOST_S = 4.0
BACKOFF_STAGED_S = 1.0  # the same of the few that hold a stage: a step waits for the last of them
MAX_ERAS = 32  # versions remembered of one assignment: a snapshot may be stored long after its step
HOLDING = WELCOMED - {Phase.IDLE}
ORDERS = (
    ev.Assign, ev.Reconfigure, ev.StepStart, ev.StepCommit, ev.StepDiscard, ev.Release, ev.ProbeOps,
    ev.ProbeLink, ev.Participate, ev.TrainRound, ev.EvaluateRound, ev.RoundTaken, ev.SecureOrder,
)  # fmt: skip
"""What a coordinator says on its stream. A dismissal is none: it is ours, too, when we are refused."""

TRANSITIONS: Transitions[Session, [], Step] = Transitions(Phase, ev.Event)
TRANSITIONS.include(federated.TRANSITIONS)


def handle(state: Session, event: ev.Event) -> Step:
    """Return the next state and what the shell must do, in order.

    An event that the table does not know in this phase, or that is of another plan or step, is
    ignored and counted.
    """
    recent = (*state.recent, f"{state.phase}:{type(event).__name__}")[-RECENT:]
    state = replace(state, recent=recent)
    transition = TRANSITIONS.get((state.phase, type(event)))
    if transition is None or not _current(state, event) or (state.outdated and isinstance(event, ORDERS)):
        return ignore(state)
    if isinstance(event, ev.Welcome) and _of_smaller_term(state, event):
        reason = (
            f"a coordinator of term {event.term} answers, and one of term {state.term} commands; where its "
            "state was restored from a backup, start this worker again"
        )
        return replace(state, outdated=True), (do.HangUp(reason),)
    return transition(state, event)


def _of_smaller_term(state: Session, welcome: ev.Welcome) -> bool:
    return welcome.term < state.term


def _current(state: Session, event: ev.Event) -> bool:
    """True unless an event names another plan than ours, or a step another version than it runs under;
    Assign, Reconfigure, Participate and probes are judged by their handler."""
    if isinstance(event, ev.Assign | ev.Reconfigure | ev.Release | ev.Participate):
        return True
    job: str | None = getattr(event, "job", None)
    version: int | None = getattr(event, "version", None)
    if job is None:
        return True
    if version is None:  # of a federated job: its handler looks at the round
        return job == state.job
    if isinstance(event, ev.StepDiscard):
        return job == state.job and version in state.versions
    loading = state.phase is Phase.LOADING and isinstance(event, ev.StageFailed)
    if loading and not state.whole and version in state.versions:  # of a step that is repeated
        return job == state.job
    if loading or isinstance(event, ev.Loaded):
        return job == state.job and version == state.assigned
    return job == state.job and version == state.version_at(getattr(event, "step", 0))


# ---------------------------------------------------------------- connection


@TRANSITIONS.on(*LIVE)
def _welcomed(state: Session, event: ev.Welcome) -> Step:
    phase = Phase.IDLE if state.phase is Phase.CONNECTING else state.phase
    state = replace(
        state,
        phase=phase,
        worker=event.worker,
        connected=True,
        attempts=0,
        term=event.term,
        outdated=False,
    )
    return state, tuple(do.Send(kept.message) for kept in state.unacknowledged)


@TRANSITIONS.on(*LIVE)
def _disconnected(state: Session, event: ev.Disconnected) -> Step:
    most_s = BACKOFF_STAGED_S if state.phase in STAGED else BACKOFF_MOST_S
    state = replace(state, connected=False, attempts=state.attempts + 1)
    after = doubled_s(BACKOFF_FIRST_S, state.attempts, most_s)
    return state, (do.Reconnect(after * (0.5 + 0.5 * event.jitter), event.reason),)


@TRANSITIONS.on(*LIVE)
def _leave(state: Session, event: ev.LeaveAsked) -> Step:
    return replace(state, phase=Phase.DRAINING, unacknowledged=()), (
        *drop(state, event.reason),
        do.Send(do.Leaving(event.reason)),
        do.Quit(event.reason, dismissed=False),
    )


@TRANSITIONS.on(*LIVE)
def _dismissed(state: Session, event: ev.Dismiss) -> Step:
    state_after = replace(state, phase=Phase.DRAINING, unacknowledged=())
    return state_after, (
        *drop(state, event.reason),
        do.Quit(event.reason, dismissed=True, for_good=event.for_good),
    )


@TRANSITIONS.on(*LIVE - {Phase.PAUSED})
def _pause(state: Session, event: ev.PauseAsked) -> Step:
    """Leave the job and free the machine; the session goes on."""
    return clear(state, Phase.PAUSED), (*drop(state, event.reason), do.Suspend(event.reason))


@TRANSITIONS.on(Phase.PAUSED)
def _resume(state: Session, event: ev.ResumeAsked) -> Step:
    # What is welcomed only later becomes idle then.
    phase = Phase.IDLE if state.worker else Phase.CONNECTING
    return replace(state, phase=phase), (do.Wake(),)


@TRANSITIONS.on(Phase.DRAINING)
def _drained(state: Session, event: ev.Drained) -> Step:
    return replace(state, phase=Phase.GONE), ()


# ---------------------------------------------------------------- a job


@TRANSITIONS.on(*WELCOMED)
def _assigned(state: Session, event: ev.Assign) -> Step:
    if event.job == state.job and event.version <= state.version:
        return ignore(state)
    # A newer plan, or another job, replaces what we hold: the coordinator alone decides.
    dropped = drop(state, f"replaced by {event.job} version {event.version}")
    eras = event.eras
    if not (event.standby and eras and eras[-1][1] >= event.version):  # else up to the newest announced one
        eras = (*eras, (event.first_step if eras else 0, event.version))
    state = clear(
        state,
        Phase.LOADING,
        job=event.job,
        assigned=event.version,
        eras=eras,
        peers=_names(event),
        step=event.first_step + event.joining,
        exchange=event.local,
        steps=event.steps,
        piped=event.piped,
        joining=event.joining,
        standby=event.standby,
        repeated=0,
        whole=False,
    )
    return state, (*dropped, event)


def _names(event: ev.Assign | ev.Reconfigure) -> frozenset[str]:
    return frozenset(peer.link.worker for peer in event.peers)


@TRANSITIONS.on(*HOLDING)
def _released(state: Session, event: ev.Release) -> Step:
    # A release of a version that we do not know (its Assign was lost) still ends the older one.
    if event.job != state.job or event.version < state.assigned:
        return ignore(state)
    return clear(state, Phase.IDLE), drop(state, event.reason)


@TRANSITIONS.on(Phase.LOADING)
def _loaded(state: Session, event: ev.Loaded) -> Step:
    phase = Phase.STANDING_BY if state.standby else Phase.READY
    return send(replace(state, phase=phase, whole=True), Kind.LOADED, event)


@TRANSITIONS.on(Phase.READY)
def _started(state: Session, event: ev.StepStart) -> Step:
    """Run the step that is next here: a word that is repeated later names one that is over."""
    if event.step != state.due:
        return ignore(state)
    return _run(acknowledged(state, Kind.LOADED, Kind.FAILED))


def _run(state: Session) -> Step:
    """Begin what is due."""
    run = do.RunRound if state.joining else do.RunStep
    order = run(state.job, state.version_at(state.due), state.due)
    return replace(state, phase=Phase.TRAINING), (order,)


@TRANSITIONS.on(Phase.TRAINING)
def _done(state: Session, event: ev.StepReady) -> Step:
    if event.step != state.due:
        return ignore(state)
    return send(replace(state, phase=Phase.WAITING), Kind.READY, event)


@TRANSITIONS.on(Phase.WAITING)
def _committed(state: Session, event: ev.StepCommit) -> Step:
    if event.step != state.due or _of_other_kind(state, event):
        return ignore(state)
    state = acknowledged(replace(state, phase=Phase.APPLYING, commit=event), Kind.READY)
    return _relinked(state, event, event)


def _of_other_kind(state: Session, commit: ev.StepCommit) -> bool:
    """Whether a commit is of a peer's last step while its round is due, which has the same number, or the
    other way about."""
    return state.piped and commit.own == state.joining


def _relinked(state: Session, event: ev.StepCommit, apply: do.Instruction) -> Step:
    """Carry a commit out; where it says so, the links change in front of that."""
    relink = event.relink
    if relink is None:
        return state, (apply,)
    if relink.version <= state.versions[-1] or relink.first_step < event.step + 2:
        reason = f"links of version {relink.version} from step {relink.first_step} with commit {event.step}"
        return _broke(state, ev.StageFailed(state.job, event.version, event.step, f"{reason} come too late"))
    return _with_era(state, relink.first_step, relink.version), (apply,)


def _with_era(state: Session, first_step: int, version: int) -> Session:
    """Drop what was announced for that step or later before, and has not begun."""
    kept = tuple(era for era in state.eras if era[0] < first_step)[-MAX_ERAS:]
    return replace(state, eras=(*kept, (first_step, version)))


@TRANSITIONS.on(Phase.APPLYING)
def _applied(state: Session, event: ev.StepApplied) -> Step:
    if event.step != state.due or state.commit is None:
        return ignore(state)
    if state.commit.evaluate and state.pending is None:
        return replace(state, phase=Phase.EVALUATING), (do.Evaluate(state.commit),)
    return _next(state)


@TRANSITIONS.on(Phase.EVALUATING)
def _evaluated(state: Session, event: ev.EvalReady) -> Step:
    if event.step != state.due:
        return ignore(state)
    state, sent = send(state, Kind.EVALUATED, event)
    state, todo = _next(state)
    return state, (*sent, *todo)


def _next(state: Session) -> Step:
    last, pending = state.commit is not None and state.commit.last, state.pending
    step, joining = _after(state)
    state = replace(state, step=step + joining, joining=joining, commit=None, pending=None)
    if pending is not None:
        return _reconfigure(state, pending)
    if last:
        return replace(state, phase=Phase.READY), ()
    return _run(state)


def _after(state: Session) -> tuple[int, bool]:
    """Return what is due once the commit that is being carried out is, and whether that is a round."""
    commit, due = state.commit, state.due
    if commit is None or state.exchange is None:
        return due + 1, False
    last = state.exchange.last_step(due, state.steps)
    joining = commit.own and (due == last or bool(commit.shares))
    return (last if joining else due + 1), joining


@TRANSITIONS.on(Phase.TRAINING, Phase.WAITING, Phase.FAILED)
def _discarded(state: Session, event: ev.StepDiscard) -> Step:
    """Back to ready; a step that runs again is started again, under a new plan version where
    neighbours may have messages of the first attempt under way."""
    if event.step != state.due or not state.whole:
        return ignore(state)
    state = acknowledged(state, Kind.READY, Kind.FAILED)
    return replace(state, phase=Phase.READY), (event,)


# ---------------------------------------------------------------- beside the plan


@TRANSITIONS.on(Phase.LOADING, Phase.STANDING_BY)
def _repeat(state: Session, event: ev.StepCommit) -> Step:
    """Repeat a committed step; while the stage is being loaded, after that."""
    if not state.standby or event.step != state.due or _of_other_kind(state, event):
        return ignore(state)
    step, joining = _after(replace(state, commit=event))
    state = replace(acknowledged(state, Kind.LOADED), step=step + joining, joining=joining)
    return _relinked(state, event, do.RepeatStep(event))


@TRANSITIONS.on(Phase.LOADING, Phase.STANDING_BY)
def _has_repeated(state: Session, event: ev.StepApplied) -> Step:
    return replace(state, repeated=max(state.repeated, event.step + 1)), ()


# ---------------------------------------------------------------- other workers for some stages of the plan


@TRANSITIONS.on(*WELCOMED)
def _reconfigured(state: Session, event: ev.Reconfigure) -> Step:
    """Keep the stage, and begin the step in flight anew with other neighbours."""
    if event.job == state.job and event.version <= max(state.assigned, _version(state.pending)):
        return ignore(state)
    why = _misfit(state, event)
    if why:
        failed = do.StageFailed(event.job, event.version, event.step, why, memory_bytes=_killed_bytes(state))
        if event.job != state.job:
            return state, (do.Send(failed),)
        state, sent = send(replace(state, phase=Phase.FAILED, whole=False, pending=None), Kind.FAILED, failed)
        return state, (do.Interrupt(why), *sent)
    if state.standby:
        return _follow(state, event)
    if state.phase is Phase.APPLYING:
        return replace(state, pending=event), ()
    if state.phase is not Phase.EVALUATING:
        return _reconfigure(state, event)
    # Who is lost may be waited for here; the coordinator has dropped this evaluation.
    over = replace(state, step=state.due + 1, joining=False, commit=None)
    state, todo = _reconfigure(over, event)
    return state, (do.Interrupt("the plan is reconfigured"), *todo)


def _killed_bytes(state: Session) -> int:
    """Return at how many bytes the stage was ended for want of memory, as was reported of the plan before; 0
    where it was not."""
    said = [kept.message for kept in state.unacknowledged if isinstance(kept.message, do.StageFailed)]
    return max((failed.memory_bytes for failed in said if failed.job == state.job), default=0)


def _version(event: ev.Reconfigure | None) -> int:
    return event.version if event is not None else 0


def _misfit(state: Session, event: ev.Reconfigure) -> str:
    """Return why the stage that is held cannot go on under the new version, "" when it can."""
    if event.job != state.job or state.phase not in STAGED:
        return "holds no stage of this job"
    if not state.whole and not (state.standby and state.phase is Phase.LOADING):
        return f"its stage is not whole ({state.phase})"
    if state.assigned < event.base:
        return f"its stage is of plan {state.assigned}, which is older than plan {event.base}"
    over = state.phase in (Phase.APPLYING, Phase.EVALUATING)
    due, joining = _after(state) if over else (state.due if state.piped else state.step, state.joining)
    if (event.step, event.joining) != (due, joining):
        return f"its stage is after {state.step} steps, not {event.step}"
    return ""


def _follow(state: Session, event: ev.Reconfigure) -> Step:
    """Take the rank that one stands by for, or go on standing by for it among other neighbours."""
    state = acknowledged(_with_era(state, event.step, event.version), Kind.LOADED)
    state = replace(state, assigned=event.version, peers=_names(event), standby=event.standby)
    if not event.standby:
        state = replace(state, phase=Phase.LOADING, whole=False)
    return state, (do.Reconfigure(event, repeating=True),)


def _reconfigure(state: Session, event: ev.Reconfigure) -> Step:
    state = acknowledged(state, Kind.LOADED, Kind.READY, Kind.FAILED)
    state = replace(
        _with_era(state, event.step, event.version),
        phase=Phase.LOADING,
        assigned=event.version,
        peers=_names(event),
    )
    return state, (do.Reconfigure(event),)


# ---------------------------------------------------------------- what a stage holds, and how it breaks


@TRANSITIONS.on(*HOLDING)
def _stored(state: Session, event: ev.StateStored) -> Step:
    """Say of what is kept here once: the next snapshot makes up for one that nobody heard of."""
    return (state, (do.Send(event),)) if event.kept else send(state, Kind.STORED, event)


@TRANSITIONS.on(
    Phase.LOADING, Phase.READY, Phase.TRAINING, Phase.APPLYING, Phase.EVALUATING, Phase.STANDING_BY
)
def _broke(state: Session, event: ev.StageFailed) -> Step:
    failed = event
    if state.phase is Phase.LOADING:
        failed = replace(event, version=state.assigned, step=state.step)
    if state.phase is Phase.EVALUATING:  # the step whose model was to be evaluated is applied
        state = replace(state, step=state.due + 1, joining=False, commit=None)
    elif state.phase in (Phase.READY, Phase.APPLYING, Phase.STANDING_BY):
        state = replace(state, whole=False)
    whole = state.whole and not event.gone
    return send(replace(state, phase=Phase.FAILED, whole=whole, pending=None), Kind.FAILED, failed)


@TRANSITIONS.on(Phase.WAITING, Phase.FAILED)
def _gone(state: Session, event: ev.StageFailed) -> Step:
    """Between a step's report and its commit nothing computes, but a stage may be lost."""
    return _broke(state, event) if event.gone else ignore(state)


@TRANSITIONS.on(Phase.TRAINING, Phase.EVALUATING)
def _peer_lost(state: Session, event: ev.PeerLost) -> Step:
    if event.peer not in state.peers:
        return ignore(state)
    reason = f"lost {event.peer}: {event.reason}"
    state, sent = _broke(state, ev.StageFailed(state.job, state.version, state.step, reason, event.peer))
    return state, (do.Interrupt(reason), *sent)


# ---------------------------------------------------------------- probes: they never disturb training


@TRANSITIONS.on(*WELCOMED, Phase.PAUSED)
def _probed(state: Session, event: ev.OpsProbed | ev.LinkProbed) -> Step:
    return state, (do.Send(event),)


@TRANSITIONS.on(Phase.IDLE)
def _time(state: Session, event: ev.ProbeOps | ev.ProbeLink) -> Step:
    return state, (event,)


@TRANSITIONS.on(*HOLDING, Phase.PAUSED)
def _refuse_ops(state: Session, event: ev.ProbeOps) -> Step:
    return state, (do.Send(do.OpsProbed(event.request, {}, f"busy: {state.phase}")),)


@TRANSITIONS.on(*HOLDING, Phase.PAUSED)
def _refuse_link(state: Session, event: ev.ProbeLink) -> Step:
    refused = do.LinkProbed(event.request, event.link.worker, 0.0, 0.0, f"busy: {state.phase}")
    return state, (do.Send(refused),)
