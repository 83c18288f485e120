"""States, events and instructions of a job's machine, ``pipeline.machine``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from atoll.exchange import Exchange
from atoll.job import JobSpec
from atoll.plan import LinkSpec, Plan, Prediction, StagePrediction
from atoll.step_loss import StepLoss
from coordinator.messages.events import StageMessage, StepReady
from coordinator.messages.facts import Checkpoint, Fact
from coordinator.messages.held_out import HeldOut
from coordinator.messages.instructions import Relink, StepCommit, StepDiscard, StepStart

MessageT = TypeVar("MessageT", bound=StageMessage, covariant=True)


class Phase(StrEnum):
    """Phase of a job, in the words that users see."""

    QUEUED = "queued"
    PROFILING = "profiling"
    PLANNING = "planning"
    LOADING = "loading"
    TRAINING = "training"
    EVALUATING = "evaluating"
    STORING = "storing"
    GATHERING = "gathering"  # federated: clients load, or too few are here
    CONSENTING = "awaiting consent"  # federated: too few are here, and data owners were asked
    AGGREGATING = "aggregating"  # federated: updates are being summed
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


WAITING = frozenset({Phase.QUEUED, Phase.PAUSED})
PREPARING = frozenset({Phase.PROFILING, Phase.PLANNING})
RUNNING = frozenset({Phase.LOADING, Phase.TRAINING, Phase.EVALUATING, Phase.STORING})
GATHERS = frozenset({Phase.GATHERING, Phase.CONSENTING})
FEDERATING = GATHERS | {Phase.TRAINING, Phase.AGGREGATING, Phase.EVALUATING}
STEPPING = frozenset({Phase.TRAINING, Phase.EVALUATING})
ENDED = frozenset({Phase.FINISHED, Phase.FAILED, Phase.CANCELLED})

RECENT = 21  # times of steps, or of rounds, kept for medians
MAX_FAILURES = 3  # of stages, or of the aggregator, without a committed step or a closed round in between
RESTART_GRACE_S = 15.0  # for the workers of a running job to come back after our restart


BESIDE = 1 << 31
"""Versions of plans from here on are of nobody who trains: who repeats steps beside a plan is given one."""


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Picked:
    """The scheduler begins to prepare this job."""

    reason: str


UNFIT = "waits for a fleet that suffices"
"""Beginning of the reason of a job that stays queued until more machines come."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The job cannot go on yet, and why; a changed reason is news."""

    reason: str


@dataclass(frozen=True, slots=True)
class Profiled:
    """The fleet's figures are there."""


@dataclass(frozen=True, slots=True)
class Planned:
    plan: Plan


@dataclass(frozen=True, slots=True)
class FromRank(Generic[MessageT]):
    """A message of the worker that has ``rank`` under the current plan."""

    rank: int
    message: MessageT


class Cause(StrEnum):
    """Why a running job goes on with another plan."""

    LOST = "lost"  # a worker is gone, or the whole run must stop where it is
    BROKEN = "broken"  # a stage failed by itself, or somebody may have had it fail
    WRONG = "wrong"  # steps were computed wrong
    UNFIT = "unfit"  # the plan needs more memory than its workers have
    CHOSEN = "chosen"  # nobody is lost

    @property
    def counts(self) -> bool:
        """Whether such changes without a step in between end a job at last."""
        return self not in (Cause.UNFIT, Cause.CHOSEN)


WORTH = 1.5  # seconds that a plan change saves, over those that it takes


@dataclass(frozen=True, slots=True)
class Price:
    """Price of a plan change: the seconds that the job stands still, and that each later step saves.

    ``pause_s``: to notice, plan and load, and for what is done again; then each of the ``left`` steps takes
    ``saved_s`` less than its ``usual_s``. ``why``: what the pause is made of; ``again``: steps that all do
    again; ``copy``: where who takes over has its stage's part of the checkpoint from.
    """

    pause_s: float = 0.0
    usual_s: float = 0.0
    saved_s: float = 0.0
    left: int = 0
    why: str = ""
    again: int = 0
    copy: str = ""

    @property
    def late_s(self) -> float:
        """Seconds by which the job would end later, below 0 sooner."""
        return self.pause_s - self.saved_s * self.left

    def pays(self, least: float = 0.0) -> bool:
        """Whether a change is worth its pause, and saves at least a share of a step."""
        return self.saved_s >= least * self.usual_s and self.saved_s * self.left > WORTH * self.pause_s


@dataclass(frozen=True, slots=True)
class PlanChange:
    """From a job's plan to the next; what follows for each worker is the difference of the two.

    ``plan``: under the version that it has then; None: what the planner makes of the fleet as it is then.
    ``sources``: what ranks load and repeat steps from; all others hold their stages, as standbys perhaps. Of
    a plan that is to be made every rank's. ``suspects``: of what the change is for, beside those who go.
    ``for_now``: nobody takes over what is lost, but who joins might. ``price``: free where nobody has asked.
    """

    plan: Plan | None
    sources: Mapping[int, Checkpoint]
    cause: Cause
    reason: str
    suspects: frozenset[str] = frozenset()
    for_now: bool = False
    price: Price = Price()

    @property
    def workers(self) -> tuple[str, ...]:
        """Workers by rank from then on, none where that is not known."""
        return tuple(place.worker for place in self.plan.places) if self.plan is not None else ()


@dataclass(frozen=True, slots=True)
class Seating:
    """A worker could take a lost peer's rank, or all could be given others: the next commit stores what they
    begin with, and the one after waits for that. ``wanted`` False: nothing of that any more."""

    wanted: bool


@dataclass(frozen=True, slots=True)
class LogsShort:
    """Somebody's send log does not reach back to the newest checkpoint any more."""


@dataclass(frozen=True, slots=True)
class LogsWanted:
    """Send logs are to reach back to ``first_step`` until further notice; None: to the newest checkpoint."""

    first_step: int | None


@dataclass(frozen=True, slots=True)
class Resumed:
    """After our restart every worker of the plan is back with its stage."""


@dataclass(frozen=True, slots=True)
class RingChanged:
    """What the ranks keep for each other, or are to, is this from now on."""

    ring: Ring


@dataclass(frozen=True, slots=True)
class Recovered:
    """A snapshot that the workers kept is whole in the store, and newer than the checkpoint."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class Torn:
    """The newest checkpoint cannot be loaded; ``before`` is the one to go on from."""

    before: Checkpoint
    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    reason: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The job itself cannot be run (its DAG is unreadable, its plan impossible)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Relinked:
    """The links between the same stages shall use these codecs, as soon as a commit can say so."""

    links: tuple[LinkSpec, ...]
    reason: str


Event = (
    Picked
    | Waits
    | Profiled
    | Planned
    | FromRank[StageMessage]
    | PlanChange
    | Seating
    | LogsShort
    | LogsWanted
    | Resumed
    | RingChanged
    | Recovered
    | Torn
    | Cancelled
    | Broken
    | Relinked
)

# ---------------------------------------------------------------- what is to be done


@dataclass(frozen=True, slots=True)
class Record:
    """Make a fact durable before what follows."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class ToRanks:
    """A message to every rank of the plan, or to ``rank`` alone."""

    message: StepStart | StepCommit | StepDiscard
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """Every worker has the part of the plan that it has now: newcomers are given theirs, the others hear who
    their neighbours are, those who ``left`` it have none any more. Of a plan that is over all have."""

    left: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Point:
    """A metric's value after ``step`` committed steps."""

    step: int
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class OddLoss:
    """The loss of a committed step is not finite in some micro-batches, or nothing was counted in it."""

    step: int
    found: StepLoss

    @property
    def fields(self) -> dict[str, object]:
        """What a log line says of it."""
        figures = {"odd": self.found.odd, "of": self.found.count, "weight": self.found.weight}
        return {"step": self.step, **figures, "reason": self.found.words}


@dataclass(frozen=True, slots=True)
class Dropped:
    """A message that came late, twice or for another plan."""

    why: str


@dataclass(frozen=True, slots=True)
class LinksDue:
    """From ``relink.first_step`` on the links change, and why; ``before`` is what they use until then."""

    before: tuple[LinkSpec, ...]
    relink: Relink
    reason: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """A step that was reported as not finite, and is done again.

    ``tries``: the workers of each plan that computed it; ``suspects``: those of all of them, the likeliest
    first; ``said``: what the newest try reported, and where.
    """

    step: int
    tries: tuple[frozenset[str], ...]
    suspects: tuple[str, ...]
    said: str


@dataclass(frozen=True, slots=True)
class Redo:
    """Have the step in flight, which is doubted, done again by others where there are any."""

    reason: str


@dataclass(frozen=True, slots=True)
class Exclude:
    """Have the other peers repeat the round without these ranks, whose reports are not like the others'."""

    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Standby:
    """A worker beside the plan that repeats the steps of a rank; ``step``: so many are in its state, as it
    says, ``progress`` its heartbeat's. ``swap``: why it is to take the rank's place once it has caught up."""

    worker: str
    rank: int
    since_s: float
    step: int
    moved_s: float  # when ``step`` or ``progress`` was another last
    progress: int = 0
    loaded: bool = False  # it has repeated all that had to be when it was asked
    why: str = ""
    swap: str = ""
    saved_s: float = 0.0  # a step, once it has taken the place
    source: Checkpoint | None = None  # what it began with
    heard: bool = False  # what its heartbeats say is about this assignment, no longer about one before
    nearest: tuple[int, int] | None = None  # since it repeats steps: the fewest behind, and after which step


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after ``step`` committed steps on workers' own disks: each rank's part on its worker's and on
    another's. ``keepers``: both, by rank; ``parts``: of those ranks that have reported theirs."""

    step: int
    asked_s: float
    plan: Plan
    keepers: tuple[tuple[str, str], ...]
    parts: Mapping[int, Mapping[str, str]] = field(default_factory=dict)  # rank -> tensor -> blob

    @property
    def whole(self) -> bool:
        """Whether every rank has its part on disk."""
        return len(self.parts) == len(self.keepers)


@dataclass(frozen=True, slots=True)
class Ring:
    """Snapshots that the ranks of a plan keep for each other (``pipeline.ring``). ``due``: who is to keep
    what the next commit asks for; ``taking``: one that is not with all of these yet; ``held``: the newest
    that is. ``took_s``: from its commit until then. ``failed``: why the last one was given up."""

    due: tuple[tuple[str, str], ...] = ()
    taking: Snapshot | None = None
    held: Snapshot | None = None
    took_s: float = 0.0
    part_bytes: int = 0  # of the largest part
    asked_s: float = 0.0  # when the last one was
    failed: str = ""


Todo = Record | ToRanks | Exclude | Placed | Redo | Point | OddLoss | Dropped | LinksDue


@dataclass(frozen=True, slots=True)
class OwnSteps:
    """How far a peer is within a period, each of whose steps is committed for it alone."""

    step: int  # the next one; behind the period's last its round is to come
    taken: int | None = None  # steps that it brings to that, where they are fewer than the period's
    ready: Mapping[int, StepReady] = field(default_factory=dict)  # by rank
    commit: StepCommit | None = None  # the newest
    figures: Mapping[int, StepReady] = field(default_factory=dict)  # of the step before, by rank


@dataclass(frozen=True, slots=True)
class Running:
    """What is known of the plan that runs; an adopted one begins with nothing of the plan before."""

    assigned: int = 0  # version under which the plan was adopted, or last reconfigured, ...
    first_step: int = -1  # ... and the first step under it; -1: not known after a restart
    moving: bool = False  # reconfigured, and not all have loaded since
    source: Checkpoint | None = None  # that newcomers begin with while they load
    loaded: frozenset[int] = frozenset()
    promoted: Mapping[int, Checkpoint | None] = field(default_factory=dict)  # ranks whose workers stood by
    # for them until then, and what these began with
    load_s: Mapping[int, float] = field(default_factory=dict)  # that loading took, by rank, ...
    fetched_s: Mapping[int, float] = field(default_factory=dict)  # ... and of that, fetching its tensors
    ready: Mapping[int, StepReady] = field(default_factory=dict)
    own: Mapping[int, OwnSteps] = field(default_factory=dict)  # of peers whose steps are committed, by number
    # Commits since the newest checkpoint that peers have heard, of own steps and of rounds, by number, ...
    heard: Mapping[int, tuple[StepCommit, ...]] = field(default_factory=dict)
    alike_from: int = -1  # ... and the first step of the periods since which the same peers exchange
    quorum_s: float | None = None  # since when as many of them as the round waits for have their last one
    last_commit: StepCommit | None = None
    awaiting_eval: int | None = None  # step whose evaluation is running
    eval_owed: bool = False  # one was dropped: the next commit asks for another
    begun_s: float | None = None  # when the step in flight began
    step_times_s: tuple[float, ...] = ()
    reports: Mapping[int, StepReady] = field(default_factory=dict)  # of the last committed step
    wanted: Relinked | None = None  # waits for a commit that can carry it
    relink: Relink | None = None  # said with a commit, not begun
    lineage: tuple[tuple[int, int], ...] = ()  # (version, its first step) on the stages of this plan
    lost: Mapping[int, str] = field(default_factory=dict)  # why, by absent rank
    seating: bool = False  # a peer is to join after the checkpoint that is asked for, with or before a commit
    unfit: bool = False  # the plan does not fit: no step begins, the one in flight is stored and planned anew


@dataclass(frozen=True, slots=True)
class Storing:
    """Checkpoints under way, and when the next one is due."""

    part_bytes: Mapping[int, int] = field(default_factory=dict)  # of the newest checkpoint's tensors, by rank
    owed: bool = False  # the next commit asks for a checkpoint
    parts: Mapping[int, Mapping[int, Mapping[str, str]]] = field(default_factory=dict)  # step -> rank -> ...
    unstored: Mapping[str, int] = field(default_factory=dict)  # since the last whole checkpoint: parts that a
    # worker could not store
    due_s: float = 0.0  # when training without ``checkpoint_every`` stores next
    asked_s: float = 0.0  # when the newest checkpoint was asked for


@dataclass(frozen=True, slots=True)
class Stumbled:
    """Times that stages failed by themselves at ``step``, though steps before it were repeated in between."""

    step: int = 0
    times: int = 0

    def again(self, step: int) -> Stumbled:
        """Count a failure at a step, or at the one before or behind: what is committed by then differs."""
        known = self.times and abs(step - self.step) <= 1
        return Stumbled(self.step, self.times + 1) if known else Stumbled(step, 1)


@dataclass(frozen=True, slots=True)
class JobState:
    """State of a job; ``step`` is the step in flight, so ``step`` steps are committed."""

    job: str
    spec: JobSpec
    checkpoint: Checkpoint
    created_s: float
    phase: Phase = Phase.QUEUED
    reason: str = "just submitted"
    version: int = 0
    step: int = 0
    plan: Plan | None = None
    run: Running = Running()
    storing: Storing = Storing()
    logs_from: int | None = None  # step from which on somebody repeats steps beside the plan
    loss: float | None = None
    odd: str = ""  # words about the newest step whose loss was not all finite
    eval_loss: float | None = None
    eval_metrics: Mapping[str, float] = field(default_factory=dict)  # the job's own, of the same rows
    held_out: HeldOut = field(default_factory=HeldOut)
    coded_loss: float | None = None  # the same, through the links' codecs
    failures: int = 0  # since the last committed step, ...
    broken: int = 0  # ... and of these, stages that failed by themselves
    stumbled: Stumbled = Stumbled()
    failed: tuple[str, ...] = ()  # workers whose stages failed by themselves since then, once for each time
    doubt: Doubt | None = None  # of a step that was not finite, until it is committed
    disputes: tuple[frozenset[str], ...] = ()  # suspects of each time that results were not the same
    standbys: Mapping[int, Standby] = field(default_factory=dict)  # by rank
    ring: Ring = Ring()

    @property
    def back_to(self) -> int:
        """Return the step from which the job goes on when nobody can take over: that of the newest
        checkpoint, or of the newest snapshot that the workers keep for each other."""
        held = self.ring.held
        return max(self.checkpoint.step, held.step if held is not None else 0)

    @property
    def adopted(self) -> Plan:
        """The plan, of a job that has one; LookupError where nothing was planned yet."""
        if self.plan is None:
            raise LookupError(f"{self.job} has no plan while it is {self.phase.value}")
        return self.plan

    @property
    def workers(self) -> tuple[str, ...]:
        """Workers by rank, lost peers too; none without a plan."""
        return tuple(place.worker for place in self.plan.places) if self.plan is not None else ()

    @property
    def prediction(self) -> Prediction | None:
        """What was predicted of the plan that runs."""
        return self.plan.prediction if self.plan is not None else None

    @property
    def predicted(self) -> tuple[StagePrediction, ...]:
        """What was predicted of each rank, nothing where that is not known."""
        stages = self.prediction.stages if self.prediction is not None else ()
        return stages if len(stages) == self.n_ranks else ()

    @property
    def next_version(self) -> int:
        """Version of the next plan: above every one that was sent."""
        return max(self.version, self.run.relink.version if self.run.relink is not None else 0) + 1

    @property
    def n_ranks(self) -> int:
        return len(self.plan.places) if self.plan else 0

    def rank_of(self, worker: str) -> int | None:
        """Return the rank that the job's plan gives a worker, None when it gives it none."""
        return self.plan.rank_of(worker) if self.plan else None

    @property
    def present(self) -> tuple[int, ...]:
        """Ranks that have a worker: all of them, unless peers are lost that have no successor."""
        return self.plan.present if self.plan else ()

    def stumbling(self, cause: Cause) -> Stumbled:
        """Count a stage that failed by itself, if it did. Peers are judged by who diverges in a period."""
        return self.stumbled.again(self.step) if cause is Cause.BROKEN and not self.local else self.stumbled

    @property
    def local(self) -> bool:
        """Whether the plan's peers take steps of their own."""
        return self.plan is not None and self.plan.local

    @property
    def due(self) -> int:
        """The step that is committed next: the one in flight, or the last of the period of local steps."""
        return self.plan.last_step(self.step, self.steps) if self.plan else self.step

    def due_of(self, rank: int) -> tuple[int, bool]:
        """Return the step that a rank commits next, and whether that is a period's round after all of its own
        steps: of a peer of several stages its own, else the job's."""
        if self.step >= self.steps:  # all are over
            return self.step, False
        if self.plan is None or not self.plan.in_pipe(rank):
            return self.due, False
        own = self.run.own.get(self.plan.places[rank].replica)
        step = own.step if own is not None else self.step
        return min(step, self.due), step > self.due

    def steps_of(self, rank: int) -> int:
        """Return how many steps of a rank are committed: of a peer of several stages its own as well."""
        own = None
        if self.plan is not None and self.plan.in_pipe(rank):
            own = self.run.own.get(self.plan.places[rank].replica)
        return own.step if own is not None else self.step

    @property
    def repeats_own(self) -> bool:
        """Whether a peer's own steps can be repeated: those that are committed, where all messages of a round
        leave behind the last of its period."""
        exchange = self.plan.exchange if self.plan is not None and self.plan.piped else None
        return exchange is not None and not exchange.delay and not exchange.gossips

    @property
    def store_ranks(self) -> frozenset[int]:
        """Ranks that store a checkpoint: those of the first replica, as all hold the same; of peers and
        replicas with states of their own all that are there."""
        if self.plan is None or self.local or self.plan.keeps:
            return frozenset(self.present)
        return frozenset(rank for rank, place in enumerate(self.plan.places) if not place.replica)

    @property
    def steps(self) -> int:
        return self.spec.training.steps

    @property
    def replay_from(self) -> int:
        """Return the first step whose messages somebody may still ask for."""
        if self.local and not self.repeats_own:
            return self.due + 1
        checked = self.checkpoint.step if self.logs_from is None else self.logs_from
        return min([self.checkpoint.step, checked, *(standby.step for standby in self.standbys.values())])

    def standby_of(self, worker: str) -> Standby | None:
        """Return what a worker stands by for, None where it does not."""
        return next((s for s in self.standbys.values() if s.worker == worker), None)

    @property
    def median_step_s(self) -> float | None:
        """Median of the last steps' times, None before the second commit."""
        return (
            sorted(self.run.step_times_s)[len(self.run.step_times_s) // 2] if self.run.step_times_s else None
        )

    @property
    def usual_step_s(self) -> float:
        """Seconds of a step: the median of the last ones, as predicted before the second commit; 0 where
        neither is known."""
        return self.median_step_s or (self.prediction.step_s if self.prediction is not None else 0.0)


def moved(
    state: JobState,
    workers: Sequence[str],
    newcomers: Iterable[int],
    cause: Cause,
    reason: str,
    *,
    absent: frozenset[int] | None = None,
    exchange: Exchange | None = None,
) -> PlanChange:
    """Return that these workers have the ranks from now on, of which ``newcomers`` begin with the checkpoint.
    ``absent``: ranks of lost peers, which the others go on without. ``exchange``: in place of the one there
    is."""
    absent = state.adopted.absent if absent is None else absent
    plan = state.adopted.moved(state.next_version, workers, absent, exchange)
    return PlanChange(plan, dict.fromkeys(sorted(newcomers), state.checkpoint), cause, reason)


def anew(
    state: JobState,
    reason: str,
    cause: Cause = Cause.LOST,
    before: Checkpoint | None = None,
    suspects: frozenset[str] = frozenset(),
    *,
    for_now: bool = False,
) -> PlanChange:
    """Return that the job is planned anew, on the fleet as it is then, and goes on from the checkpoint;
    ``before``: from that one."""
    sources = dict.fromkeys(range(state.n_ranks), before or state.checkpoint)
    return PlanChange(None, sources, cause, reason, suspects, for_now=for_now)
