"""State of a worker's session, and what its handlers share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from atoll.exchange import Exchange
from atoll.messages.from_worker import Held
from worker.session.events import Loaded, Reconfigure, Release, Report, StepCommit
from worker.session.instructions import Instruction, Send

RECENT = 12  # events remembered for error messages


class Phase(StrEnum):
    CONNECTING = "connecting"  # never welcomed yet
    IDLE = "idle"  # in the pool
    PAUSED = "paused"  # by this machine's owner: a member that takes no work
    LOADING = "loading"
    READY = "ready"  # holds a stage, waits for Start
    TRAINING = "training"  # computes a step
    WAITING = "waiting"  # step reported, waits for commit or discard
    APPLYING = "applying"
    EVALUATING = "evaluating"
    STANDING_BY = "standing by"  # repeats a rank's steps, beside the plan
    FAILED = "failed"  # reported why; waits for discard, release or a new plan
    JOINING = "joining"  # loads a federated job
    ENROLLED = "enrolled"  # in a federated job, waits for a round
    TRAINING_ROUND = "training round"
    EVALUATING_ROUND = "evaluating round"
    DRAINING = "draining"
    GONE = "gone"


LIVE = frozenset(Phase) - {Phase.DRAINING, Phase.GONE}
WELCOMED = LIVE - {Phase.CONNECTING, Phase.PAUSED}
STAGED = frozenset(
    {
        Phase.LOADING,
        Phase.READY,
        Phase.TRAINING,
        Phase.WAITING,
        Phase.APPLYING,
        Phase.EVALUATING,
        Phase.STANDING_BY,
        Phase.FAILED,
    }
)


class Kind(StrEnum):
    """Kinds of messages that must reach the coordinator."""

    LOADED = "loaded"
    READY = "ready"
    EVALUATED = "evaluated"
    STORED = "stored"
    FAILED = "failed"
    UPDATE = "update"
    ROUND_EVALUATED = "round evaluated"


@dataclass(frozen=True, slots=True)
class Kept:
    """A message that is sent again after every welcome until an answer proves that it arrived."""

    kind: Kind
    message: Report
    round: int | None = None  # of a federated job's update or evaluation
    key: str = ""  # of the clients that an update is of


_OF_JOB = (
    "job", "assigned", "eras", "peers", "exchange", "standby", "commit", "pending", "unacknowledged"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Session:
    """State that decides what the next event means. ``unacknowledged`` holds one message of each kind, of a
    federated job one of each kind and round. Of a federated job ``step`` is the round."""

    phase: Phase = Phase.CONNECTING
    worker: str = ""
    connected: bool = False
    attempts: int = 0  # failed connections in a row
    term: int = 0  # the greatest that a coordinator welcomed us under
    outdated: bool = False  # who is connected has a smaller one: nothing that it says counts
    job: str = ""
    assigned: int = 0  # version that the stage was assigned, or last reconfigured, under
    eras: tuple[tuple[int, int], ...] = ()  # (first step, version), ascending
    peers: frozenset[str] = frozenset()
    step: int = 0
    exchange: Exchange | None = None  # of a peer that takes steps of its own ...
    steps: int = 0  # ... of so many in all
    piped: bool = False  # ... each of which is committed, and then the round
    joining: bool = False  # of a period of such a peer the round alone is left
    standby: bool = False  # beside the plan; then ``step`` is the next whose commit is awaited, ...
    repeated: int = 0  # ... and so many have been repeated
    key: str = ""  # of the clients of a population in training
    joined: Loaded | None = None  # our answer to a federated job's invitation
    commit: StepCommit | None = None  # being carried out
    pending: Reconfigure | None = None  # comes after the step whose commit is being carried out
    whole: bool = False  # the stage is held as it is after ``step`` steps; of the next no trace that stays
    unacknowledged: tuple[Kept, ...] = ()
    ignored: int = 0
    recent: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        """Plan version of the current step; 0 without a job."""
        return self.version_at(self.step)

    @property
    def due(self) -> int:
        """The step under way; of a peer that takes steps of its own in one go the last of their period."""
        if self.piped:
            return self.step - self.joining
        return self.step if self.exchange is None else self.exchange.last_step(self.step, self.steps)

    def version_at(self, step: int) -> int:
        """The plan version that ``step`` runs under, as far as it was announced."""
        return next((version for first, version in reversed(self.eras) if first <= step), 0)

    @property
    def versions(self) -> tuple[int, ...]:
        """Plan versions that the stage has had, ascending."""
        return tuple(version for _, version in self.eras)


def held(state: Session) -> Held | None:
    """Return the stage that a session holds, for a coordinator that may have been restarted; None where it
    holds none."""
    if state.phase not in STAGED or (state.phase is Phase.FAILED and not state.whole):
        return None
    applied = state.phase is Phase.EVALUATING  # the step whose model is evaluated is over
    ready = state.phase in (Phase.WAITING, Phase.APPLYING)
    loaded = state.phase is not Phase.LOADING
    return Held(state.job, state.assigned, state.due + 1 if applied else state.step, loaded, ready)


def clear(state: Session, phase: Phase, **job: Any) -> Session:
    """Return a session in another phase, which knows nothing of a job but ``job``."""
    empty = Session()
    return replace(state, phase=phase, **{name: getattr(empty, name) for name in _OF_JOB} | job)


Step = tuple[Session, tuple[Instruction, ...]]


def ignore(state: Session) -> Step:
    """Late, duplicate or of another job: counted."""
    return replace(state, ignored=state.ignored + 1), ()


def send(state: Session, kind: Kind, message: Report, round: int | None = None, key: str = "") -> Step:
    """Send ``message`` now, and after every welcome until it is acknowledged; one of each kind and round."""
    others = tuple(kept for kept in state.unacknowledged if (kept.kind, kept.round) != (kind, round))
    return replace(state, unacknowledged=(*others, Kept(kind, message, round, key))), (Send(message),)


def acknowledged(state: Session, *kinds: Kind, round: int | None = None, key: str = "") -> Session:
    """Drop the kept messages of these kinds: the coordinator's answer shows that they arrived. ``key``: of
    the only set of clients that it is about."""
    rest = tuple(
        k for k in state.unacknowledged if k.kind not in kinds or k.round != round or (key and k.key != key)
    )
    return replace(state, unacknowledged=rest)


def drop(state: Session, reason: str) -> tuple[Instruction, ...]:
    """Forget the job that is held, where there is one."""
    return (Release(state.job, state.version, reason),) if state.job else ()
