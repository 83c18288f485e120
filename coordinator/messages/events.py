"""Events of the scheduler: messages of workers in our own types, and our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.job import JobSpec
from atoll.messages import from_worker as told
from atoll.messages.from_worker import *  # noqa: F403 - what workers say are events as they are
from atoll.messages.to_worker import Blob as Blob
from atoll.opdag import TensorMeta
from atoll.plan import LinkSpec, Plan
from coordinator.messages.facts import Checkpoint

# ---------------------------------------------------------------- from a worker


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that broke a bound; its sender is quarantined."""

    reason: str


PeerMessage = told.Message | Malformed


@dataclass(frozen=True, slots=True)
class SessionOpened:
    worker: str
    session: int  # unique number of the stream
    introduction: told.Introduction


@dataclass(frozen=True, slots=True)
class SessionClosed:
    worker: str
    session: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message on a session."""

    worker: str
    session: int
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class Uploading:
    """Bytes of a blob came from it: heartbeats may be late behind them."""

    worker: str


# ---------------------------------------------------------------- our own


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a job asks of a fleet at least: FLOPs of a step, and bytes of weights, gradients and optimizer
    state; 0: not known."""

    step_flops: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job whose blobs are all here and whose DAGs were read; ``ops`` and ``needs`` as in JobRead.
    ``start``: the checkpoint to go on from, None: the newest of the job that it continues, if any."""

    job: str
    submission: str
    spec: JobSpec
    ops: Mapping[str, int]
    start: Checkpoint | None = None
    needs: Needs = Needs()


@dataclass(frozen=True, slots=True)
class JobRead:
    """The distinct ops of a job's DAGs, signature -> forward FLOPs, and what it asks of a fleet."""

    job: str
    ops: Mapping[str, int]
    needs: Needs = Needs()


@dataclass(frozen=True, slots=True)
class TornFound:
    """The job's checkpoint of ``step`` cannot be loaded; ``reason`` names the blob."""

    job: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobUnreadable:
    job: str
    reason: str
    hopeless: bool  # else it may be readable later, as when the store did not answer


@dataclass(frozen=True, slots=True)
class PlanMade:
    job: str
    attempt: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class PlanFailed:
    """``hopeless``: no other fleet would help either."""

    job: str
    attempt: int
    reason: str
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class LinksChosen:
    job: str
    attempt: int
    links: tuple[LinkSpec, ...]


@dataclass(frozen=True, slots=True)
class FleetJudged:
    """Predicted seconds of a step of the running plan, and by (rank, worker) with that swap. Where plans were
    compared, of what an exact step teaches: with the best plan of a job's own workers, and ``grown_s`` with
    that of a fleet that has grown, on ``workers``; ``shape``: in words."""

    job: str
    attempt: int
    step_s: float = 0.0
    swapped_s: Mapping[tuple[int, str], float] = field(default_factory=dict)
    own_s: float = 0.0
    grown_s: float = 0.0
    workers: tuple[str, ...] = ()
    shape: str = ""


@dataclass(frozen=True, slots=True)
class FleetFailed:
    job: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class LinksFailed:
    job: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class AggregatorOpened:
    """The aggregator of a federated job holds the state before ``round`` and wrote its broadcast.

    ``inputs``: of the model; ``up``: the arrays of one update; ``secret``: for draws, of this process alone.
    """

    job: str
    round: int
    model: Blob
    inputs: Mapping[str, TensorMeta]
    up: tuple[TensorMeta, ...]
    secret: str = ""


@dataclass(frozen=True, slots=True)
class Aggregated:
    """A round's updates are summed; ``dropped``: those that could not be counted, and why.

    ``state`` None: too few were left, nothing changed. ``model`` is the next broadcast, ``delta`` the
    same against the one before. ``void``: why no sum came of masked updates.
    """

    job: str
    round: int
    attempt: int
    state: Blob | None
    model: Blob | None
    delta: Blob | None = None
    dropped: Mapping[str, str] = field(default_factory=dict)
    took_s: float = 0.0
    void: str = ""


@dataclass(frozen=True, slots=True)
class CentrallyEvaluated:
    """The model after ``round`` rounds on the owner's held-out data; ``loss`` None: it failed."""

    job: str
    round: int
    loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    n_samples: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class AggregatorBroke:
    """The aggregator's process ended, or it cannot go on; ``hopeless``: nor could another one; ``storage``:
    the disk failed, so that waiting may help; ``client``: whose update it was processing."""

    job: str
    reason: str
    hopeless: bool = False
    storage: bool = False
    client: str = ""


AggregatorEvent = AggregatorOpened | Aggregated | CentrallyEvaluated | AggregatorBroke


@dataclass(frozen=True, slots=True)
class PlanAsked:
    """Request for the plan of this job now. Answered by MakePlan under ``inquiry``, nothing starts."""

    inquiry: str
    spec: JobSpec
    ops: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CancelAsked:
    job: str
    reason: str = "cancelled by the owner"


@dataclass(frozen=True, slots=True)
class ForgetAsked:
    """Let go of a job that has ended."""

    job: str


JobEvent = (
    JobRead
    | TornFound
    | JobUnreadable
    | PlanMade
    | PlanFailed
    | LinksChosen
    | LinksFailed
    | FleetJudged
    | FleetFailed
    | CancelAsked
    | AggregatorEvent
)
"""About one job, whatever its kind."""


@dataclass(frozen=True, slots=True)
class AppLent:
    """A worker is a node of an app's run from now on, where it is still idle."""

    worker: str
    run: str


@dataclass(frozen=True, slots=True)
class AppReturned:
    worker: str
    run: str
    reason: str


@dataclass(frozen=True, slots=True)
class KickAsked:
    worker: str
    reason: str
    for_good: bool


@dataclass(frozen=True, slots=True)
class StorageFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class StorageRecovered:
    pass


Event = (
    SessionOpened
    | SessionClosed
    | Arrived
    | Uploading
    | Tick
    | Submitted
    | JobEvent
    | ForgetAsked
    | AppLent
    | AppReturned
    | KickAsked
    | StorageFailed
    | StorageRecovered
    | PlanAsked
)
