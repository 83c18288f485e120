"""The stored states of a job, as the owner's calls see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import UsageError
from protos import atoll_control_pb2 as pb

if TYPE_CHECKING:
    from coordinator.messages.facts import Checkpoint, JobRecord
    from coordinator.shell import Shell


def chosen(record: JobRecord, step: int | None) -> tuple[Checkpoint, ...]:
    """The job's checkpoint of ``step``, or all that are kept, oldest first; UsageError without one."""
    kept = record.kept
    if step is None:
        return kept
    found = tuple(c for c in kept if c.step == step)
    if not found:
        steps = ", ".join(str(c.step) for c in kept) or "none yet"
        raise UsageError(
            f"{record.submitted.job} has no checkpoint of step {step}; kept are: {steps}. A job keeps its "
            "newest two and the best; --set checkpoint_every=N at submit makes them more frequent"
        )
    return found


def exported(record: JobRecord, request: pb.ResultRequest) -> Checkpoint:
    """The state that an export asks for, the newest where it does not say; UsageError where it is not
    kept, and for the best one of a job that has no held-out loss."""
    if request.HasField("step"):
        return chosen(record, request.step)[0]
    if not request.best:
        return record.last_checkpoint
    job, found = record.submitted.job, record.best
    if record.held_out.best is None:
        training = record.submitted.spec.training
        raise UsageError(
            f"{job} has no held-out loss to be the best by: it evaluates {training.eval_batches} "
            f"micro-batches every {training.eval_every} steps; leave --step out for the newest weights, or "
            "submit with eval_batches, eval_every and held-out data"
        )
    if found is None:
        raise UsageError(f"{job} has stored no checkpoint since it was first evaluated; wait for the next")
    return found


def described(
    shell: Shell, job: str, checkpoints: tuple[Checkpoint, ...], *, hashes: bool
) -> list[pb.Checkpoint]:
    """Size and state of each; ``hashes``: after reading them to the last byte. StorageError, BadFrame when
    the job's own graph cannot be read."""
    record, blobs = shell.scheduler.ledger.jobs[job], shell.blobs
    spec, best = record.submitted.spec, record.best
    return [
        pb.Checkpoint(
            step=c.step,
            at_s=c.at_s,
            torn=shell.graphs.torn(spec, c.tensors, hashes=hashes),
            bytes=sum(blobs.held(blob) for blob in set(c.tensors.values())),
            tensors=len(c.tensors),
            best=c == best,
        )
        for c in checkpoints
    ]
