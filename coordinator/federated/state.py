"""What a federated job's machine knows, hears and wants: state, events, instructions of ``federation``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from atoll.federated import ConsentWord as Word
from atoll.federated import FederatedSpec
from atoll.job import JobSpec
from atoll.opdag import TensorMeta
from coordinator.federated.cohorts import Cohort
from coordinator.federated.makespan import HostTimes
from coordinator.federated.secure.books import Books
from coordinator.federated.sites.books import Sites
from coordinator.messages.events import (
    Aggregated,
    AggregatorBroke,
    AggregatorOpened,
    CentrallyEvaluated,
    ClientEvaluated,
    ClientMessage,
    Loaded,
    UpdateReady,
)
from coordinator.messages.facts import Checkpoint, RoundClosed, RoundEvaluated, UpdateTaken
from coordinator.messages.instructions import (
    AggregateRound,
    CloseAggregator,
    EvaluateModel,
    EvaluateRound,
    Model,
    OpenAggregator,
    RoundTaken,
    SecureOrder,
    TrainRound,
)
from coordinator.messages.jobs import (
    ENDED,
    Broken,
    Cancelled,
    Dropped,
    JobState,
    Phase,
    Point,
    Record,
    Running,
    Waits,
)
from strategies.privacy.accountant import Spent

VERSION = 1  # of every Participate: one job, one participation


@dataclass(frozen=True, slots=True)
class Client:
    """One client of a job, while it is here and afterwards. Figures are those of its last round."""

    worker: str
    n_samples: int  # that it registered
    called: str = ""  # its name among the job's clients, from which everything is drawn; "": ``worker``
    site: str = ""  # whose gateway may sum its updates; "": it sends for itself
    gateways: tuple[str, ...] = ()  # that may see them, by its data owner's leave
    population: str = ""  # hash of the data of the clients that it speaks for; "": it is one itself
    roster: Mapping[str, int] = field(default_factory=dict)  # their registered samples
    gone_s: float = -math.inf  # since when it is not present
    present: bool = True
    loaded: bool = False
    out: str = ""  # why it takes no part: until it joins anew, or with ``barred`` ever again
    failed_loads: int = 0  # in a row
    again_s: float = math.inf  # from when on it is invited once more though it could not load the job
    strikes: int = 0  # rounds in a row in which it failed; those of its certificate, not of its process
    barred: bool = False  # too many of them
    consent: Word | None = None  # its data owner's, where that is asked or has refused
    model: str = ""  # the broadcast it surely holds, by its full blob's hash
    latency_s: float = 0.0  # one way, from the coordinator's own round trips
    uplink_bps: float = 0.0  # over ``uplink_s`` of uploads, the older the less; 0: not measured
    uplink_s: float = 0.0
    download_s: float = 0.0  # of a round's model, smoothed; 0: not measured
    train_s: float = 0.0  # smoothed
    round_s: float = 0.0  # smoothed, from TrainRound to UpdateReady; 0: not measured
    took_s: float = 0.0  # ... of the last one
    codec: str = ""
    ratio: float = 1.0
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    dropped: str = ""  # why its last round was closed without it

    @property
    def members(self) -> Mapping[str, int]:
        """The clients that it speaks for, itself where the data are its own: registered samples by name."""
        return self.roster or {self.worker: self.n_samples}

    @property
    def ready(self) -> bool:
        return self.present and self.loaded and not self.out


def order_key(clients: Collection[str]) -> str:
    """Name of a set of clients."""
    return hashlib.sha256("\n".join(sorted(clients)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Flight:
    """What a worker was given to train: the number of the model and its broadcast, when, and until when the
    worker may answer. ``clients``: of a population, with what each of them may count; ``grid``: clients and
    registered samples that fix the grid of their sum."""

    round: int
    model: Model
    begun_s: float
    due_s: float
    clients: Mapping[str, int] = field(default_factory=dict)
    grid: tuple[int, int] = (0, 0)

    @property
    def key(self) -> str:
        """Name of its set of clients, "" where the worker trains for itself."""
        return order_key(self.clients) if self.clients else ""


@dataclass(frozen=True, slots=True)
class Order:
    """Clients of a population that a host trains now."""

    clients: tuple[str, ...]
    begun_s: float

    @property
    def key(self) -> str:
        """Name of this set of clients: a host that is given it again answers as before."""
        return order_key(self.clients)


MessageT = TypeVar("MessageT", bound=Loaded | ClientMessage, covariant=True)


@dataclass(frozen=True, slots=True)
class Invited:
    """A worker that holds the data was reserved for this job."""

    worker: str
    n_samples: int
    latency_s: float = 0.0
    name: str = ""  # that its owner gave it
    site: str = ""


@dataclass(frozen=True, slots=True)
class FromClient(Generic[MessageT]):
    """A message of a worker that takes part."""

    worker: str
    message: MessageT


@dataclass(frozen=True, slots=True)
class ClientBack:
    """A client's connection is back: what was under way to it is sent again."""

    worker: str


@dataclass(frozen=True, slots=True)
class ClientLost:
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The job's turn has come: its aggregator may start."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Nothing can be stored now; the job goes on at its round afterwards."""

    reason: str


Event = (
    Begin
    | AggregatorOpened
    | AggregatorBroke
    | Aggregated
    | CentrallyEvaluated
    | Invited
    | FromClient[Loaded | ClientMessage]
    | ClientBack
    | ClientLost
    | Tick
    | Waits
    | Interrupted
    | Cancelled
    | Broken
)

# ---------------------------------------------------------------- what is to be done


@dataclass(frozen=True, slots=True)
class Invite:
    """Say Participate."""

    worker: str


@dataclass(frozen=True, slots=True)
class Say:
    """One message to one client."""

    worker: str
    message: TrainRound | EvaluateRound | RoundTaken | SecureOrder


@dataclass(frozen=True, slots=True)
class Let:
    """This worker, or with "" every one, takes no part any more."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class ConsentNews:
    """A client's data owner was asked, agreed or refused. Until it agrees its worker is free for others."""

    worker: str
    word: Word
    reason: str
    graph: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Blobs of updates that were counted or refused."""

    blobs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Without:
    """A round goes on without this client; logged."""

    round: int
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A round is closed; logged."""

    fact: RoundClosed


Todo = (
    Record
    | OpenAggregator
    | AggregateRound
    | EvaluateModel
    | CloseAggregator
    | Invite
    | Say
    | Let
    | ConsentNews
    | Forget
    | Without
    | Closed
    | Point
    | Dropped
)


# ---------------------------------------------------------------- the state


@dataclass(frozen=True, slots=True)
class FederationState:
    """One federated job; ``round`` is the round in flight, so ``round`` rounds are closed."""

    job: str
    spec: JobSpec
    created_s: float
    phase: Phase = Phase.QUEUED
    reason: str = "just submitted"
    round: int = 0
    opened: bool = False  # the aggregator is there
    state: str = ""  # blob of the server's state before ``round``; "": the initial one
    model: Model | None = None  # the broadcast of ``round``
    inputs: Mapping[str, TensorMeta] = field(default_factory=dict)  # of the model
    up: tuple[TensorMeta, ...] = ()  # arrays of one update
    clients: Mapping[str, Client] = field(default_factory=dict)
    # the round in flight
    attempt: int = 0  # of whatever is awaited of the aggregator
    repeats: int = 0  # of this round
    chosen: tuple[str, ...] = ()
    ratios: Mapping[str, tuple[str, float]] = field(default_factory=dict)  # codec and ratio by client
    pace: str = ""  # why these ratios
    spread: float | None = None  # of finish times by plan, where all are to end together
    strayed: float = 0.0  # how much wider they come, smoothed
    updates: Mapping[str, UpdateReady] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    begun_s: float | None = None
    due_s: float = 0.0
    # ... of a population: ``chosen`` are hosts then, ``updates`` their sums
    cohort: Cohort | None = None
    orders: Mapping[str, Order] = field(default_factory=dict)  # by host
    counted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by host, of the last round
    homes: Mapping[str, str] = field(default_factory=dict)  # host of each client's state
    times: Mapping[str, HostTimes] = field(default_factory=dict)  # of hosts
    client_s: Mapping[str, float] = field(default_factory=dict)  # of a client's training, smoothed
    assignment: str = ""  # why who trains whom
    # ... asynchronous: ``updates`` wait to be summed, in the order in which they came; those of ``chosen``
    # are being summed
    flights: Mapping[str, Flight] = field(default_factory=dict)  # by worker that trains
    taken: Mapping[str, UpdateTaken] = field(default_factory=dict)  # what the journal has of ``updates``
    answered: Mapping[str, RoundTaken] = field(default_factory=dict)  # by worker: word on its last one
    orders_given: int = 0
    # ... secure: what its members were asked and have answered
    secure: Books | None = None
    # ... of sites that send one sum each: ``orders`` are of their gateways then
    sites: Sites | None = None
    gateways: Mapping[str, str] = field(default_factory=dict)  # by site, of the last round
    # an evaluation
    assessing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # a population's clients by host
    asking: bool = False  # for the selector, before a round; else of what a round brought
    asked: frozenset[str] = frozenset()
    asked_round: int = 0  # whose broadcast they evaluate
    told: Mapping[str, ClientEvaluated] = field(default_factory=dict)  # of the broadcast of ``asked_round``
    central: bool = False  # the owner's held-out data are being evaluated
    # what became of the last closed round: said again to whoever did not hear it
    verdicts: Mapping[str, str] = field(default_factory=dict)  # "" taken, else why not
    selector: Any = None
    awaited: frozenset[str] = frozenset()  # after a restart: clients of the last round
    secret: str = ""  # of the aggregator's life, for draws that nobody may guess
    spent: Spent = field(default_factory=Spent)  # of a private job: published releases
    hold_until_s: float = 0.0
    consent_due_s: float = 0.0  # when waiting for data owners ends; 0: no round waits for them
    failures: int = 0  # of the aggregator, without a closed round in between
    not_before_s: float = 0.0  # a paused job goes on then at the earliest
    # for people
    loss: float | None = None
    evaluation: RoundEvaluated | None = None  # on the clients
    central_evaluation: RoundEvaluated | None = None
    bytes_up: int = 0  # of all rounds
    bytes_down: int = 0
    round_times_s: tuple[float, ...] = ()
    last: RoundClosed | None = None

    @property
    def federated(self) -> FederatedSpec:
        assert self.spec.federated is not None  # noqa: S101 - the scheduler says so
        return self.spec.federated

    @property
    def opening(self) -> OpenAggregator:
        """The start of its aggregator before the round in flight."""
        return OpenAggregator(self.job, self.spec, self.round, self.state, max(1, len(self.clients)))

    @property
    def private(self) -> bool:
        """Whether clients' updates are known as a noised sum alone."""
        return self.federated.rule.privacy is not None

    @property
    def rounds(self) -> int:
        return self.spec.training.steps

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def ready(self) -> tuple[str, ...]:
        """Clients that can take part now."""
        return tuple(sorted(name for name, client in self.clients.items() if client.ready))

    @property
    def between_rounds(self) -> FederationState:
        """The same without what is of the round in flight alone."""
        return replace(self, chosen=(), cohort=None, secure=None, sites=None, orders={}, dropped={})

    @property
    def members(self) -> dict[str, int]:
        """Registered samples of all that could train now, by client."""
        ready = (self.clients[name] for name in self.ready)
        return {name: samples for client in ready for name, samples in client.members.items()}

    def called(self, client: str) -> str:
        """A client's name, the same however often the job runs: a worker's identity is made anew with its
        certificate, so nothing is drawn from it."""
        known = self.clients.get(client)
        return client if known is None else known.called or client

    def of_consent(self, word: Word) -> tuple[str, ...]:
        """Clients whose data owners answered this last."""
        return tuple(sorted(name for name, client in self.clients.items() if client.consent is word))

    def bars(self, worker: str) -> bool:
        """Whether this client may not take part any more, whatever process speaks for it."""
        client = self.clients.get(worker)
        return client is not None and client.barred

    def face(self) -> JobState:
        """The job as everything that is not about federated training sees it."""
        evaluation = self.central_evaluation or self.evaluation
        return JobState(
            self.job,
            self.spec,
            Checkpoint(self.round, {}),
            self.created_s,
            self.phase,
            self.reason,
            version=VERSION,
            step=self.round,
            loss=self.loss,
            eval_loss=evaluation.loss if evaluation is not None else None,
            run=Running(step_times_s=self.round_times_s),
        )
