"""Events of a worker's session: of the coordinator, and of its own computation and links. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from atoll.exchange import Exchange
from atoll.messages.to_worker import Dismiss as Dismiss
from atoll.messages.to_worker import Release as Release
from atoll.messages.to_worker import Relink as Relink
from atoll.messages.to_worker import RoundTaken as RoundTaken
from atoll.messages.to_worker import StepCommit as StepCommit
from atoll.messages.to_worker import StepDiscard as StepDiscard
from atoll.messages.to_worker import StepStart as StepStart

# ---------------------------------------------------------------- events: the coordinator's


@dataclass(frozen=True, slots=True)
class Welcome:
    worker: str
    heartbeat_s: float
    idle_heartbeat_s: float = 0.0  # without a job; never shorter than heartbeat_s
    term: int = 0  # of the coordinator that says it, and all that follows on its stream


@dataclass(frozen=True, slots=True)
class Assign:
    """A stage to load. ``eras``: (first step, version) of the steps that it repeats by itself before that.
    ``standby``: beside the plan, to repeat every later step as well."""

    job: str
    version: int
    peers: frozenset[str]
    first_step: int
    work: Any = field(repr=False, compare=False)  # opaque here: what LoadStage is given
    eras: tuple[tuple[int, int], ...] = ()
    standby: bool = False
    exchange: Exchange | None = None  # of a peer that takes steps of its own, of ``steps`` in all
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """The stage that is held stays, under ``version`` from ``step`` on; some of its neighbours are others.
    ``standby``: who stands by goes on with that, else takes the rank."""

    job: str
    version: int
    base: int  # the oldest version that this stage may have been assigned, or last reconfigured, under
    step: int
    peers: frozenset[str]
    work: Any = field(repr=False, compare=False)  # opaque here: what the instruction is given
    standby: bool = False


@dataclass(frozen=True, slots=True)
class Participate:
    """A federated job wants this worker's data."""

    job: str
    version: int
    work: Any = field(repr=False, compare=False)  # opaque here: what JoinFederation is given


@dataclass(frozen=True, slots=True)
class TrainRound:
    """``key``: names the clients of a population that are to be trained; "": our own data."""

    job: str
    round: int
    order: Any = field(repr=False, compare=False)
    key: str = ""


@dataclass(frozen=True, slots=True)
class EvaluateRound:
    job: str
    round: int
    order: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ProbeOps:
    request: int
    ops: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ProbeLink:
    request: int
    peer: str
    target: Any = field(repr=False, compare=False)


# ---------------------------------------------------------------- events: our own


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session stream ended. ``jitter`` in [0, 1) spreads a fleet's reconnects."""

    reason: str
    jitter: float


@dataclass(frozen=True, slots=True)
class StageLoaded:
    job: str
    version: int
    message: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class StageBroke:
    """``gone``: the stage is lost, with all that it held. ``memory_bytes``: beyond rest, at which it was
    ended for want of memory; 0: it was not."""

    job: str
    version: int
    step: int
    reason: str
    lost_peer: str = ""
    gone: bool = False
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepDone:
    job: str
    version: int
    step: int
    message: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class StepApplied:
    job: str
    version: int
    step: int


@dataclass(frozen=True, slots=True)
class EvalDone:
    job: str
    version: int
    step: int
    message: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Stored:
    job: str
    version: int
    step: int
    message: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Kept:
    """A snapshot lies on this machine's disk; or why it does not."""

    job: str
    version: int
    step: int
    message: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Joined:
    """A federated job is loaded."""

    job: str
    version: int
    message: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class UpdateStored:
    """A round is trained, and its update in the blob store; ``key``: TrainRound's."""

    job: str
    round: int
    message: Any = field(repr=False, compare=False)
    key: str = ""


@dataclass(frozen=True, slots=True)
class RoundEvaluated:
    """A round's model is evaluated on our held-out share."""

    job: str
    round: int
    message: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class TurnBroke:
    """``during``: load | train | evaluate."""

    job: str
    round: int
    during: str
    reason: str


@dataclass(frozen=True, slots=True)
class Probed:
    """Ops or a link were measured (or could not be): the answer to send."""

    message: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class PeerLost:
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    reason: str


@dataclass(frozen=True, slots=True)
class PauseAsked:
    """This machine must not work now, until ``ResumeAsked``."""

    reason: str


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """This machine may work again."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Everything was dropped and sent; nothing is left to do."""


Event = (
    Welcome | Assign | StepStart | StepCommit | StepDiscard | Release | Dismiss | ProbeOps | ProbeLink
    | Disconnected | StageLoaded | StageBroke | StepDone | StepApplied | EvalDone | Stored | Kept | Probed
    | PeerLost | LeaveAsked | PauseAsked | ResumeAsked | Drained | Participate | TrainRound | EvaluateRound
    | RoundTaken | Joined | UpdateStored | RoundEvaluated | TurnBroke | Reconfigure
)  # fmt: skip
