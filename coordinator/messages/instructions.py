"""Instructions of the scheduler: messages to workers, and work for the shell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.job import JobSpec, TrainingSpec
from atoll.messages.to_worker import Dismiss as Dismiss
from atoll.messages.to_worker import EvaluateRound as EvaluateRound
from atoll.messages.to_worker import Model as Model
from atoll.messages.to_worker import Release as Release
from atoll.messages.to_worker import Relink as Relink
from atoll.messages.to_worker import Replay as Replay
from atoll.messages.to_worker import Revoked as Revoked
from atoll.messages.to_worker import RoundTaken as RoundTaken
from atoll.messages.to_worker import SecureOrder as SecureOrder
from atoll.messages.to_worker import StepCommit as StepCommit
from atoll.messages.to_worker import StepDiscard as StepDiscard
from atoll.messages.to_worker import StepStart as StepStart
from atoll.messages.to_worker import StoreCopy as StoreCopy
from atoll.messages.to_worker import TrainRound as TrainRound
from atoll.messages.to_worker import TrustAuthorities as TrustAuthorities
from atoll.plan import Plan
from atoll.secure import MemberKeys
from coordinator.messages.events import UpdateReady
from coordinator.messages.facts import (
    CheckpointStored,
    CheckpointTorn,
    Evaluated,
    Fact,
    Reconfigured,
    RoundEvaluated,
    WorkRejected,
)
from coordinator.planning.costs.fleet import Fleet
from protos.telemetry import Event as Name

Addresses = tuple[tuple[str, int], ...]

# ---------------------------------------------------------------- messages to workers


@dataclass(frozen=True, slots=True)
class ProbeOps:
    """Time these ops; no signatures: an empty request, answered at once, to learn the round trip."""

    request: int
    job: str
    signatures: tuple[str, ...]
    precision: str


@dataclass(frozen=True, slots=True)
class RelayUse:
    """Leave to meet a peer at the relays: one end dials there, the other waits for it."""

    dials: bool
    after_s: float  # other ways have so long before


@dataclass(frozen=True, slots=True)
class ExpectPeer:
    """Accept this peer's connections, or dial it where it accepts none of ours."""

    peer: str
    addresses: Addresses
    dial: bool
    relay: RelayUse | None = None


@dataclass(frozen=True, slots=True)
class ProbeLink:
    request: int
    link: ExpectPeer
    seconds: float
    max_bytes: int


@dataclass(frozen=True, slots=True)
class RankPeer:
    rank: int
    link: ExpectPeer


@dataclass(frozen=True, slots=True)
class Assign:
    """A stage to load; with ``replay`` its tensors are of before the steps to be repeated. ``holders``:
    workers that keep copies of them, the nearest first."""

    job: str
    spec: JobSpec
    plan: Plan
    rank: int
    first_step: int
    tensors: Mapping[str, str]
    peers: tuple[RankPeer, ...]
    replay: Replay | None = None
    holders: tuple[ExpectPeer, ...] = ()
    joining: bool = False  # of the rank's peer all own steps up to ``first_step`` are done, its round is not


@dataclass(frozen=True, slots=True)
class StageCopy:
    """A stage's part of a checkpoint, whose ``tensors`` are all there; ``name`` tells it from all others."""

    job: str
    name: str
    plan: Plan
    rank: int  # of who holds the stage
    tensors: Mapping[str, str] = field(repr=False)
    holder: str = ""  # of a snapshot that ranks keep for each other: who has it by itself


@dataclass(frozen=True, slots=True)
class KeepCopies:
    """Keep these copies on disk, and no others, while there is nothing to compute; those of snapshots always.
    ``holders``: the ways to who has these."""

    copies: tuple[StageCopy, ...]
    holders: Mapping[str, ExpectPeer] = field(default_factory=dict)  # by worker


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """Keep the stage, begin ``step`` anew with these peers. ``base``: the version it was given under.
    ``standby``: go on standing by for the rank; without, who stands by takes it. ``store``: store the stage
    as it is. ``joining``: of a peer's own steps all are done, its round is not."""

    job: str
    plan: Plan
    base: int
    step: int
    peers: tuple[RankPeer, ...]
    standby: bool = False
    store: bool = False
    joining: bool = False


@dataclass(frozen=True, slots=True)
class StandbysHere:
    """All workers beside the plan that repeat the steps of a rank's neighbours, each with its rank: to stand
    by, or as ``checks``, which compare."""

    job: str
    version: int
    peers: tuple[RankPeer, ...]
    checks: bool = False


@dataclass(frozen=True, slots=True)
class Participate:
    """Take part in a federated job: load its programs and the initial ``tensors``."""

    job: str
    version: int
    spec: JobSpec
    tensors: Mapping[str, str]
    owner: str = ""  # who submitted the job
    client: str = ""  # what the worker is called among the job's clients


Message = (
    ProbeOps
    | ProbeLink
    | ExpectPeer
    | Revoked
    | KeepCopies
    | StoreCopy
    | TrustAuthorities
    | Assign
    | Reconfigure
    | StandbysHere
    | StepStart
    | StepCommit
    | StepDiscard
    | Release
    | Participate
    | TrainRound
    | EvaluateRound
    | RoundTaken
    | SecureOrder
    | Dismiss
)

# ---------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class SendTo:
    worker: str
    message: Message


@dataclass(frozen=True, slots=True)
class Journal:
    """Make this fact durable before any later instruction is carried out."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class ReadJob:
    """Read the job's DAGs from the blob store and look at its checkpoints; answers TornFound for each newest
    one that cannot be loaded, then JobRead or JobUnreadable. ``hashes``: read them to the last byte."""

    job: str
    spec: JobSpec
    hashes: bool = False


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Plan in a thread; answers PlanMade or PlanFailed with the same attempt. ``beyond``: number of workers
    that the fleet was chosen before."""

    job: str
    attempt: int
    version: int
    spec: JobSpec
    fleet: Fleet
    beyond: int = 0


@dataclass(frozen=True, slots=True)
class ChooseLinks:
    """Choose the codecs of a running plan anew, its stages as they are; answers LinksChosen or
    LinksFailed with the same attempt. ``training``: its ``compress`` may be capped."""

    job: str
    attempt: int
    plan: Plan
    training: TrainingSpec
    fleet: Fleet


@dataclass(frozen=True, slots=True)
class JudgeFleet:
    """Predict a running plan's step as it is and with a worker of ``fleet`` in one rank's place, for each of
    ``swaps`` (rank, worker). Plan the job on its ``own`` workers alone, and on all of ``fleet``, unless
    there are none. Answers FleetJudged or FleetFailed with the same attempt."""

    job: str
    attempt: int
    plan: Plan
    spec: JobSpec
    fleet: Fleet
    swaps: tuple[tuple[int, str], ...]
    own: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OpenAggregator:
    """Start the process that sums a federated job's updates, or start it anew; answers AggregatorOpened
    or AggregatorBroke. ``state`` "": the job's initial tensors."""

    job: str
    spec: JobSpec
    round: int
    state: str
    n_clients: int


@dataclass(frozen=True, slots=True)
class HostSums:
    """Sums in whole numbers from a host that trained the clients in ``samples``: the blob of the arrays, the
    loads of the terms and the scalars in their units. ``grid``: the clients and registered samples that fix
    the grid, (0, 0) those of the round; ``age``: models since they began; ``base``: the blob of the broadcast
    that they began with, where a strategy needs it."""

    blob: str
    samples: Mapping[str, int]
    loads: Mapping[str, int]
    scalars: Mapping[str, int]
    grid: tuple[int, int] = (0, 0)
    age: int = 0
    base: str = ""


@dataclass(frozen=True, slots=True)
class Opening:
    """All that takes the masks off a secure round's sum: the exchange and its members' public keys, who
    shared secrets, and by member who answered the shares of its neighbours' secrets. ``drawn``: clients, and
    their registered samples, which fix the grid."""

    exchange: str
    roster: Mapping[str, MemberKeys]
    shared: tuple[str, ...]
    shares: Mapping[str, Mapping[str, str]] = field(repr=False)
    drawn: int
    drawn_samples: int
    seed: int  # of the codec, the same for all


@dataclass(frozen=True, slots=True)
class AggregateRound:
    """Sum these updates; answers Aggregated or AggregatorBroke. ``codecs``: codec and ratio that each
    client was told; ``n_samples``: what it registered; with fewer than ``least`` good updates nothing
    changes. ``drawn``: registered samples of a population's clients in this round, whose ``sums`` come by
    host; without, updates are summed in floats. ``weights``: of updates that count less than whole.
    ``bases``: blobs of the broadcasts that updates began with, where that was an older one. ``opening``: the
    updates are masked, and all of them are summed or none."""

    job: str
    round: int
    attempt: int
    updates: Mapping[str, UpdateReady]
    codecs: Mapping[str, tuple[str, float]]
    n_samples: Mapping[str, int]
    n_clients: int
    least: int
    sums: Mapping[str, HostSums] = field(default_factory=dict)
    drawn: Mapping[str, int] | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    bases: Mapping[str, str] = field(default_factory=dict)
    opening: Opening | None = None


@dataclass(frozen=True, slots=True)
class EvaluateModel:
    """The model after ``round`` rounds on the owner's held-out data; answers CentrallyEvaluated."""

    job: str
    round: int


@dataclass(frozen=True, slots=True)
class CloseAggregator:
    job: str


@dataclass(frozen=True, slots=True)
class DropBlobs:
    """Updates that were counted or refused: their blobs may go, where nothing else names them."""

    blobs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CloseSession:
    worker: str
    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class MemberMoved:
    """A worker's membership changed, or its process started anew; app runs want to know."""

    worker: str
    phase: str
    job: str  # it is assigned to
    restarted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A point of a job's metrics."""

    job: str
    step: int
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Notify:
    """The job changed: its watchers want to know."""

    job: str


@dataclass(frozen=True, slots=True)
class SweepBlobs:
    """A checkpoint replaced an older one: blobs that no job needs may go."""


@dataclass(frozen=True, slots=True)
class Log:
    """A structured event for the log; ``job`` "" where it concerns none."""

    event: str
    level: str = "info"
    job: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


def line_of(fact: Fact) -> Log | None:
    """The log line of a fact that nothing else tells people."""
    match fact:
        case Evaluated(job, step, loss):
            return Log(Name.EVALUATED.value, job=job, fields={"step": step, "loss": loss})
        case RoundEvaluated(job, at_round, where, loss):
            fields = {"round": at_round, "where": where, "loss": loss}
            return Log(Name.EVALUATED.value, job=job, fields=fields)
        case CheckpointStored(job, step, tensors):
            fields = {"step": step, "tensors": len(tensors)}
            return Log(Name.CHECKPOINT_STORED.value, job=job, fields=fields)
        case Reconfigured(job, version, step, base, _, newcomers, reason):
            fields = {"version": version, "base": base, "step": step, "reason": reason}
            return Log(Name.RECONFIGURED.value, job=job, fields={**fields, "ranks": list(newcomers)})
        case WorkRejected(job, step, worker, reason):
            fields = {"step": step, "worker": worker, "reason": reason}
            return Log(Name.WORK_REJECTED.value, "warning", job, fields)
        case CheckpointTorn(job, step, reason):
            fields = {"step": step, "reason": reason}
            return Log(Name.CHECKPOINT_TORN.value, "warning", job, fields)
    return None


Instruction = (
    SendTo
    | Journal
    | ReadJob
    | MakePlan
    | ChooseLinks
    | JudgeFleet
    | OpenAggregator
    | AggregateRound
    | EvaluateModel
    | CloseAggregator
    | DropBlobs
    | CloseSession
    | MemberMoved
    | Measured
    | Notify
    | SweepBlobs
    | Log
)
