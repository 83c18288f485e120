"""Cores and memory that this process may use of its machine: its affinity, and what control groups allow.

Groups of version 1 and 2, from the process's own up to the root that it sees: the tightest of them counts. A
container sees its own group as the root; a service, a batch job or a login session is a group below it.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.errors import UsageError
from hostos.files.refusals import PROCESSES

WORKER_THREADS, COORDINATOR_THREADS = 32, 16
"""Threads and processes of one that computes nothing yet."""
GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
UNLIMITED_BYTES = 1 << 60  # version 1 writes nearly 2**63 where there is no limit


@dataclass(frozen=True, slots=True)
class Usable:
    """Cores that this process may use at once."""

    cores: float
    """At least 0.01; a share of one core under a quota."""
    period_s: float = 0.0
    """Period of the quota in seconds; 0 without one."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of one control group, in bytes."""

    limit: int
    free: int
    """What its processes may take yet: cached pages of files are given back for it."""


def usable(own: Path = OWN, groups: Path = GROUPS) -> Usable:
    """Return the tightest of its limits."""
    try:
        most = float(len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):  # not on every system
        most = float(os.cpu_count() or 1)
    limits = [Usable(most), *filter(None, map(_quota, _folders("cpu", own, groups)))]
    tightest = min(limits, key=lambda limit: limit.cores)
    return replace(tightest, cores=max(0.01, tightest.cores))


def threads_each(processes: int) -> int:
    """Return the threads with which each of so many processes computes, at least 1: together one for each
    core that they may use."""
    return max(1, math.ceil(usable().cores) // processes)


def check_threads(count: int) -> None:
    """UsageError where this process cannot start so many threads or processes: gRPC crashes or hangs without
    a word where it lacks one. They are started and ended, since every system counts other things."""
    over, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count):
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError):
        raise UsageError(
            f"this process can start {len(started)} threads or processes, and needs at least {count}: "
            f"{PROCESSES}; a limit of its memory (`ulimit -v`) counts too"
        ) from None
    finally:
        over.set()
        for thread in started:
            thread.join()


def memory_room(own: Path = OWN, groups: Path = GROUPS) -> Room | None:
    """Return the least limit and the least that is free in its groups; None where none has a limit."""
    rooms = list(filter(None, map(_room, _folders("memory", own, groups))))
    if not rooms:
        return None
    return Room(min(room.limit for room in rooms), min(room.free for room in rooms))


def _folders(controller: str, own: Path, groups: Path) -> Iterator[Path]:
    """Folders of this process's groups with ``controller``, and all above them."""
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        root = groups / controller if controllers else groups
        folder = root / path.strip("/")
        while folder != root:
            yield folder
            folder = folder.parent
        yield root


def _quota(folder: Path) -> Usable | None:
    """Cores that a group may use; None without a limit."""
    for name, other in (("cpu.max", ""), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = (folder / name).read_text(encoding="ascii").split()
            words += (folder / other).read_text(encoding="ascii").split() if other else []
            quota, period = float(words[0]), float(words[1])
        except (OSError, ValueError, IndexError):
            continue  # "max" too: not limited
        if quota > 0 and period > 0:
            return Usable(quota / period, period / 1e6)
    return None


def _room(folder: Path) -> Room | None:
    """Memory of a group; None without a limit. Processes beyond memory.high are not ended but halted, so it
    is a limit as well."""
    found = [_number(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    limits = [number for number in found if number is not None and number < UNLIMITED_BYTES]
    if not limits:
        return None
    limit = min(limits)
    held = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    return Room(limit, max(0, limit - max(0, held - _cached(folder))))


def _cached(folder: Path) -> int:
    """Bytes of files' pages in a group that nobody has used lately: the first that the kernel takes back."""
    with suppress(OSError, ValueError):
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        sizes = dict(line.split() for line in lines)
        # Of version 1 the plain number leaves out the groups below.
        return int(sizes.get("total_inactive_file", sizes.get("inactive_file", "0")))
    return 0


def _number(path: Path) -> int | None:
    """The number in a file; None for "max", and where there is no such file."""
    with suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None
