"""Lock of a state folder: at most one daemon, and which process to ask to leave."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import UsageError
from hostos.files.folder_lock import FolderLock, Holder, holder_of
from worker.config import make_state_dir

LOCK_FILE = "running"


@contextmanager
def only_one(state_dir: Path) -> Iterator[None]:
    """Hold the folder's lock. UsageError when another daemon does: two with one identity would
    throw each other out; StorageError when the folder cannot be written."""

    def refusal(holder: Holder) -> str:
        return (
            f"another worker (process {holder.process or '?'}) runs from {state_dir}; give this one its own "
            "--state-dir, or stop that one with `atoll-worker leave`"
        )

    make_state_dir(state_dir)
    lock = FolderLock(state_dir / LOCK_FILE, refusal)
    try:
        yield
    finally:
        lock.release()


def running_process(state_dir: Path) -> int | None:
    """The process that holds the folder's lock, None when none does."""
    holder = holder_of(state_dir / LOCK_FILE)
    return holder.process if holder is not None else None


def ask_to_leave(state_dir: Path) -> int:
    """Send SIGTERM to the daemon of this folder; returns its process. UsageError when none runs."""
    process = running_process(state_dir)
    if process is None:
        raise UsageError(f"no worker runs from {state_dir}; name the right one with --state-dir")
    try:
        os.kill(process, signal.SIGTERM)
    except OSError as error:
        raise UsageError(f"process {process} cannot be asked to leave: {error.strerror}") from None
    return process


def signal_consent_changed(state_dir: Path) -> bool:
    """Have the daemon of this folder, if one runs, look at what its owner accepts again."""
    process = running_process(state_dir)
    if process is None:
        return False
    try:
        os.kill(process, signal.SIGUSR1)
    except OSError:
        return False
    return True
