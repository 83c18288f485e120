"""`atoll-worker leave --forget`: everything that this machine holds of a fleet is removed, and named."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.errors import UsageError
from hostos.files.folder_lock import FolderLock
from hostos.files.refusals import disk
from worker.cli.manners import LOOK_S
from worker.cli.running import LOCK_FILE, running_process

if TYPE_CHECKING:
    from pathlib import Path

WHAT = {
    "identity": "certificate and key",
    "settings.toml": "settings",
    "worker.json": "settings",
    "applied.json": "what held of them",
    "blobs": "cached tensors of jobs",
    "compute": "scratch files of computing",
    "weights": "which checkpoints were added",
    "data": "registered data sets, the worker's copies",
    "apps": "apps, and what they kept",
    "federated": "client state of federated jobs",
    "send_log": "what stages sent",
    "devices": "what is kept for further devices: what their stages sent, measured speeds",
    "consent": "jobs that asked, and the owner's word on each",
    "log": "the log of when a terminal showed what it did",
    "departures": "the log of what left",
    "codec_speed.json": "measured speeds",
    "version": "the folder's version",
}
LEFT_S = 10.0


@dataclass(frozen=True, slots=True)
class Removed:
    """A name in the state folder that is gone, with what it held, and its bytes."""

    name: str
    what: str
    bytes: int


def await_left(folder: Path, process: int) -> None:
    """Wait until the daemon that was asked to leave is gone. UsageError when it does not go."""
    until_s = time.monotonic() + LEFT_S
    while running_process(folder) == process:
        if time.monotonic() > until_s:
            raise UsageError(f"process {process} has not left within {LEFT_S:g} s; nothing was removed")
        time.sleep(LOOK_S)


def forget(folder: Path) -> tuple[list[Removed], list[str]]:
    """Remove all that a worker has put into its state folder; returns that, and the names of other things,
    which stay.

    UsageError when a worker runs from it, StorageError naming what cannot be removed.
    """
    if not folder.is_dir():
        return [], []
    lock = FolderLock(
        folder / LOCK_FILE, lambda holder: f"a worker (process {holder.process}) runs from {folder}"
    )
    try:
        removed = [_remove(folder / name, what) for name, what in WHAT.items() if (folder / name).exists()]
        (folder / LOCK_FILE).unlink(missing_ok=True)
    finally:
        lock.release()
    rest = sorted(path.name for path in folder.iterdir())
    if not rest:
        folder.rmdir()
    return removed, rest


def _remove(path: Path, what: str) -> Removed:
    with disk(f"remove {path}", "remove it yourself"):
        if path.is_symlink() or not path.is_dir():
            nbytes = path.lstat().st_size
            path.unlink()
        else:
            nbytes = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
            shutil.rmtree(path)
    return Removed(path.name, what, nbytes)
