"""What workers say of copies on their disks: of stages, and of snapshots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyHeld:
    """A copy of a stage that a worker keeps whole on its disk, or the error for which it does not.

    ``name``: of ``instructions.StageCopy``; ``took_s``: to fetch ``fetched_bytes`` of it.
    """

    job: str
    name: str
    n_bytes: int = 0
    fetched_bytes: int = 0
    took_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class CopyStored:
    """A copy's blobs are in the store; ``error``: why they are not."""

    job: str
    name: str
    error: str = ""
