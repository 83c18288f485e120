"""What a worker's session knows, and what its rules share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from worker.session.instructions import DropStage, Instruction

if TYPE_CHECKING:
    from worker.session.events import Committed

RECENT = 12  # events remembered for error messages


class Phase(StrEnum):
    CONNECTING = "connecting"  # never welcomed yet
    IDLE = "idle"  # in the pool
    LOADING = "loading"
    READY = "ready"  # holds a stage, waits for Start
    TRAINING = "training"  # computes a step
    WAITING = "waiting"  # step reported, waits for commit or discard
    APPLYING = "applying"
    EVALUATING = "evaluating"
    FAILED = "failed"  # said why; waits for discard, release or a new plan
    JOINING = "joining"  # loads a federated job
    TAKING_PART = "taking part"  # in a federated job, waits for a round
    LEARNING = "learning"  # trains a round
    TESTING = "testing"  # evaluates a round's model
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Session:
    """All that decides what the next event means. ``kept`` holds one message of each kind that
    must reach the coordinator, said again after every welcome until an answer proves it arrived.
    Of a federated job ``step`` is the round."""

    phase: Phase = Phase.CONNECTING
    worker: str = ""
    connected: bool = False
    attempts: int = 0  # failed connections in a row
    job: str = ""
    eras: tuple[tuple[int, int], ...] = ()  # (first step, version), ascending; the first was assigned
    peers: frozenset[str] = frozenset()
    step: int = 0
    commit: Committed | None = None  # being carried out
    spoiled: bool = False  # an apply broke half way: only a new plan can help
    kept: tuple[tuple[str, Any], ...] = ()
    ignored: int = 0
    recent: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        """Of the current step; 0 without a job."""
        return self.version_at(self.step)

    def version_at(self, step: int) -> int:
        """The plan version that ``step`` runs under, as far as it was said."""
        return next((version for first, version in reversed(self.eras) if first <= step), 0)

    @property
    def versions(self) -> tuple[int, ...]:
        """All versions of this assignment."""
        return tuple(version for _, version in self.eras)


Step = tuple[Session, tuple[Instruction, ...]]


def ignore(state: Session) -> Step:
    """Late, duplicate or of another job: counted."""
    return replace(state, ignored=state.ignored + 1), ()


def keep(state: Session, kind: str, message: Any) -> Session:
    """``message`` is said again after every welcome; one of each kind."""
    others = tuple(entry for entry in state.kept if entry[0] != kind)
    return replace(state, kept=(*others, (kind, message)))


def heard(state: Session, *kinds: str) -> Session:
    """The coordinator's answer shows that messages of these kinds arrived."""
    return replace(state, kept=tuple(entry for entry in state.kept if entry[0] not in kinds))


def drop(state: Session, reason: str) -> tuple[Instruction, ...]:
    """Forget the job that is held, where there is one."""
    return (DropStage(state.job, state.version, reason),) if state.job else ()
