"""Events of a worker's session: what its coordinator says, what its computation reports, and its links.

Messages are events as they are. Of what the process that computes reads whole, a session reads its own part
and passes ``message`` on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from atoll.bounded import At, Coded, Name, Version
from atoll.exchange import Exchange
from atoll.messages.from_worker import ClientEvaluated as ClientEvaluated
from atoll.messages.from_worker import ClientFailed as ClientFailed
from atoll.messages.from_worker import EvalReady as EvalReady
from atoll.messages.from_worker import LinkProbed as LinkProbed
from atoll.messages.from_worker import Loaded as Loaded
from atoll.messages.from_worker import OpsProbed as OpsProbed
from atoll.messages.from_worker import SecureAnswer as SecureAnswer
from atoll.messages.from_worker import StageFailed as StageFailed
from atoll.messages.from_worker import StateStored as StateStored
from atoll.messages.from_worker import StepReady as StepReady
from atoll.messages.from_worker import UpdateReady as UpdateReady
from atoll.messages.to_worker import Dismiss as Dismiss
from atoll.messages.to_worker import EvaluateRound as EvaluateRound
from atoll.messages.to_worker import Holders, RankPeers, Replay, Step
from atoll.messages.to_worker import ProbeLink as ProbeLink
from atoll.messages.to_worker import Release as Release
from atoll.messages.to_worker import Relink as Relink
from atoll.messages.to_worker import RoundTaken as RoundTaken
from atoll.messages.to_worker import SecureOrder as SecureOrder
from atoll.messages.to_worker import StepCommit as StepCommit
from atoll.messages.to_worker import StepDiscard as StepDiscard
from atoll.messages.to_worker import StepStart as StepStart
from atoll.messages.to_worker import TrainRound as TrainRound
from atoll.messages.to_worker import Welcome as Welcome
from protos import atoll_control_pb2 as pb

M = TypeVar("M")
Unread = Annotated[M, Coded("whole")]
"""The message itself, for who computes."""

# ---------------------------------------------------------------- events: the coordinator's


@dataclass(frozen=True, slots=True)
class Assign:
    """A stage to load. With ``replay`` it repeats steps by itself before that."""

    job: Name
    version: Version
    peers: RankPeers
    first_step: int
    message: Unread[pb.Assign] = field(repr=False, compare=False)
    replay: Replay | None = None
    holders: Holders = ()
    exchange: Annotated[Exchange | None, At("plan.exchange")] = None
    steps: Annotated[int, At("training.steps")] = 0  # in all
    pieces: Annotated[int, At("program.n_stages")] = 1  # of its pipeline
    data_of: Annotated[str, At("data.pinned.worker")] = ""  # who reads the job's data from its own disk
    joining: bool = False  # of the period of its peer the round alone is left

    @property
    def local(self) -> Exchange | None:
        """The exchange, of a peer that takes steps of its own."""
        return self.exchange if self.exchange is not None and self.exchange.local else None

    @property
    def piped(self) -> bool:
        """Whether each step of such a peer within a period is committed."""
        return self.local is not None and (self.pieces > 1 or self.local.early)

    @property
    def eras(self) -> tuple[tuple[int, int], ...]:
        """(first step, version) of the steps that it repeats by itself."""
        return self.replay.versions if self.replay else ()

    @property
    def standby(self) -> bool:
        """Whether it is beside the plan, to repeat every later step as well."""
        return self.replay is not None and self.replay.standby


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """The stage that is held stays, under ``version`` from ``step`` on; some of its neighbours are others.
    ``standby``: who stands by goes on with that, else takes the rank."""

    job: Name
    version: Version
    # The oldest version that this stage may have been assigned, or last reconfigured, under.
    base: Annotated[int, At("base_version")]
    step: Step
    peers: RankPeers
    message: Unread[pb.Reconfigure] = field(repr=False, compare=False)
    standby: bool = False
    joining: bool = False  # of a peer's own steps all are done, its round is not


@dataclass(frozen=True, slots=True)
class Participate:
    """A federated job wants this worker's data."""

    job: Name
    version: int
    message: Unread[pb.Participate] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ProbeOps:
    """Ops to time."""

    request: int
    message: Unread[pb.ProbeOps] = field(repr=False, compare=False)


# ---------------------------------------------------------------- events: our own


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session stream ended. ``jitter`` in [0, 1) spreads a fleet's reconnects."""

    reason: str
    jitter: float


@dataclass(frozen=True, slots=True)
class StepApplied:
    """A step is applied, or repeated by who stands by."""

    job: str
    version: Version
    step: int


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


Report = (
    Loaded | StageFailed | StepReady | StepApplied | EvalReady | StateStored | OpsProbed | LinkProbed
    | UpdateReady | ClientEvaluated | ClientFailed | SecureAnswer
)  # fmt: skip
"""What comes of a computation; of a federated job Loaded says that it is joined."""
Event = (
    Welcome | Assign | StepStart | StepCommit | StepDiscard | Release | Dismiss | ProbeOps | ProbeLink
    | Participate | TrainRound | EvaluateRound | RoundTaken | SecureOrder | Reconfigure | Report
    | Disconnected | PeerLost | LeaveAsked | PauseAsked | ResumeAsked | Drained
)  # fmt: skip
