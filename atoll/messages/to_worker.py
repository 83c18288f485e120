"""What a coordinator says to its workers, as both handle it.

What a stage or a federated job computes is read by the process that computes it: ``Assign``, ``Reconfigure``,
``Participate`` and ``ProbeOps`` here are whole, the worker's session has its own part of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from atoll import bounded
from atoll.bounded import (
    MAX_STAGES,
    Amount,
    At,
    Clean,
    Inline,
    Most,
    Name,
    Once,
    OptionalBlob,
    OptionalHost,
    OptionalName,
    Port,
    Share,
    Sorted,
    Unset,
    Version,
    Within,
)
from atoll.compression import MAX_RATIO
from atoll.dataset_spec import DataSpec
from atoll.federated import FederatedSpec
from atoll.job import Precision, TrainingSpec
from atoll.messages.from_worker import (
    MAX_ADDRESSES,
    MAX_CLIENTS,
    MAX_COPIES,
    MAX_DRAWN,
    MAX_FIGURES,
    MAX_KEY_CHARS,
    MAX_REPEATED,
    Reason,
)
from atoll.opdag import OpNode, StateMeta, TensorMeta, leaf_refs
from atoll.plan import MAX_PIECES, LinkSpec, Plan
from atoll.program import StageProgram
from atoll.secure import MemberKeys, Parcel, Signature, Stage

BlobHash = bounded.Blob
MAX_VERSION = (1 << 32) - 1
MAX_STEP = (1 << 63) - 1
MAX_ERAS = 1024  # versions of steps that are repeated
MAX_OVERLAP_S = 366 * 86_400.0
MAX_HEARTBEAT_S = 3600.0
MAX_RELAY_S = 60.0
MAX_PROBES = 20_000
MAX_PROBE_S = 60.0
MAX_PROBE_BYTES = 1 << 30
MAX_HOLDERS = 16
MAX_BLOB_BYTES = 1 << 44
MAX_BATCH = 1 << 24
MAX_ROUND = (1 << 31) - 1  # a round's steps have keys of 64 bits

Step = Annotated[int, Within(0, MAX_STEP)]
Round = Annotated[int, Within(0, MAX_ROUND)]
Clients = Annotated[tuple[str, ...], Once(), Most(MAX_CLIENTS)]
"""Of a population."""
Members = Annotated[tuple[Name, ...], Once(), Most(MAX_DRAWN)]
"""Workers of a secure round."""
States = Annotated[Mapping[Name, StateMeta], At("metas"), Sorted()]
"""Every leaf of a job's programs, inputs included."""
Addresses = Annotated[tuple[tuple[Annotated[str, bounded.Host()], Port], ...], Most(MAX_ADDRESSES)]


@dataclass(frozen=True, slots=True)
class Welcome:
    """The first message on a stream; ``term``: of the coordinator that says it, and all that follows."""

    worker: Name
    heartbeat_s: Annotated[float, Within(0.01, MAX_HEARTBEAT_S)]
    # Without a job; never shorter than heartbeat_s.
    idle_heartbeat_s: Annotated[float, Within(0.0, MAX_HEARTBEAT_S)] = 0.0
    term: int = 0
    time_s: float = 0.0


# ---------------------------------------------------------------- peers


@dataclass(frozen=True, slots=True)
class RelayOffer:
    """The coordinator's leave to be joined with one peer at its relays; see ``protos.relay_tickets``."""

    # An empty host is the coordinator's own.
    addresses: Annotated[tuple[tuple[OptionalHost, Port], ...], Most(MAX_ADDRESSES)]
    ticket: bytes
    key: bytes = field(repr=False)
    dials: Annotated[bool, At("dial")]
    after_s: Annotated[float, Within(0.0, MAX_RELAY_S)]  # other ways have so long before
    lasts_s: Amount  # from its arrival


@dataclass(frozen=True, slots=True)
class Paths:
    """Ways to a peer. ``dial``: this end tries its ``addresses`` first, the peer tries ours soon after."""

    addresses: Annotated[Addresses, At("peer.addresses")] = ()
    dial: bool = False
    relay: Annotated[RelayOffer | None, At("peer.relay")] = None


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A peer, and the ways to it: accept its connections, or dial it where it accepts none of ours."""

    worker: Annotated[Name, At("peer.worker")]
    paths: Annotated[Paths, Inline()]


@dataclass(frozen=True, slots=True)
class RankPeer:
    """A neighbour in a plan."""

    rank: int
    link: Annotated[PeerLink, Inline()]


RankPeers = Annotated[tuple[RankPeer, ...], At("peers"), Most(bounded.MAX_STAGES)]
Holders = Annotated[tuple[PeerLink, ...], Most(MAX_HOLDERS)]
"""Workers that keep copies of tensors, the nearest first."""


@dataclass(frozen=True, slots=True)
class ProbeLink:
    """Measure the link to a peer."""

    request: int
    link: Annotated[PeerLink, Inline()]
    seconds: Annotated[float, Within(0.0, MAX_PROBE_S)]
    max_bytes: Annotated[int, Within(0, MAX_PROBE_BYTES)]  # 0: the round trip alone


@dataclass(frozen=True, slots=True)
class Standbys:
    """All workers beside the plan that repeat the steps of a rank's neighbours, each with its rank: to stand
    by, or as ``checks``, which compare."""

    job: Name
    version: Version
    peers: RankPeers
    checks: bool = False


@dataclass(frozen=True, slots=True)
class Revoked:
    """A worker's certificate opens nothing any more: end its connections, accept none of it."""

    worker: Name
    reason: Reason


@dataclass(frozen=True, slots=True)
class TrustAuthorities:
    """Authorities of this coordinator from now on, PEM, the newer one first; two for ``left_s`` more."""

    ca_pem: bytes
    left_s: Annotated[float, Within(0.0, MAX_OVERLAP_S)]


# ---------------------------------------------------------------- copies


@dataclass(frozen=True, slots=True)
class StageCopy:
    """A stage's part of a checkpoint to be kept on disk; ``blobs``: with the most bytes that each has.
    ``working``: also while a stage is computed, from the ``holders``."""

    job: Name
    name: Name
    blobs: Mapping[BlobHash, Annotated[int, Within(0, MAX_BLOB_BYTES)]]
    working: bool = False
    holders: Holders = ()


@dataclass(frozen=True, slots=True)
class KeepCopies:
    """Keep these copies, and no others."""

    copies: Annotated[tuple[StageCopy, ...], Most(MAX_COPIES)]


@dataclass(frozen=True, slots=True)
class StoreCopy:
    """Put the blobs of a copy into the store; answered by ``CopyStored``."""

    job: Name
    name: Name
    blobs: tuple[BlobHash, ...]


@dataclass(frozen=True, slots=True)
class Era:
    """From ``first_step`` on, the stages exchange under ``version`` with these codecs."""

    version: Version
    first_step: Step
    links: tuple[LinkSpec, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """Steps from ``first_step`` on that a rank repeats by itself; ``stores``: numbers of steps after which it
    stores its part of a checkpoint; ``standby``: and every later one, beside the plan. ``commits``: in place
    of eras and scales, of a rank whose peer's own steps are committed: those and the rounds, as it heard
    them; ``store`` of one: its part is to be stored."""

    first_step: Step
    # Ascending; the first begins at or before ``first_step``, of who stands by the last goes on.
    eras: Annotated[tuple[Era, ...], Most(MAX_ERAS)]
    # One a step.
    scales: Annotated[tuple[Amount, ...], At("gradient_scales"), Most(MAX_REPEATED)]
    stores: Annotated[tuple[int, ...], Most(MAX_REPEATED)] = ()
    standby: bool = False
    commits: Annotated[tuple[StepCommit, ...], Most(MAX_REPEATED)] = ()

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(first step, version) of what is repeated, ascending; where a version begins with a round, the
        step behind that."""
        if not self.commits:
            return tuple((era.first_step, era.version) for era in self.eras)
        found: dict[int, int] = {}
        for commit in self.commits:
            found.setdefault(commit.version, commit.step + (not commit.own))
        return tuple((first, version) for version, first in found.items())


@dataclass(frozen=True, slots=True)
class FurtherPiece:
    """Programs of a piece behind a stage's first one."""

    program: StageProgram
    eval_program: StageProgram | None


@dataclass(frozen=True, slots=True)
class Assign:
    """A stage to load. ``tensors`` maps every leaf but the inputs to its blob, of the state after
    ``first_step`` steps or, where there is a ``replay``, before that. ``further``: programs of its pieces
    behind the first one, of training and of an evaluation. ``owner``: who submitted the job, where its data
    stay with a worker. ``joining``: as of ``Reconfigure``."""

    job: Name
    version: Version
    training: TrainingSpec
    program: StageProgram
    eval_program: StageProgram | None
    plan: Plan
    peers: RankPeers
    tensors: Mapping[Name, BlobHash]
    states: States
    data: DataSpec
    eval_data: DataSpec | None
    first_step: int
    replay: Replay | None
    holders: Holders
    rank: int
    further: Annotated[tuple[FurtherPiece, ...], Most(MAX_PIECES - 1)] = ()
    owner: str = ""
    joining: bool = False


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """Keep the stage, begin ``step`` anew with these peers. ``base``: the oldest version that it may have
    been given under. ``standby``: go on standing by for the rank; without, who stands by takes it. ``store``:
    store the stage as it is. ``joining``: of a peer's own steps up to ``step`` all are done, its round is
    not."""

    job: Name
    version: Version
    base: Annotated[int, At("base_version")]
    step: Step
    plan: Plan
    peers: RankPeers
    standby: bool = False
    store: bool = False
    joining: bool = False


@dataclass(frozen=True, slots=True)
class OpProbe:
    """A distinct op to time, and the shapes of what it reads; ``op_inputs``: of ``op_refs(node)``."""

    signature: Name
    node: Annotated[OpNode, At("op")]
    op_inputs: tuple[TensorMeta, ...]
    leaves: Annotated[Mapping[Name, TensorMeta], Sorted()]

    @property
    def inputs(self) -> tuple[TensorMeta, ...]:
        """Shapes of all that it reads: of ops, then of leaves in the order of its arguments."""
        return (*self.op_inputs, *(self.leaves[leaf.name] for leaf in leaf_refs(self.node)))


@dataclass(frozen=True, slots=True)
class ProbeOps:
    """Time these ops on random inputs; none: answer at once."""

    request: int
    ops: Annotated[tuple[OpProbe, ...], Most(MAX_PROBES)]
    precision: Annotated[Precision, Unset(Precision.FP32)]


@dataclass(frozen=True, slots=True)
class StepStart:
    job: str
    version: Version
    step: int


@dataclass(frozen=True, slots=True)
class Relink:
    """From ``first_step`` on the same stages exchange under ``version`` with these codecs."""

    version: Version
    first_step: Step
    links: tuple[LinkSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class StepCommit:
    job: str
    version: Version
    step: int
    gradient_scale: Amount
    store: bool
    evaluate: bool
    last: bool
    relink: Relink | None = None
    evaluate_coded: bool = False  # with evaluate: once more through the links' codecs
    replay_from: int = 0  # step of the newest checkpoint: older messages may leave the send logs
    keep: bool = False  # a snapshot on the workers' own disks, for the others of the plan
    own: bool = False  # of one peer, within its period: the round that ends that is to come
    # With ``own``: the peer takes no further step of the period. Samples of each peer in the round that
    # begins now, over the most of any, by the peers' numbers; 0 where a peer is lost.
    shares: Annotated[tuple[Share, ...], Most(MAX_STAGES)] = ()


@dataclass(frozen=True, slots=True)
class StepDiscard:
    job: str
    version: Version
    step: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Release:
    job: str
    version: Version
    reason: Reason


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob by hash and size."""

    hash: BlobHash
    size: int


@dataclass(frozen=True, slots=True)
class Model:
    """The broadcast of a round: ``full``, or ``delta`` against ``base`` where a client holds that.

    ``holder``: a worker of the same site, which is asked for it before the store."""

    full: Blob
    delta: Blob | None = None
    base: OptionalBlob = ""
    holder: OptionalName = ""


@dataclass(frozen=True)
class Participate:
    """A federated job as a client hears of it. ``tensors`` maps every leaf but the inputs to its blob;
    ``owner``: who submitted it; ``client``: what the worker is called in it, its own name where that is
    unset. Batches, held-out samples and noise of codecs are drawn from that name."""

    job: Name
    version: int
    training: TrainingSpec
    federated: FederatedSpec
    program: StageProgram
    eval_program: StageProgram | None
    states: States
    tensors: Mapping[Name, BlobHash]
    batch: Annotated[int, Within(1, MAX_BATCH)]
    owner: str = ""
    client: str = ""

    @property
    def programs(self) -> tuple[StageProgram, ...]:
        """The training program, and that of the evaluation."""
        return (self.program,) if self.eval_program is None else (self.program, self.eval_program)

    @property
    def inputs(self) -> dict[str, TensorMeta]:
        """Shapes of the programs' inputs."""
        return {name: self.states[name].meta for program in self.programs for name in program.inputs}


@dataclass(frozen=True, slots=True)
class KeptUpdate:
    """An update that ``client`` keeps for its gateway, as the coordinator heard of it.

    ``registered``: samples that it may count at most."""

    client: Name
    update: Blob
    n_samples: int
    registered: int
    steps: int
    codec: Name
    ratio: Annotated[float, Within(1.0, MAX_RATIO)]
    scalars: Annotated[Mapping[Name, float], Most(MAX_FIGURES)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainRound:
    """Train, and put the update into the store coded with ``codec`` at ``ratio``.

    ``seed``: of what codec and rule draw on this client in this round. ``clients``: of a population, to be
    trained in turn, ``order`` the name of their set; ``drawn`` and ``drawn_samples``: how many the round has
    on all hosts, and what they have registered together. ``exchange``: the update is to be masked;
    ``shared``: members who are in it, ``parcels``: from this one's neighbours. ``gateway``: keep the update
    for that worker of the site, and store nothing. ``gathers``: train nothing, but fetch and check these
    updates, and store their sum, which ``order`` names.
    """

    job: str
    round: Round
    model: Model
    codec: Name
    ratio: Annotated[float, Within(1.0, MAX_RATIO)]
    deadline_s: float  # from now
    seed: int
    order: Annotated[str, Clean(MAX_KEY_CHARS)] = ""
    clients: Clients = ()
    drawn: int = 0
    drawn_samples: int = 0
    exchange: Annotated[str, Clean(MAX_KEY_CHARS)] = ""
    shared: Members = ()
    parcels: Annotated[Mapping[Name, Parcel], Most(MAX_DRAWN)] = field(default_factory=dict, repr=False)
    gateway: OptionalName = ""
    gathers: Annotated[tuple[KeptUpdate, ...], Most(MAX_DRAWN)] = ()


@dataclass(frozen=True, slots=True)
class SecureOrder:
    """What a member of an exchange is asked for beside its update, by ``stage``: new keys; shares of its
    secrets for the neighbours on ``roster``; its signature under ``survivors``; or shares of theirs, for a
    quorum's ``signatures``."""

    job: str
    round: Round
    exchange: Annotated[str, Clean(MAX_KEY_CHARS)]
    stage: Stage
    roster: Annotated[Mapping[Name, MemberKeys], Most(MAX_DRAWN)] = field(default_factory=dict)
    survivors: Members = ()
    signatures: Annotated[Mapping[Name, Signature], Most(MAX_DRAWN)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluateRound:
    job: str
    round: Round
    model: Model
    deadline_s: float
    clients: Clients = ()


@dataclass(frozen=True, slots=True)
class RoundTaken:
    """Result of a client's update; ``clients``: of a population, those that are counted; ``order``: the order
    that it answered, "" all of the round."""

    job: str
    round: int
    taken: bool
    reason: Reason = ""
    clients: tuple[str, ...] = ()
    order: Annotated[str, Clean(MAX_KEY_CHARS)] = ""


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Leave now; ``for_good``: the certificate is refused from here on."""

    reason: Reason
    for_good: bool
