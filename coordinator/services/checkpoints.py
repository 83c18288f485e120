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
            "newest two; --set checkpoint_every=N at submit makes them more frequent"
        )
    return found


def described(
    shell: Shell, job: str, checkpoints: tuple[Checkpoint, ...], *, hashes: bool
) -> list[pb.Checkpoint]:
    """Size and state of each; ``hashes``: after reading them to the last byte. StorageError, BadFrame when
    the job's own graph cannot be read."""
    spec, blobs = shell.scheduler.ledger.jobs[job].submitted.spec, shell.blobs
    return [
        pb.Checkpoint(
            step=c.step,
            at_s=c.at_s,
            torn=shell.graphs.torn(spec, c.tensors, hashes=hashes),
            bytes=sum(blobs.held(blob) for blob in set(c.tensors.values())),
            tensors=len(c.tensors),
        )
        for c in checkpoints
    ]
