"""What a worker says to its coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Annotated

from atoll.bounded import (
    MAX_NAME_CHARS,
    MAX_OPS,
    MAX_STAGES,
    At,
    Blob,
    Chars,
    Clean,
    ClientName,
    Coded,
    Hex,
    Most,
    Name,
    OptionalBlob,
    OptionalHost,
    OptionalName,
    Plain,
    Port,
    Share,
    Sorted,
    Unsent,
    Unset,
    Version,
    Within,
    ZeroIs,
)  # fmt: skip
from atoll.device_class import DeviceClass
from atoll.exchange import DIGEST_BYTES as ROUND_DIGEST_BYTES
from atoll.federated import MAX_SAMPLES, ConsentWord, DatasetFacts
from atoll.job import MOST_LOCAL_STEPS
from atoll.secure import SIGNATURE_BYTES as SIGNATURE_BYTES
from atoll.secure import MemberKeys, Parcel, SecretShare, Stage

MAX_ADDRESSES = 16
MAX_REASON_CHARS = 2000
MAX_PAUSED_CHARS = 300
MAX_RATE_BPS = 1e15
LEAST_SHARE = 0.001
MAX_CODECS = 100
MAX_LOSSES = max(4096, MOST_LOCAL_STEPS)  # micro-batches of a step, or steps of a period
MAX_RELAY_CHARS = 270  # HOST:PORT
MAX_SECONDS = 30 * 86_400.0
MAX_WATTS = 15_000.0  # of one worker: more than a machine of eight GPUs takes
MAX_MOVED_BYTES = 1 << 44  # a job's sums of them must go into the 64 bits that its owner is shown
MAX_DATASETS = 256  # a worker
MAX_FIGURES = 64  # scalars, and metrics, of one message
MAX_DRAWN = 4096  # clients of a round
MAX_CLIENTS = 100_000  # of a population
MAX_GATEWAYS = 64  # named by a data owner
MAX_TERMS = 64  # of a host's sums
MAX_WHY_CHARS = 200  # a client
MAX_KEY_CHARS = 64  # of the name of a set of clients
MAX_PROCESSES = 64  # of one worker, on as many devices
MAX_COPIES = 1024  # of one worker
MAX_COPY_NAME_CHARS = 200
MAX_HELD_WEIGHTS = 20_000  # tensors of the checkpoints that a worker's owner added
HASH_BYTES = 32
MOST_REPLAYED = 4096  # steps whose scales are remembered: repeating more is never worth it
MAX_REPEATED = 2 * MOST_REPLAYED
MIN_MEMORY_BYTES, MAX_MEMORY_BYTES = 2**20, 2**50
DIGEST_BYTES = 8  # of a stage's part of a step

Word = Annotated[str, Clean(60)]
Reason = Annotated[str, Clean(MAX_REASON_CHARS)]
Client = ClientName
Samples = Annotated[int, Within(1, MAX_SAMPLES)]
Seconds = Annotated[float, Within(0.0, MAX_SECONDS)]
Joules = Annotated[float, Within(0.0, MAX_WATTS * MAX_SECONDS)]  # 0: not measured
Moved = Annotated[int, Within(0, MAX_MOVED_BYTES)]
Memory = Annotated[int, Within(0, MAX_MEMORY_BYTES)]
Rate = Annotated[float, Within(0.0, MAX_RATE_BPS), ZeroIs(inf)]
StepDigest = Annotated[str, Hex(DIGEST_BYTES, empty=True)]
TotalDigest = Annotated[str, Hex(ROUND_DIGEST_BYTES)]
Figures = Annotated[Mapping[Name, float], Most(MAX_FIGURES)]
"""Named numbers, sorted by name; whether they are finite, their reader judges."""
Speeds = Annotated[Mapping[Annotated[str, Plain(60)], tuple[float, float]], Most(MAX_CODECS), Sorted()]
"""Codec -> dense bytes/s, encoding and decoding."""


@dataclass(frozen=True, slots=True)
class Held:
    """A stage that a worker still holds when it opens a session.

    ``version`` was assigned; ``step`` is the one in flight there, so as many are applied; ``ready``: it was
    reported, and its commit is awaited or being carried out; ``loaded``: loading is over.
    """

    job: Name
    version: Version
    step: int
    loaded: bool = True
    ready: bool = False


@dataclass(frozen=True, slots=True)
class Guest:
    """What a worker's owner lets it take now. Rates in bit/s of all peers together, infinite: any."""

    compute_share: Annotated[float, Within(LEAST_SHARE, 1.0)] = (
        1.0  # of the time that its device computes, in (0, 1]
    )
    upload_bps: Rate = inf
    download_bps: Rate = inf
    memory_limit_bytes: int = 0  # in place of the introduction's; 0: that one
    paused: Annotated[str, Clean(MAX_PAUSED_CHARS)] = ""  # why it must not work; it stays a member
    apps_only: bool = False  # of all work it takes runs of Flower apps alone


UNLIMITED = Guest()


@dataclass(frozen=True, slots=True)
class CopyHeld:
    """A copy of a stage that a worker keeps whole on its disk, or the error for which it does not.

    ``name``: of ``StageCopy``; ``took_s``: to fetch ``fetched_bytes`` of it.
    """

    job: Name
    name: Annotated[str, Clean(MAX_COPY_NAME_CHARS)]
    n_bytes: Annotated[Moved, At("bytes")] = 0
    fetched_bytes: Moved = 0
    took_s: Seconds = 0.0
    error: Reason = ""


@dataclass(frozen=True, slots=True)
class CopyStored:
    """A copy's blobs are in the store; ``error``: why they are not."""

    job: Name
    name: Annotated[str, Clean(MAX_COPY_NAME_CHARS)]
    error: Reason = ""


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Blobs of weights that a worker's owner added, all of them: SHA-256 of each, ascending."""

    hashes: bytes


@dataclass(frozen=True, slots=True)
class Introduction:
    """Facts that a worker states about itself."""

    name: Word
    incarnation: int
    kind: Annotated[str, At("device.kind"), Clean(16)]  # cpu | cuda
    model: Annotated[str, At("device.model"), Clean(200)]
    threads: Annotated[int, At("device.threads")]
    memory_bytes: Annotated[int, At("device.memory_bytes")]
    memory_limit_bytes: Annotated[int, At("device.memory_limit_bytes")]
    torch_version: Annotated[Word, At("device.torch_version")] = ""
    python_version: Annotated[Word, At("device.python_version")] = ""
    atoll_version: Annotated[Word, At("device.atoll_version")] = ""
    platform: Annotated[str, At("device.platform"), Clean(200)] = ""
    # That the worker may use at once; 0: not told.
    cores: Annotated[float, At("device.cores")] = 0.0
    # Of the quota that makes them less than one; 0 without.
    quota_period_s: Annotated[float, At("device.quota_period_s")] = 0.0
    # Both empty: outbound only.
    addresses: Annotated[
        tuple[tuple[OptionalHost, Port], ...], At("peer_addresses"), Most(MAX_ADDRESSES)
    ] = ()
    # For workers seen at the same address alone.
    nearby: Annotated[tuple[tuple[str, int], ...], Unsent()] = ()
    seen: Annotated[str, Unsent()] = ""  # the address that its session comes from
    site: Annotated[str, Clean(100)] = ""
    codecs: Annotated[tuple[Word, ...], Most(MAX_CODECS)] = ()
    codec_speeds: Speeds = field(default_factory=dict)
    # Registered there for federated training.
    datasets: Annotated[tuple[DatasetFacts, ...], Most(MAX_DATASETS)] = ()
    instructions: Annotated[Word, At("device.instructions")] = ""  # of the CPU that torch uses, such as AVX2
    held: Held | None = None
    guest: Annotated[Guest, Unset(UNLIMITED)] = UNLIMITED
    copies: Annotated[tuple[CopyHeld, ...], Most(MAX_COPIES)] = ()  # that it keeps already
    copy_bytes: int = 0  # of disk that it lends to copies
    # That the worker takes itself, beside the limit.
    own_memory_bytes: Annotated[Memory, At("device.own_memory_bytes")] = 0
    # That compute together; 0: one. An all-reduce of theirs: seconds, and bytes a second each sends beyond.
    processes: Annotated[int, At("device.processes"), Within(0, MAX_PROCESSES)] = 0
    joint_latency_s: Annotated[Seconds, At("device.joint_latency_s")] = 0.0
    joint_bytes_per_s: Annotated[float, At("device.joint_bytes_per_s")] = 0.0
    # The limit is in the planner's figures: nothing holds a stage to it.
    memory_in_figures: Annotated[bool, At("device.memory_in_figures")] = False

    @property
    def place(self) -> tuple[object, ...]:
        """Where the worker is and may be dialled: another one means that it has moved."""
        return self.addresses, self.nearby, self.seen

    @property
    def device_class(self) -> DeviceClass:
        """The class of machines that compute the same bits as this one."""
        device = f"cpu {self.instructions}" if self.kind == "cpu" else self.model
        return DeviceClass(device, self.torch_version, self.threads, max(1, self.processes))


@dataclass(frozen=True, slots=True)
class Waits:
    """A worker's claim of what it waits for; ``peer`` "": for the coordinator."""

    peer: Annotated[str, At("waits_for"), Clean(MAX_NAME_CHARS)]
    what: Annotated[str, At("waits_what"), Clean(24)]  # a message's direction, ``room`` for one, or ``data``
    step: Annotated[int, At("waits_step")]
    seconds: Annotated[Seconds, At("waits_s")]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    worker_time_s: float
    job: Annotated[str, Chars(MAX_NAME_CHARS)]
    version: Version
    step: int
    progress: int  # stands still when the work hangs
    memory_bytes: int
    waits: Annotated[Waits | None, Coded("waits")] = None  # None: it computes, or has nothing to do
    logged_from: int = 0  # its send log holds all that its stage sent from this step on
    guest: Annotated[Guest, Unset(UNLIMITED)] = UNLIMITED
    memory_peak_bytes: Memory = 0  # most that computing has held beyond rest since it was given its stage
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class CodecSpeeds:
    """All that a worker knows by now of how fast its codecs are."""

    speeds: Speeds


@dataclass(frozen=True, slots=True)
class OpsProbed:
    request: int
    timings: Mapping[Name, tuple[float, float]]  # signature -> forward, backward seconds
    error: Reason = ""


@dataclass(frozen=True, slots=True)
class LinkProbed:
    request: int
    peer: Name
    rtt_s: float
    bandwidth_bps: float
    error: Reason = ""


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """``way``: local | direct | reversed | relayed, "" when the worker is joined with the peer no more."""

    peer: Name
    way: str
    relay: Annotated[str, Clean(MAX_RELAY_CHARS)] = ""  # HOST:PORT


@dataclass(frozen=True, slots=True)
class Digest:
    """In hex, of a stage's gradients in a step, and of the messages that it took for them; "": none."""

    gradients: StepDigest = ""
    inputs: StepDigest = ""


NO_DIGEST = Digest()


@dataclass(frozen=True, slots=True)
class Loaded:
    """``digests``: of the steps that the stage has repeated by itself, one each, as of StepReady."""

    job: str
    version: Version
    took_s: float = 0.0
    population: Annotated[str, Clean(64)] = ""  # hash of the data of ``clients``
    # Registered samples by client of a population.
    clients: Annotated[Mapping[Client, Samples], Most(MAX_CLIENTS)] = field(default_factory=dict)
    digests: Annotated[tuple[Digest, ...], At("repeated_digests"), Most(MAX_REPEATED)] = ()
    fetched_s: Seconds = 0.0  # of took_s, until the tensors were on its disk
    # Workers that may see its updates, by its data owner's leave; SITE: all of its site.
    gateways: Annotated[tuple[Name, ...], Most(MAX_GATEWAYS)] = ()


@dataclass(frozen=True, slots=True)
class Goodput:
    peer: Name
    n_bytes: Annotated[int, At("bytes")]
    busy_s: float
    rtt_s: float
    dense_bytes: int = 0  # what the boundary tensors among them would have taken uncompressed
    encode_s: float = 0.0
    decode_s: float = 0.0
    quickest_bps: float = 0.0  # of the quickest quarter of the bytes; 0 unknown


@dataclass(frozen=True, slots=True)
class RoundReceipt:
    """What the result of an exchange round holds at one rank, of one slice of the model."""

    round: int
    included: Annotated[tuple[int, ...], Most(MAX_STAGES)]  # peers
    share: Share  # of the elements, those that hold all that was expected
    sent_bytes: int
    received_bytes: int
    digest: Annotated[str, Chars(MAX_NAME_CHARS)]  # of the result
    # Digests of what each owner, a peer, has added.
    totals: Annotated[Mapping[int, TotalDigest], Most(MAX_STAGES)] = field(default_factory=dict)
    # The op that names the slice.
    slice: Annotated[int, Within(0, MAX_OPS)] = 0


@dataclass(frozen=True, slots=True)
class StepReady:
    job: str
    version: Version
    step: int
    # Where computed, by micro-batch: each over n_micro, or ...
    losses: Annotated[tuple[float, ...], Most(MAX_LOSSES)] = ()
    square_norms: tuple[float, ...] = ()
    finite: bool = True
    forward_s: float = 0.0
    backward_s: float = 0.0
    waited_s: float = 0.0
    optimizer_s: float = 0.0
    handling_s: float = 0.0  # of messages: neither computing nor codecs nor waiting
    links: Annotated[tuple[Goodput, ...], Most(MAX_STAGES)] = ()
    # ... the sums over these counts. Of a period by step: means, over these.
    weights: Annotated[tuple[float, ...], Most(MAX_LOSSES)] = ()
    digest: Digest = NO_DIGEST
    # Of the round that ends a period of local steps, one of each slice of the model that the rank joins.
    receipts: Annotated[tuple[RoundReceipt, ...], Most(MAX_STAGES)] = ()
    energy_j: Joules = 0.0

    @property
    def computed_s(self) -> float:
        """Seconds of forwards, backwards and the optimizer's step."""
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class EvalReady:
    job: str
    version: Version
    step: int
    loss: float | None
    coded_loss: float | None = None  # the same batches through the links' codecs
    metrics: Figures = field(default_factory=dict)  # the job's own, of the same rows


@dataclass(frozen=True, slots=True)
class StateStored:
    """A stage's state is in the store, or ``kept`` on the worker's own disk. ``error``: why the worker could
    not store it; ``forged``: what the coordinator found wrong with what the worker says it stored,
    ``n_bytes`` how many bytes it has."""

    job: str
    version: Version
    step: int
    tensors: Annotated[Mapping[Name, Blob], Sorted()]
    error: Reason = ""
    forged: Annotated[str, Unsent()] = ""
    n_bytes: Annotated[int, Unsent()] = 0
    kept: bool = False


@dataclass(frozen=True, slots=True)
class StageFailed:
    job: str
    version: Version
    step: int
    reason: Reason
    lost_peer: OptionalName = ""
    memory_bytes: Memory = 0  # beyond rest, at which it was ended for want of memory; 0: it was not
    gone: Annotated[bool, Unsent()] = False  # the stage is lost, with all that it held


@dataclass(frozen=True, slots=True)
class Row:
    """Numbers of a population's client whose update is in a host's sum."""

    n_samples: int
    steps: int
    loss: float
    square_loss: float
    seconds: Seconds = field(compare=False)
    coded_bytes: int = 0  # of its own update, had it travelled


@dataclass(frozen=True, slots=True)
class HostRows:
    """Clients in a host's sum (``stateful``: their states are here), and why others are not; its loads.
    ``order``: TrainRound's."""

    rows: Annotated[Mapping[Client, Row], Most(MAX_DRAWN)]
    refused: Annotated[Mapping[Client, Annotated[str, Clean(MAX_WHY_CHARS)]], Most(MAX_DRAWN)]
    loads: Annotated[Mapping[str, int], Most(MAX_TERMS)]
    sums: Annotated[Mapping[str, int], Most(MAX_TERMS)]
    stateful: bool = False
    order: Annotated[str, Clean(MAX_KEY_CHARS)] = ""


@dataclass(frozen=True, slots=True)
class UpdateReady:
    """A client's update of a round lies in the blob store. What it says of itself is not judged yet.

    ``host``: the update is a sum over clients of a population, or with ``update`` "" all were refused.
    """

    job: Name
    round: int
    update: Annotated[OptionalBlob, At("update.hash")]
    update_bytes: Annotated[int, At("update.size")]
    n_samples: int
    steps: int
    scalars: Figures = field(default_factory=dict)
    metrics: Figures = field(default_factory=dict)
    square_loss: float = 0.0
    train_s: Seconds = 0.0
    upload_bytes: Moved = 0
    upload_s: Seconds = 0.0
    download_bytes: Moved = 0
    download_s: Seconds = 0.0
    host: Annotated[HostRows | None, Coded("host rows")] = None
    exchange: Annotated[str, Clean(MAX_KEY_CHARS)] = ""  # the update is masked
    gateway: OptionalName = ""  # the update is not in the store, but kept for this worker
    energy_j: Joules = 0.0

    @property
    def order(self) -> str:
        """Name of the set of clients, the exchange or the gateway that it is of; "" of a data owner's own."""
        return (self.exchange or self.gateway) if self.host is None else self.host.order


@dataclass(frozen=True, slots=True)
class EvaluatedRow:
    """Means over the held-out samples of a population's client."""

    n_samples: int
    loss: float
    metrics: Figures


@dataclass(frozen=True, slots=True)
class ClientEvaluated:
    """Means over a client's held-out samples; ``rows``: a population's clients, whose means they are."""

    job: Name
    round: int
    n_samples: int
    loss: float
    metrics: Figures = field(default_factory=dict)
    took_s: Seconds = 0.0
    download_bytes: Moved = 0
    download_s: Seconds = 0.0
    rows: Annotated[Mapping[Client, EvaluatedRow], Most(MAX_CLIENTS)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClientFailed:
    job: Name
    round: int
    reason: Reason
    during: Annotated[str, Clean(16)] = "train"  # load | train | evaluate


@dataclass(frozen=True, slots=True)
class ConsentSaid:
    """A worker's data owner, or the policy it set, has spoken; ``graph``: hash of what would run there."""

    job: Name
    word: ConsentWord
    reason: Reason
    graph: OptionalBlob = ""
    version: int = 1  # of every invitation


@dataclass(frozen=True, slots=True)
class Leaving:
    reason: Reason


@dataclass(frozen=True, slots=True)
class SecureAnswer:
    """A member's answer to ``SecureOrder``; ``refused``: why it gives none."""

    job: Name
    round: int
    exchange: Annotated[str, Clean(MAX_KEY_CHARS)]
    stage: Stage
    keys: MemberKeys | None = None
    parcels: Annotated[Mapping[Name, Parcel], Most(MAX_DRAWN)] = field(default_factory=dict, repr=False)
    signature: Annotated[str, Hex(SIGNATURE_BYTES, empty=True)] = ""
    shares: Annotated[Mapping[Name, SecretShare], Most(MAX_DRAWN)] = field(default_factory=dict, repr=False)
    refused: Reason = ""


StageMessage = Loaded | StepReady | EvalReady | StateStored | StageFailed
ClientMessage = UpdateReady | ClientEvaluated | ClientFailed | ConsentSaid | SecureAnswer
JobMessage = StageMessage | ClientMessage | CopyHeld | CopyStored
Message = Heartbeat | CodecSpeeds | HeldWeights | OpsProbed | LinkProbed | PeerJoined | Leaving | JobMessage
"""All that a coordinator acts upon: each stands under its class's name in the schema's ``FromWorker``."""
