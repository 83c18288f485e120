"""Processes of a fleet on this machine, found by the locks of their state folders."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from atoll.errors import UsageError
from coordinator.server import LOCK_FILE as COORDINATOR_LOCK
from hostos.files.folder_lock import holder_of

WORKER_LOCK = "running"  # as worker.cli.running has it
COMPUTE = "worker.compute"
GONE_S, LOOK_EVERY_S = 10.0, 0.01


def serves(folder: Path) -> bool:
    """Return whether a state folder is a coordinator's."""
    return (folder / COORDINATOR_LOCK).is_file()


@dataclass(frozen=True, slots=True)
class Member:
    """A coordinator or a worker whose state lies in ``folder``."""

    name: str
    folder: Path

    def process(self) -> psutil.Process | None:
        """Return the process that holds the folder, None when none does."""
        for lock in (COORDINATOR_LOCK, WORKER_LOCK):
            holder = holder_of(self.folder / lock) if (self.folder / lock).is_file() else None
            if holder is not None and holder.process is not None:
                with suppress(psutil.NoSuchProcess):
                    return psutil.Process(holder.process)
        return None

    def family(self) -> list[psutil.Process]:
        """Return the process and all that it started."""
        process = self.process()
        if process is None:
            return []
        with suppress(psutil.NoSuchProcess):
            return [process, *process.children(recursive=True)]
        return []

    def computing(self) -> list[psutil.Process]:
        """Return the processes that compute for a worker, without the guards above them."""
        found = [p for p in self.family() if _computes(p)]
        above = {parent for p in found if (parent := _parent(p)) is not None}
        return [p for p in found if p.pid not in above]


def _computes(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return COMPUTE in process.cmdline()
    return False


def _parent(process: psutil.Process) -> int | None:
    with suppress(psutil.Error):
        return int(process.ppid())
    return None


def kill(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL, and wait until none of them runs."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline_s = time.monotonic() + GONE_S
    while any(map(lives, processes)) and time.monotonic() < deadline_s:
        time.sleep(LOOK_EVERY_S)


def lives(process: psutil.Process) -> bool:
    """Return whether a process runs or stands still: not a zombie, which only waits to be asked for."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def frozen(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Have them stand still: SIGSTOP, and SIGCONT at the end."""
    try:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        yield
    finally:
        for process in reversed(processes):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


@contextmanager
def full_disk(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Have every write to a file fail, as on a full disk: the soft bound of a file's size is 0.

    UsageError where this system has no such bound for other processes.
    """
    if not hasattr(psutil.Process, "rlimit"):
        raise UsageError("this system cannot bound other processes' files; leave disk out of --kinds")
    before: list[tuple[psutil.Process, tuple[int, int]]] = []
    try:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                soft, hard = process.rlimit(psutil.RLIMIT_FSIZE)
                process.rlimit(psutil.RLIMIT_FSIZE, (0, hard))
                before.append((process, (soft, hard)))
        yield
    finally:
        for process, limits in before:
            with suppress(psutil.NoSuchProcess):
                process.rlimit(psutil.RLIMIT_FSIZE, limits)
