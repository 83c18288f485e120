"""Durable facts of jobs: what the journal keeps, and the Ledger that is their fold.

Everything a restarted coordinator must know is here; what is not (who is connected, which step is
in flight) is learnt again. ``Ledger.apply`` is the only way state changes, live or on replay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from atoll.errors import AtollError, StorageError
from atoll.exchange import Exchange
from atoll.job import JobSpec
from atoll.messages.from_worker import MOST_REPLAYED
from atoll.messages.to_worker import Era as Era
from atoll.plan import LinkSpec, Plan
from coordinator.messages.credits import Credits, Row, rows
from coordinator.messages.encoding import from_json, to_json
from coordinator.messages.federated_facts import NoisedAsked as NoisedAsked
from coordinator.messages.federated_facts import RoundClosed as RoundClosed
from coordinator.messages.federated_facts import RoundEvaluated as RoundEvaluated
from coordinator.messages.federated_facts import UpdateTaken as UpdateTaken
from coordinator.messages.held_out import HeldOut
from strategies.privacy.accountant import Spent

LINEAGE = 64  # versions remembered of one plan, for reports that come late
ENDED = ("finished", "failed", "cancelled")
STATE, MODEL = "federated/state", "federated/model"
"""Names in a federated job's checkpoint of the server's state and the newest global model."""


@dataclass(frozen=True, slots=True)
class Record:
    """An event: its kind, its time (seconds since the epoch), and its JSON-able content."""

    kind: str
    at_s: float
    payload: Mapping[str, Any]
    number: int = field(default=0, compare=False)  # in the journal that it was read from, from 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State after ``step`` committed steps: every tensor's blob, optimizer state inside."""

    step: int
    tensors: Mapping[str, str]
    at_s: float = 0.0  # seconds since the epoch; 0: unknown


@dataclass(frozen=True, slots=True)
class CoordinatorStarted:
    """A coordinator took command: what follows it wrote, until the next one did."""

    term: int  # from 1, rising


OWNER = "owner"
"""Name of who holds the coordinator's first owner token, which alone there was before there were others."""


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    job: str
    submission: str
    spec: JobSpec
    start_step: int
    start_tensors: Mapping[str, str]  # empty: the spec's own
    created_s: float


@dataclass(frozen=True, slots=True)
class PlanAdopted:
    job: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class LinksChanged:
    """From ``first_step`` on, the stages of the adopted plan exchange under ``version``."""

    job: str
    version: int
    first_step: int
    links: tuple[LinkSpec, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """From ``step`` on the plan of version ``base`` goes on under ``version`` with these workers by rank; the
    ranks in ``newcomers`` are given their stage from the newest checkpoint and repeat the steps since. Who
    has another rank's place without being one of these has stood by for it."""

    job: str
    version: int
    step: int
    base: int
    workers: tuple[str, ...]
    newcomers: tuple[int, ...]
    reason: str
    absent: tuple[int, ...] = ()  # ranks of lost peers, which the others go on without
    exchange: Exchange | None = None  # of the plan from now on; None: as it was
    plan: Plan | None = None  # where there are fewer replicas from then on, or one more: with their shares


@dataclass(frozen=True, slots=True)
class RatioCapped:
    """After ``step`` committed steps the guard found that codecs cost too much: no ratio above ``cap``."""

    job: str
    step: int
    cap: float


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """A step, and all that its commit says but new links, whose own fact follows it: after a restart workers
    hear it again."""

    job: str
    version: int
    step: int  # from 0; step + 1 are committed
    loss: float
    at_s: float
    scale: float | None = None  # of gradients; None in journals of before, which lack the rest, too
    store: bool = False
    evaluate: bool = False
    last: bool = False
    coded: bool = False
    digests: tuple[str, ...] = ()  # by rank, in hex: of its gradients, then of what it was sent
    # By rank that is present, as the workers report it: milliseconds of computing, bytes, millijoules.
    computed_ms: tuple[int, ...] = ()
    sent_bytes: tuple[int, ...] = ()
    received_bytes: tuple[int, ...] = ()
    energy_mj: tuple[int, ...] = ()  # empty where nobody measures it


@dataclass(frozen=True, slots=True)
class RoundMet:
    """Receipt of the exchange round that ended the period of local steps up to ``step``: the workers whose
    contributions its result holds, and why those of others are ``missing``. Follows the commit's fact."""

    job: str
    version: int
    step: int
    round: int
    included: tuple[str, ...]
    missing: Mapping[str, str]  # worker -> why
    sent_bytes: int  # by all of them together
    digest: str  # of the result; of several groups theirs
    at_s: float
    groups: tuple[tuple[int, ...], ...] = ()  # ranks that exchanged with each other, where not all with all
    late: Mapping[str, int] = field(default_factory=dict)  # by first worker: of whom there are fewer steps


@dataclass(frozen=True, slots=True)
class SpotChecked:
    """``by`` has repeated a rank's steps from ``first_step`` to ``step`` - 1 and arrived at the same."""

    job: str
    rank: int
    first_step: int
    step: int
    by: str


@dataclass(frozen=True, slots=True)
class WorkRejected:
    """``worker`` computed a step wrong: those from ``step`` on are done anew, and newer checkpoints do not
    count."""

    job: str
    step: int
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    job: str
    step: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    counts: bool = False  # for the best one; not in journals of before, whose best checkpoint may be gone


@dataclass(frozen=True, slots=True)
class CheckpointStored:
    """The manifest: written when every stage's tensors are whole in the store, never before."""

    job: str
    step: int
    tensors: Mapping[str, str]
    at_s: float = 0.0  # 0: written before 0.4.0


@dataclass(frozen=True, slots=True)
class CheckpointTorn:
    """A checkpoint cannot be loaded any more, and why: the one before it counts."""

    job: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobEnded:
    job: str
    outcome: str  # one of ENDED
    reason: str


@dataclass(frozen=True, slots=True)
class JobForgotten:
    """Nothing of an ended job is kept any more; no other job gets its name."""

    job: str


JobFact = (
    JobSubmitted
    | PlanAdopted
    | LinksChanged
    | Reconfigured
    | RatioCapped
    | StepCommitted
    | RoundMet
    | SpotChecked
    | WorkRejected
    | Evaluated
    | CheckpointStored
    | CheckpointTorn
    | NoisedAsked
    | UpdateTaken
    | RoundClosed
    | RoundEvaluated
    | JobEnded
)
Fact = CoordinatorStarted | JobForgotten | JobFact
_KINDS: dict[str, type[Fact]] = {kind.__name__: kind for kind in get_args(Fact)}
"""Facts by their names in journals. One that is renamed keeps its old name here as well, before the new one,
which alone is written."""
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_record(fact: Fact, at_s: float) -> Record:
    """Return the journal's form of a fact."""
    return Record(_NAMES[type(fact)], at_s, to_json(fact))


def from_record(record: Record) -> Fact | None:
    """Return the fact that ``to_record`` wrote, None for a record of somebody else (tokens, workers).

    StorageError when it is damaged.
    """
    kind = _KINDS.get(record.kind)
    if kind is None:
        return None
    try:
        return from_json(kind, record.payload)
    except (TypeError, KeyError, ValueError, AttributeError, AtollError) as error:
        raise StorageError(f"the journal holds a damaged {record.kind} event: {error}") from error


@dataclass(frozen=True, slots=True)
class Cast:
    """From ``first_step`` on, these workers hold the stages, by rank."""

    first_step: int
    workers: tuple[str, ...]


@dataclass(slots=True)
class JobRecord:
    """Durable knowledge of a job."""

    submitted: JobSubmitted
    plan: Plan | None = None
    version: int = 0  # the highest that was said
    assigned: int = 0  # under which the plan was adopted, or last reconfigured
    steps: int = 0  # committed
    loss: float | None = None
    eval_loss: float | None = None
    eval_metrics: Mapping[str, float] = field(default_factory=dict)
    held_out: HeldOut = field(default_factory=HeldOut)
    cap: float | None = None  # largest ratio that the guard allows
    # Of the plan adopted last: (version, first step) since, its newest commit, and what that asked for.
    lineage: tuple[tuple[int, int], ...] = ()
    since: tuple[int, ...] = ()  # by rank: the version under which its worker was given its stage
    moving: bool = False  # reconfigured, and no step was committed since
    commit: StepCommitted | None = None
    met: RoundMet | None = None  # the newest round of peers with local steps
    relink: LinksChanged | None = None  # said, not begun
    awaiting_eval: int | None = None
    storing: tuple[int, ...] = ()  # steps whose checkpoint is not whole yet
    # What repeating the steps since the newest checkpoint takes: versions of then, and each step's scale.
    eras: tuple[Era, ...] = ()
    scales: list[float] = field(default_factory=list)  # of the newest steps, at most 2 x MOST_REPLAYED
    digests: list[tuple[str, ...]] = field(default_factory=list)  # of the same steps, by rank; () unknown
    casts: tuple[Cast, ...] = ()  # who computed them
    agreed: tuple[
        int, ...
    ] = ()  # by rank: steps that have last been repeated by another with the same result
    checkpoints: tuple[Checkpoint, ...] = ()  # oldest first: the newest ``keep``, ``sound`` and ``best``
    closed: tuple[RoundClosed, ...] = ()  # the same of a federated job's rounds
    waiting: Mapping[str, UpdateTaken] = field(default_factory=dict)  # to be summed, by name, as they came
    spent: Spent = field(default_factory=Spent)  # of a private job
    evaluated: dict[str, RoundEvaluated] = field(default_factory=dict)  # newest by where
    bytes_up: int = 0
    bytes_down: int = 0
    outcome: str = ""
    reason: str = ""

    def given(self, rank: int) -> int:
        """Return the version under which a rank's worker was given its stage."""
        return self.since[rank] if rank < len(self.since) else self.assigned

    @property
    def sound(self) -> Checkpoint:
        """The newest state that no rank had gone beyond when it was last found to compute as others do."""
        through = min(self.agreed, default=self.start.step)
        return next((c for c in reversed(self.checkpoints) if c.step <= through), self.start)

    @property
    def best(self) -> Checkpoint | None:
        """The kept state that is the fewest steps away from the best held-out loss, of two the older."""
        found = self.held_out.best
        return (
            min(self.checkpoints, key=lambda c: abs(c.step - found.step), default=None)
            if found is not None
            else None
        )

    def worker_at(self, rank: int, step: int) -> str:
        """Return who computed a rank's part of a step since the newest checkpoint, "" unknown."""
        cast = next((cast for cast in reversed(self.casts) if cast.first_step <= step), None)
        return cast.workers[rank] if cast is not None and rank < len(cast.workers) else ""

    @property
    def has_result(self) -> bool:
        """Return whether there are weights beyond the submitted ones."""
        return bool(self.checkpoints or self.closed or self.submitted.start_tensors)

    @property
    def last_checkpoint(self) -> Checkpoint:
        """The newest complete state; the submitted tensors when nothing was stored yet."""
        return self.kept[-1] if self.checkpoints or self.closed else self.start

    @property
    def kept(self) -> tuple[Checkpoint, ...]:
        """Stored states that can be gone back to, oldest first; of a federated job those after rounds."""
        rounds = (Checkpoint(r.round + 1, {STATE: r.state, MODEL: r.model}, r.at_s) for r in self.closed)
        return (*self.checkpoints, *rounds)

    @property
    def start(self) -> Checkpoint:
        """The state that the job began with."""
        s = self.submitted
        return Checkpoint(s.start_step, s.start_tensors or s.spec.tensors, s.created_s)

    @property
    def blobs(self) -> set[str]:
        """Every blob that the job needs."""
        spec = self.submitted.spec
        found = {spec.dag_hash, spec.eval_dag_hash, *spec.tensors.values()}
        found.update(self.submitted.start_tensors.values())
        for data in (spec.data, spec.eval_data):
            if data is not None:
                found.update(f.blob for f in data.fields)
        for checkpoint in self.kept:
            found.update(checkpoint.tensors.values())
        for taken in self.waiting.values():
            found.update((taken.update.update, taken.model))
        return found - {""}


def began(lineage: tuple[tuple[int, int], ...], version: int, step: int) -> tuple[tuple[int, int], ...]:
    """Return the lineage of a plan that goes on under ``version`` from ``step`` on."""
    return (*(era for era in lineage if era[1] < step), (version, step))[-LINEAGE:]


@dataclass(slots=True)
class Ledger:
    """The fold over all facts."""

    keep: int = 2  # checkpoints of one job
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    submissions: dict[str, str] = field(default_factory=dict)
    superseded: set[str] = field(default_factory=set)  # blobs of checkpoints that were replaced, of jobs gone
    term: int = 0  # of the coordinator that started last
    forgotten: set[str] = field(default_factory=set)  # jobs: workers that were away may still hold them
    credits: Credits = field(default_factory=Credits)

    def apply(self, fact: Fact) -> None:
        """Take in one fact; KeyError when it speaks of a job that no fact made."""
        match fact:
            case CoordinatorStarted(term):
                self.term = term
            case JobSubmitted():
                start = fact.start_step
                self.jobs[fact.job] = JobRecord(fact, steps=start)
                if fact.submission:
                    self.submissions[fact.submission] = fact.job
            case JobForgotten(job):
                self.superseded |= self.jobs.pop(job).blobs
                self.submissions = {key: of for key, of in self.submissions.items() if of != job}
                self.forgotten.add(job)
            case _:
                self._apply_to_job(self.jobs[fact.job], fact)

    def _apply_to_job(self, job: JobRecord, fact: JobFact) -> None:
        name, owner = job.submitted.job, job.submitted.spec.owner
        match fact:
            case PlanAdopted(_, plan):
                self.credits.taken_back(name, owner, job.last_checkpoint.step)
                job.plan, job.version, job.assigned = plan, plan.version, plan.version
                job.steps = job.last_checkpoint.step
                job.lineage, job.commit, job.relink = ((plan.version, job.steps),), None, None
                job.awaiting_eval, job.storing = None, ()
                job.since, job.moving = (plan.version,) * len(plan.places), False
                links = plan.links if len(plan.replicas) == 1 else ()
                job.eras, job.scales, job.digests = (Era(plan.version, job.steps, links),), [], []
                workers = tuple(place.worker for place in plan.places)
                job.casts = (Cast(job.steps, workers),)
                # The cut may be another one: what is agreed of all stages holds for each.
                through = min((*job.agreed, job.steps), default=0) if job.agreed else job.start.step
                job.agreed = (through,) * len(workers)
            case LinksChanged():
                job.version, job.relink = fact.version, fact
            case Reconfigured():
                self._reconfigure(job, fact)
            case RatioCapped():
                job.cap = fact.cap
            case StepCommitted():
                self._commit(job, fact)
            case RoundMet():
                job.met = fact
            case SpotChecked(_, rank, _, step):
                job.agreed = tuple(
                    max(known, step) if at == rank else known for at, known in enumerate(job.agreed)
                )
            case WorkRejected(_, step):
                self._reject(job, step)
            case Evaluated():
                job.eval_loss, job.eval_metrics = fact.loss, fact.metrics
                if fact.counts:
                    job.held_out = job.held_out.after(fact.step, fact.loss)
                if fact.step == job.awaiting_eval:
                    job.awaiting_eval = None
            case CheckpointStored(_, step, tensors, at_s):
                job.storing = tuple(done for done in job.storing if done > step)
                self._forget_before(job, step)
                job.checkpoints = (*job.checkpoints, Checkpoint(step, tensors, at_s))
                # However old: what to go back to where newer ones turn out to be wrong, and the best one.
                kept = (job.sound, job.best, *job.checkpoints[-self.keep :])
                for old in job.checkpoints:
                    if old not in kept:
                        self.superseded.update(old.tensors.values())
                job.checkpoints = tuple(c for c in job.checkpoints if c in kept)
                self.credits.stored(name, [c.step for c in job.checkpoints])
            case CheckpointTorn(_, step):
                for old in job.checkpoints:
                    if old.step == step:
                        self.superseded.update(old.tensors.values())
                job.checkpoints = tuple(c for c in job.checkpoints if c.step != step)
            case NoisedAsked():
                job.spent = fact.privacy
            case UpdateTaken():
                self._waits(job, fact)
            case RoundClosed():
                self._close(job, fact)
                self.credits.closed(owner, fact.at_s, fact.took_s, fact.participants, fact.dropped)
            case RoundEvaluated(_, _, where, loss, _):
                job.evaluated[where] = fact
                if where == "central" or "central" not in job.evaluated:
                    job.eval_loss = loss
            case JobEnded(_, outcome, reason):
                job.outcome, job.reason = outcome, reason
                self.credits.ended(name, owner, job.last_checkpoint.step)
                self._counted(job, job.waiting)

    def _commit(self, job: JobRecord, fact: StepCommitted) -> None:
        if job.plan is not None:
            done, batch = range(min(job.steps, fact.step), fact.step + 1), job.submitted.spec.data.batch
            reports = (fact.computed_ms, fact.sent_bytes, fact.received_bytes, fact.energy_mj)
            self.credits.committed(fact.job, job.plan, done, batch, fact.at_s, reports)
        job.steps, job.loss, job.commit, job.moving = fact.step + 1, fact.loss, fact, False
        self._scaled(job, fact)
        if fact.evaluate:
            job.awaiting_eval = job.steps
        if fact.store:
            job.storing = (*job.storing, job.steps)
        change = job.relink
        if change is not None and job.steps >= change.first_step:
            job.plan = job.plan.relinked(change.version, change.links) if job.plan is not None else None
            job.lineage = (*job.lineage, (change.version, change.first_step))[-LINEAGE:]
            job.eras = (*job.eras, Era(change.version, change.first_step, change.links))[-LINEAGE:]
            job.relink = None

    def _scaled(self, job: JobRecord, fact: StepCommitted) -> None:
        if fact.scale is None:  # a journal of before: what led to this step cannot be repeated
            job.scales, job.digests = [], []
            return
        job.scales.append(fact.scale)
        job.digests.append(fact.digests)
        if len(job.scales) >= 2 * MOST_REPLAYED:
            del job.scales[:MOST_REPLAYED]
        del job.digests[: max(0, len(job.digests) - len(job.scales))]

    def _reject(self, job: JobRecord, step: int) -> None:
        """Take back steps since ``step``, their checkpoints, and the plan that goes on from there."""
        job.plan, job.commit, job.relink, job.moving = None, None, None, False
        for newer in job.checkpoints:
            if newer.step > step:
                self.superseded.update(newer.tensors.values())
        job.checkpoints = tuple(c for c in job.checkpoints if c.step <= step)
        job.agreed = tuple(min(through, step) for through in job.agreed)
        job.held_out = job.held_out.until(step)

    def _forget_before(self, job: JobRecord, step: int) -> None:
        """Nobody repeats steps in front of a newer checkpoint."""
        del job.scales[: max(0, len(job.scales) - max(0, job.steps - step))]
        del job.digests[: max(0, len(job.digests) - max(0, job.steps - step))]
        past = [cast for cast in job.casts if cast.first_step <= step][:-1]
        job.casts = tuple(cast for cast in job.casts if cast not in past)
        over = [era for era in job.eras if era.first_step <= step][:-1]
        job.eras = tuple(era for era in job.eras if era not in over)

    def _reconfigure(self, job: JobRecord, fact: Reconfigured) -> None:
        if job.plan is None:
            return
        if fact.plan is not None:
            self._share_anew(job, job.plan, fact.plan, fact.step)
        kept = {rank for rank in range(len(fact.workers)) if rank not in fact.newcomers}
        if any(job.plan.places[rank].worker != fact.workers[rank] for rank in kept):
            job.storing = ()  # who has stood by stores nothing of steps before
        plan, absent = fact.plan or job.plan, frozenset(fact.absent)
        job.plan = plan.moved(fact.version, fact.workers, absent, fact.exchange)
        job.since = tuple(
            fact.version if rank in fact.newcomers else job.given(rank) for rank in range(len(fact.workers))
        )
        job.version, job.assigned, job.moving = fact.version, fact.version, True
        job.lineage = began(job.lineage, fact.version, fact.step)
        links = job.plan.links if len(job.plan.replicas) == 1 else ()
        eras = tuple(era for era in job.eras if era.first_step < fact.step)
        job.eras = (*eras, Era(fact.version, fact.step, links))[-LINEAGE:]
        casts = tuple(cast for cast in job.casts if cast.first_step < fact.step)
        job.casts = (*casts, Cast(fact.step, fact.workers))[-LINEAGE:]
        job.relink, job.awaiting_eval = None, None

    @staticmethod
    def _share_anew(job: JobRecord, before: Plan, after: Plan, step: int) -> None:
        """Have a plan go on with fewer replicas, or with one more: ranks have other numbers, and steps before
        ``step`` cannot be repeated."""
        ranks = after.ranks_in(before)
        job.since = tuple(0 if rank is None else job.given(rank) for rank in ranks)
        # Who is new begins with what all the others have computed.
        through = min(job.agreed)
        job.agreed = tuple(through if rank is None else job.agreed[rank] for rank in ranks)
        stores = job.storing if before.storers == after.storers else ()
        due = step > job.last_checkpoint.step and step not in stores
        job.storing = (*stores, step) if due else stores
        job.plan, job.eras = after, ()

    def _close(self, job: JobRecord, fact: RoundClosed) -> None:
        kept = (*job.closed, fact)
        for old in kept[: -self.keep]:
            self.superseded.update((old.state, old.model))
        job.closed = kept[-self.keep :]
        job.steps, job.loss = fact.round + 1, fact.loss
        job.spent = fact.privacy or job.spent
        if fact.waits is None:  # a journal of before
            self._counted(job, (*fact.participants, *fact.dropped))
        else:
            self._counted(job, job.waiting.keys() - {*fact.waits})
        for told in fact.participants.values():
            job.bytes_up += int(told.get("bytes_up", 0))
            job.bytes_down += int(told.get("bytes_down", 0))

    def _waits(self, job: JobRecord, taken: UpdateTaken) -> None:
        """Have an update wait. A client that trained again has no other: the one before was refused."""
        same = [n for n, held in job.waiting.items() if held.members.keys() & taken.members.keys()]
        self._counted(job, [name for name in same if name != taken.name])
        job.waiting = {**job.waiting, taken.name: taken}

    def _counted(self, job: JobRecord, names: Iterable[str]) -> None:
        """Let go of what these updates rested on."""
        gone = [job.waiting[name] for name in names if name in job.waiting]
        self.superseded.update(blob for taken in gone for blob in (taken.update.update, taken.model))
        job.waiting = {name: taken for name, taken in job.waiting.items() if taken not in gone}

    def take_superseded(self, keep: Collection[str] = ()) -> set[str]:
        """Blobs of what was replaced or forgotten that nothing refers to any more; handed out once. Those of
        ``keep`` are left for the next time."""
        found = self.superseded - self.referenced_blobs()
        self.superseded = found.intersection(keep)
        return found - self.superseded

    def given(self, since: str = "") -> list[Row]:
        """Return what workers have given to whose jobs, from a day on."""
        jobs = {name: (r.submitted.spec.owner, r.last_checkpoint.step) for name, r in self.jobs.items()}
        return rows(self.credits, jobs, since)

    def copy(self) -> Ledger:
        """Return the same state, which facts to come do not change."""
        jobs = {
            name: replace(
                job, evaluated=dict(job.evaluated), scales=list(job.scales), digests=list(job.digests)
            )
            for name, job in self.jobs.items()
        }
        return replace(
            self,
            jobs=jobs,
            submissions=dict(self.submissions),
            superseded=set(self.superseded),
            forgotten=set(self.forgotten),
            credits=self.credits.copy(),
        )

    def referenced_blobs(self) -> set[str]:
        """Every blob that some job still needs."""
        return set[str]().union(*(job.blobs for job in self.jobs.values()))
