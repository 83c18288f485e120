"""Instructions of a worker's session to its shell, and its own messages. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from atoll.messages.from_worker import ClientFailed as ClientFailed
from atoll.messages.from_worker import Leaving as Leaving
from atoll.messages.from_worker import LinkProbed as LinkProbed
from atoll.messages.from_worker import OpsProbed as OpsProbed
from atoll.messages.from_worker import StageFailed as StageFailed
from worker.session.events import Relink


@dataclass(frozen=True, slots=True)
class LoadStage:
    job: str
    version: int
    work: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """Leave no trace of ``step`` where it is under way, keep the stage, and be connected with the new
    neighbours under ``version``; answered by StageLoaded of that version. ``repeating``: the steps before are
    repeated first; ``standby``: and go on being repeated, without an answer."""

    job: str
    version: int
    step: int
    work: Any = field(repr=False, compare=False)
    repeating: bool = False
    standby: bool = False


@dataclass(frozen=True, slots=True)
class RunStep:
    job: str
    version: int
    step: int


@dataclass(frozen=True, slots=True)
class ApplyStep:
    job: str
    version: int
    step: int
    gradient_scale: float
    store: bool  # snapshot and upload in the background once applied
    replay_from: int = 0  # messages of earlier steps may leave the send log
    keep: bool = False  # the same, but on this machine's disk alone


@dataclass(frozen=True, slots=True)
class RepeatStep:
    """Do a committed step of the rank that one stands by for, and apply it; answered by StepApplied."""

    job: str
    version: int
    step: int
    gradient_scale: float
    replay_from: int = 0


@dataclass(frozen=True, slots=True)
class DiscardStep:
    """Stop computing the step and leave no trace of it."""

    job: str
    version: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Evaluate:
    job: str
    version: int
    step: int
    coded: bool = False  # once more through the links' codecs


@dataclass(frozen=True, slots=True)
class ChangeLinks:
    """Be ready for the messages of ``relink.first_step`` before the step in front of it begins."""

    job: str
    version: int
    step: int  # whose commit announced it
    relink: Relink


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Stop the computation under way; its stage stays loaded."""

    reason: str


@dataclass(frozen=True, slots=True)
class DropStage:
    """Stop at once and forget everything of this job."""

    job: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """Free all that computing holds of this machine, until ``Wake``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Be ready to compute again."""


@dataclass(frozen=True, slots=True)
class JoinFederation:
    job: str
    version: int
    work: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class TrainLocally:
    job: str
    round: int
    order: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class EvaluateLocally:
    job: str
    round: int
    order: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class SettleRound:
    """Keep what came of ``round``, or forget it; of a population, what came of ``clients``."""

    job: str
    round: int
    taken: bool
    clients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TimeOps:
    request: int
    ops: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class TimeLink:
    request: int
    peer: str
    target: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Send:
    message: Any


@dataclass(frozen=True, slots=True)
class Reconnect:
    after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class HangUp:
    """End the stream; its end is a lost connection like any other."""

    reason: str


@dataclass(frozen=True, slots=True)
class Quit:
    reason: str
    dismissed: bool
    for_good: bool = False


Instruction = (
    LoadStage | RunStep | ApplyStep | DiscardStep | Evaluate | ChangeLinks | Interrupt | DropStage
    | TimeOps | TimeLink | Send | Reconnect | HangUp | Quit | JoinFederation | TrainLocally | EvaluateLocally
    | SettleRound | Suspend | Wake | Reconfigure | RepeatStep
)  # fmt: skip
