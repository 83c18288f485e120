"""One daemon per state folder: a lock that also says which process to ask to leave."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import StorageError, UsageError
from worker.config import make_state_dir

LOCK_FILE = "running"


@contextmanager
def only_one(state_dir: Path) -> Iterator[None]:
    """Hold the folder's lock. UsageError when another daemon does: two with one identity would
    throw each other out; StorageError when the folder cannot be written."""
    path = state_dir / LOCK_FILE
    make_state_dir(state_dir)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; choose another --state-dir") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"another worker (process {_read(path) or '?'}) runs from {state_dir}; give this one its own "
                "--state-dir, or stop that one with `atoll-worker leave`"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def running_process(state_dir: Path) -> int | None:
    """The process that holds the folder's lock, None when none does."""
    path = state_dir / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _read(path)
    finally:
        os.close(descriptor)
    return None


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


def say_consent_changed(state_dir: Path) -> bool:
    """Have the daemon of this folder, if one runs, look at its list of accepted apps again."""
    process = running_process(state_dir)
    if process is None:
        return False
    try:
        os.kill(process, signal.SIGUSR1)
    except OSError:
        return False
    return True


def _read(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and len(text) < 12 else None
