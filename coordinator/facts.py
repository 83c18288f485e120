"""Durable facts of jobs: what the journal keeps, and the Ledger that is their fold.

Everything a restarted coordinator must know is here; what is not (who is connected, which step is
in flight) is learnt again. ``Ledger.apply`` is the only way state changes, live or on replay.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from atoll.errors import StorageError
from atoll.job import JobSpec
from atoll.plan import LinkSpec, Mask, Plan
from coordinator.journal import Record
from protos.convert import decode, encode

ENDED = ("finished", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State after ``step`` committed steps: every tensor's blob, optimizer state inside."""

    step: int
    tensors: Mapping[str, str]


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
class StepCommitted:
    job: str
    version: int
    step: int  # from 0; step + 1 are committed
    loss: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Evaluated:
    job: str
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class CheckpointStored:
    """The manifest: written when every stage's tensors are whole in the store, never before."""

    job: str
    step: int
    tensors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class JobEnded:
    job: str
    outcome: str  # one of ENDED
    reason: str


Fact = JobSubmitted | PlanAdopted | LinksChanged | StepCommitted | Evaluated | CheckpointStored | JobEnded
_KINDS: dict[str, type[Fact]] = {
    kind.__name__: kind
    for kind in (
        JobSubmitted,
        PlanAdopted,
        LinksChanged,
        StepCommitted,
        Evaluated,
        CheckpointStored,
        JobEnded,
    )
}


def to_record(fact: Fact, at_s: float) -> Record:
    """The journal's form of a fact."""
    payload: dict[str, Any] = {}
    for f in dataclasses.fields(fact):
        value = getattr(fact, f.name)
        if isinstance(value, JobSpec | Plan):
            payload[f.name] = base64.b64encode(encode(value)).decode()
        elif f.name == "links":
            payload[f.name] = [dataclasses.asdict(link) for link in value]
        else:
            payload[f.name] = dict(value) if isinstance(value, Mapping) else value
    return Record(type(fact).__name__, at_s, payload)


def from_record(record: Record) -> Fact | None:
    """The fact that ``to_record`` wrote, None for a record of somebody else (tokens, workers).

    StorageError when it is damaged.
    """
    kind = _KINDS.get(record.kind)
    if kind is None:
        return None
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in record.payload.items():
        hint = hints.get(name)
        if hint is JobSpec or hint is Plan:
            value = decode(hint, base64.b64decode(value))
        elif name == "links":
            value = _links(value)
        values[name] = value
    try:
        return kind(**values)
    except TypeError as error:
        raise StorageError(f"the journal holds a damaged {record.kind} event: {error}") from error


def _links(value: Any) -> tuple[LinkSpec, ...]:
    try:
        return tuple(LinkSpec(**{**link, "mask": Mask(link["mask"])}) for link in value)
    except (TypeError, KeyError, ValueError) as error:
        raise StorageError(f"the journal holds damaged links: {error}") from error


@dataclass(slots=True)
class JobRecord:
    """What is durably known of a job."""

    submitted: JobSubmitted
    plan: Plan | None = None
    version: int = 0
    steps: int = 0  # committed
    loss: float | None = None
    eval_loss: float | None = None
    checkpoints: tuple[Checkpoint, ...] = ()  # oldest first, at most ``keep``
    outcome: str = ""
    reason: str = ""

    @property
    def has_result(self) -> bool:
        """Whether there are weights beyond the submitted ones."""
        return bool(self.checkpoints or self.submitted.start_tensors)

    @property
    def last_checkpoint(self) -> Checkpoint:
        """The newest complete state; the submitted tensors when nothing was stored yet."""
        if self.checkpoints:
            return self.checkpoints[-1]
        s = self.submitted
        return Checkpoint(s.start_step, s.start_tensors or s.spec.tensors)


@dataclass(slots=True)
class Ledger:
    """The fold over all facts."""

    keep: int = 2  # checkpoints of one job
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    submissions: dict[str, str] = field(default_factory=dict)
    superseded: set[str] = field(default_factory=set)  # blobs of checkpoints that were replaced

    def apply(self, fact: Fact) -> None:
        """Take in one fact; KeyError when it speaks of a job that no fact made."""
        match fact:
            case JobSubmitted():
                start = fact.start_step
                self.jobs[fact.job] = JobRecord(fact, steps=start)
                if fact.submission:
                    self.submissions[fact.submission] = fact.job
            case _:
                self._apply_to_job(self.jobs[fact.job], fact)

    def _apply_to_job(self, job: JobRecord, fact: Fact) -> None:
        match fact:
            case PlanAdopted(_, plan):
                job.plan, job.version = plan, plan.version
                job.steps = job.last_checkpoint.step
            case LinksChanged():
                job.version = fact.version
                if job.plan is not None:
                    job.plan = dataclasses.replace(job.plan, version=fact.version, links=fact.links)
            case StepCommitted():
                job.steps, job.loss = fact.step + 1, fact.loss
            case Evaluated():
                job.eval_loss = fact.loss
            case CheckpointStored(_, step, tensors):
                kept = (*job.checkpoints, Checkpoint(step, tensors))
                for old in kept[: -self.keep]:
                    self.superseded.update(old.tensors.values())
                job.checkpoints = kept[-self.keep :]
            case JobEnded(_, outcome, reason):
                job.outcome, job.reason = outcome, reason

    def take_superseded(self) -> set[str]:
        """Blobs of replaced checkpoints that nothing refers to any more; handed out once."""
        found = self.superseded - self.referenced_blobs()
        self.superseded = set()
        return found

    def referenced_blobs(self) -> set[str]:
        """Every blob that some job still needs."""
        found: set[str] = set()
        for job in self.jobs.values():
            spec = job.submitted.spec
            found.update((spec.dag_hash, spec.eval_dag_hash))
            found.update(spec.tensors.values())
            found.update(job.submitted.start_tensors.values())
            for data in (spec.data, spec.eval_data):
                if data is not None:
                    found.update(f.blob for f in data.fields)
            for checkpoint in job.checkpoints:
                found.update(checkpoint.tensors.values())
        return found - {""}
