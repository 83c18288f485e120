"""Instructions of a worker's session to its shell. Most are messages of the coordinator, to be obeyed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from atoll.bounded import Inline, Version
from atoll.messages.from_worker import ClientFailed as ClientFailed
from atoll.messages.from_worker import Leaving as Leaving
from atoll.messages.from_worker import LinkProbed as LinkProbed
from atoll.messages.from_worker import OpsProbed as OpsProbed
from atoll.messages.from_worker import StageFailed as StageFailed
from worker.session import events as ev


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """Leave no trace of the step where it is under way, keep the stage, and be connected with the new
    neighbours; answered by Loaded of that version. ``repeating``: the steps before are repeated first, and
    where the change says ``standby`` go on being repeated, without an answer."""

    change: ev.Reconfigure
    repeating: bool = False


@dataclass(frozen=True, slots=True)
class RunStep:
    """Compute a step; answered by StepReady."""

    job: str
    version: Version
    step: int


@dataclass(frozen=True, slots=True)
class RunRound:
    """End a period of steps that are all committed, the last of which this is; answered by StepReady."""

    job: str
    version: Version
    step: int


@dataclass(frozen=True, slots=True)
class RepeatStep:
    """Do a committed step of the rank that one stands by for, and apply it; answered by StepApplied."""

    commit: Annotated[ev.StepCommit, Inline()]


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the model after a step, as its commit asked; answered by EvalReady."""

    commit: Annotated[ev.StepCommit, Inline()]


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Stop the computation under way; its stage stays loaded."""

    reason: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """Free all that computing holds of this machine, until ``Wake``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Be ready to compute again."""


@dataclass(frozen=True, slots=True)
class Send:
    """Say this to the coordinator."""

    message: ev.Report | Leaving


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


Computing = (
    ev.Assign | Reconfigure | RunStep | RunRound | ev.StepCommit | RepeatStep | ev.StepDiscard | Evaluate
    | ev.Release | ev.Participate | ev.TrainRound | ev.EvaluateRound | ev.RoundTaken | ev.SecureOrder
    | ev.ProbeOps | ev.ProbeLink | Interrupt | Suspend | Wake
)  # fmt: skip
"""What concerns computing. StepCommit: take up the links that it names, if any, then apply the step, which
StepApplied answers. Release: stop at once and forget everything of the job. RoundTaken: keep what came of the
round, or forget it."""
Instruction = Computing | Send | Reconnect | HangUp | Quit
