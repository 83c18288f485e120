"""Events of the scheduler: messages of workers in our own types, and our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from atoll.device_class import DeviceClass
from atoll.federated import ConsentWord, DatasetFacts
from atoll.job import JobSpec
from atoll.opdag import TensorMeta
from atoll.plan import LinkSpec, Plan
from coordinator.messages.copies import CopyHeld as CopyHeld
from coordinator.messages.copies import CopyStored as CopyStored
from coordinator.messages.facts import Checkpoint


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob by hash and size."""

    hash: str
    size: int


# ---------------------------------------------------------------- from a worker


@dataclass(frozen=True, slots=True)
class Held:
    """A stage that a worker still holds when it opens a session.

    ``version`` was assigned; ``step`` is the one in flight there, so as many are applied; ``ready``: it was
    reported, and its commit is awaited or being carried out; ``loaded``: loading is over.
    """

    job: str
    version: int
    step: int
    loaded: bool = True
    ready: bool = False


@dataclass(frozen=True, slots=True)
class Guest:
    """What a worker's owner lets it take now. Rates in bit/s of all peers together, infinite: any."""

    compute_share: float = 1.0  # of the time that its device computes, in (0, 1]
    upload_bps: float = inf
    download_bps: float = inf
    memory_limit_bytes: int = 0  # in place of the introduction's; 0: that one
    paused: str = ""  # why it must not work; it stays a member
    apps_only: bool = False  # of all work it takes runs of Flower apps alone


UNLIMITED = Guest()


@dataclass(frozen=True, slots=True)
class Introduction:
    """Facts that a worker states about itself."""

    name: str
    incarnation: int
    kind: str  # cpu | cuda
    model: str
    threads: int
    memory_bytes: int
    memory_limit_bytes: int
    torch_version: str = ""
    python_version: str = ""
    atoll_version: str = ""
    platform: str = ""
    cores: float = 0.0  # that the worker may use at once; 0: not told
    quota_period_s: float = 0.0  # of the quota that makes them less than one; 0 without
    addresses: tuple[tuple[str, int], ...] = ()  # both empty: outbound only
    nearby: tuple[tuple[str, int], ...] = ()  # for workers seen at the same address alone
    seen: str = ""  # the address that its session comes from
    site: str = ""
    codecs: tuple[str, ...] = ()
    codec_speeds: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # encode, decode bytes/s
    datasets: tuple[DatasetFacts, ...] = ()  # registered there for federated training
    instructions: str = ""  # of the CPU that torch uses, such as AVX2
    held: Held | None = None
    guest: Guest = UNLIMITED
    copies: tuple[CopyHeld, ...] = ()  # that it keeps already
    copy_bytes: int = 0  # of disk that it lends to copies
    own_memory_bytes: int = 0  # that the worker takes itself, beside the limit
    memory_in_figures: bool = False  # the limit is in the planner's figures: nothing holds a stage to it

    @property
    def place(self) -> tuple[object, ...]:
        """Where the worker is and may be dialled: another one means that it has moved."""
        return self.addresses, self.nearby, self.seen

    @property
    def device_class(self) -> DeviceClass:
        """The class of machines that compute the same bits as this one."""
        device = f"cpu {self.instructions}" if self.kind == "cpu" else self.model
        return DeviceClass(device, self.torch_version, self.threads)


@dataclass(frozen=True, slots=True)
class Waits:
    """A worker's claim of what it waits for; ``peer`` "": for the coordinator."""

    peer: str
    what: str  # a message's direction, ``room`` for one, or ``data``
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Heartbeat:
    worker_time_s: float
    job: str
    version: int
    step: int
    progress: int  # stands still when the work hangs
    memory_bytes: int
    waits: Waits | None = None  # None: it computes, or has nothing to do
    logged_from: int = 0  # its send log holds all that its stage sent from this step on
    guest: Guest = UNLIMITED
    memory_peak_bytes: int = 0  # most that computing has held beyond rest since it was given its stage


@dataclass(frozen=True, slots=True)
class CodecSpeeds:
    """All that a worker knows by now of how fast its codecs are."""

    speeds: Mapping[str, tuple[float, float]]  # codec -> dense bytes/s, encoding and decoding


@dataclass(frozen=True, slots=True)
class OpsProbed:
    request: int
    timings: Mapping[str, tuple[float, float]]  # signature -> forward, backward seconds
    error: str = ""


@dataclass(frozen=True, slots=True)
class LinkProbed:
    request: int
    peer: str
    rtt_s: float
    bandwidth_bps: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """``way``: local | direct | reversed | relayed, "" when the worker is joined with the peer no more."""

    peer: str
    way: str
    relay: str = ""  # HOST:PORT


@dataclass(frozen=True, slots=True)
class Digest:
    """In hex, of a stage's gradients in a step, and of the messages that it took for them; "": not told."""

    gradients: str = ""
    inputs: str = ""


NO_DIGEST = Digest()


@dataclass(frozen=True, slots=True)
class Loaded:
    """``digests``: of the steps that the stage has repeated by itself, one each, as of StepReady."""

    job: str
    version: int
    took_s: float = 0.0
    population: str = ""  # hash of the data of ``clients``
    clients: Mapping[str, int] = field(default_factory=dict)  # registered samples by client of a population
    digests: tuple[Digest, ...] = ()
    fetched_s: float = 0.0  # of took_s, until the tensors were on its disk


@dataclass(frozen=True, slots=True)
class Goodput:
    peer: str
    n_bytes: int
    busy_s: float
    rtt_s: float
    dense_bytes: int = 0  # what the boundary tensors among them would have taken uncompressed
    encode_s: float = 0.0
    decode_s: float = 0.0
    quickest_bps: float = 0.0  # of the quickest quarter of the bytes; 0 unknown


@dataclass(frozen=True, slots=True)
class RoundReceipt:
    """What the result of an exchange round holds at one rank."""

    round: int
    included: tuple[int, ...]  # ranks
    share: float  # of the elements, those that hold all that was expected
    sent_bytes: int
    received_bytes: int
    digest: str  # of the result
    totals: Mapping[int, str] = field(default_factory=dict)  # digests of what each owner, a rank, has added


@dataclass(frozen=True, slots=True)
class StepReady:
    job: str
    version: int
    step: int
    losses: tuple[float, ...] = ()  # where computed, by micro-batch: each over n_micro, or ...
    square_norms: tuple[float, ...] = ()
    finite: bool = True
    forward_s: float = 0.0
    backward_s: float = 0.0
    waited_s: float = 0.0
    optimizer_s: float = 0.0
    handling_s: float = 0.0  # of messages: neither computing nor codecs nor waiting
    links: tuple[Goodput, ...] = ()
    weights: tuple[float, ...] = ()  # ... the sums over these counts. Of a period by step: means, over these
    digest: Digest = NO_DIGEST
    receipt: RoundReceipt | None = None  # of the round that ends a period of local steps


@dataclass(frozen=True, slots=True)
class EvalReady:
    job: str
    version: int
    step: int
    loss: float | None
    coded_loss: float | None = None  # the same batches through the links' codecs
    metrics: Mapping[str, float] = field(default_factory=dict)  # the job's own, of the same rows


@dataclass(frozen=True, slots=True)
class StateStored:
    """A stage's state is in the store, or ``kept`` on the worker's own disk. ``error``: why the worker could
    not store it; ``forged``: what the coordinator found wrong with what the worker says it stored,
    ``n_bytes`` how many bytes it has."""

    job: str
    version: int
    step: int
    tensors: Mapping[str, str]
    error: str = ""
    forged: str = ""
    n_bytes: int = 0
    kept: bool = False


@dataclass(frozen=True, slots=True)
class StageFailed:
    job: str
    version: int
    step: int
    reason: str
    lost_peer: str = ""
    memory_bytes: int = 0  # beyond rest, at which it was ended for want of memory; 0: it was not


@dataclass(frozen=True, slots=True)
class Row:
    """Numbers of a population's client whose update is in a host's sum."""

    n_samples: int
    steps: int
    loss: float
    square_loss: float
    seconds: float


@dataclass(frozen=True, slots=True)
class HostRows:
    """Clients in a host's sum (``stateful``: their states are here), and why others are not; its loads."""

    rows: Mapping[str, Row]
    refused: Mapping[str, str]
    loads: Mapping[str, int]
    sums: Mapping[str, int]
    stateful: bool = False


@dataclass(frozen=True, slots=True)
class UpdateReady:
    """A client's update of a round lies in the blob store. What it says of itself is not judged yet.

    ``host``: the update is a sum over clients of a population, or with ``update`` "" all were refused.
    """

    job: str
    round: int
    update: str  # the blob's hash
    update_bytes: int
    n_samples: int
    steps: int
    scalars: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    square_loss: float = 0.0
    train_s: float = 0.0
    upload_bytes: int = 0
    upload_s: float = 0.0
    download_bytes: int = 0
    download_s: float = 0.0
    host: HostRows | None = None


@dataclass(frozen=True, slots=True)
class EvaluatedRow:
    """Means over the held-out samples of a population's client."""

    n_samples: int
    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ClientEvaluated:
    """Means over a client's held-out samples; ``rows``: a population's clients, whose means they are."""

    job: str
    round: int
    n_samples: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    took_s: float = 0.0
    download_bytes: int = 0
    download_s: float = 0.0
    rows: Mapping[str, EvaluatedRow] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClientFailed:
    job: str
    round: int
    reason: str
    during: str = "train"  # load | train | evaluate


@dataclass(frozen=True, slots=True)
class ConsentSaid:
    """A worker's data owner, or the policy it set, has spoken; ``graph``: hash of what would run there."""

    job: str
    word: ConsentWord
    reason: str
    graph: str = ""


@dataclass(frozen=True, slots=True)
class Leaving:
    reason: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that broke a bound; its sender is quarantined."""

    reason: str


PeerMessage = (
    Heartbeat
    | CodecSpeeds
    | OpsProbed
    | LinkProbed
    | PeerJoined
    | Loaded
    | StepReady
    | EvalReady
    | StateStored
    | StageFailed
    | CopyHeld
    | CopyStored
    | UpdateReady
    | ClientEvaluated
    | ClientFailed
    | ConsentSaid
    | Leaving
    | Malformed
)
ClientMessage = UpdateReady | ClientEvaluated | ClientFailed | ConsentSaid
StageMessage = Loaded | StepReady | EvalReady | StateStored | StageFailed
JobMessage = StageMessage | ClientMessage | CopyHeld | CopyStored


@dataclass(frozen=True, slots=True)
class SessionOpened:
    worker: str
    session: int  # unique number of the stream
    introduction: Introduction


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
class Submitted:
    """A job whose blobs are all here and whose DAGs were read; ``ops`` as in JobRead. ``start``: the
    checkpoint to go on from, None: the newest of the job that it continues, if any."""

    job: str
    submission: str
    spec: JobSpec
    ops: Mapping[str, int]
    start: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class JobRead:
    """The distinct ops of a job's DAGs: signature -> forward FLOPs."""

    job: str
    ops: Mapping[str, int]


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
class SwapsJudged:
    """Predicted seconds of a step of the running plan, and by (rank, worker) with that swap."""

    job: str
    attempt: int
    step_s: float
    swapped_s: Mapping[tuple[int, str], float]


@dataclass(frozen=True, slots=True)
class SwapsFailed:
    job: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class FleetJudged:
    """Predicted seconds of what an exact step teaches: with the best plan of a job's own workers, and
    ``grown_s`` with that of a fleet that has grown, on ``workers``; ``shape``: in words."""

    job: str
    attempt: int
    step_s: float
    grown_s: float
    workers: tuple[str, ...]
    shape: str


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

    ``inputs``: of the model; ``up``: the arrays of one update.
    """

    job: str
    round: int
    model: Blob
    inputs: Mapping[str, TensorMeta]
    up: tuple[TensorMeta, ...]


@dataclass(frozen=True, slots=True)
class Aggregated:
    """A round's updates are summed; ``dropped``: those that could not be counted, and why.

    ``state`` None: too few were left, nothing changed. ``model`` is the next broadcast, ``delta`` the
    same against the one before.
    """

    job: str
    round: int
    attempt: int
    state: Blob | None
    model: Blob | None
    delta: Blob | None = None
    dropped: Mapping[str, str] = field(default_factory=dict)
    took_s: float = 0.0


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
    | SwapsJudged
    | SwapsFailed
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
    | JobRead
    | TornFound
    | JobUnreadable
    | PlanMade
    | PlanFailed
    | LinksChosen
    | LinksFailed
    | SwapsJudged
    | SwapsFailed
    | FleetJudged
    | FleetFailed
    | CancelAsked
    | ForgetAsked
    | AppLent
    | AppReturned
    | KickAsked
    | StorageFailed
    | StorageRecovered
    | PlanAsked
    | AggregatorOpened
    | Aggregated
    | CentrallyEvaluated
    | AggregatorBroke
)
