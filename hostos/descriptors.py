"""Files and connections that this process may hold open at once, and for what they are kept.

A connection takes one, whoever opened it. So what strangers may open is bounded by what this process may hold
less what it needs for itself: else a flood takes the last one, and no file opens any more.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import UsageError

if sys.platform != "win32":  # which counts its handles otherwise
    import resource

LISTED_IN = (Path("/proc/self/fd"), Path("/dev/fd"))  # Linux, macOS
START = 16  # opened while a coordinator starts: listeners, event loops, metrics
FEWEST_FILES, MOST_FILES = 8, 1024  # journal, blobs, logs, pipes to children
FEWEST_CONNECTIONS = 12  # of all ports together
UNBOUNDED = 1 << 20  # where the system counts none


@dataclass(frozen=True, slots=True)
class Shares:
    """Connections that each port may hold; what is left of the limit is this process's own."""

    entry: int
    work: int
    relay: int


def shares(limit: int, in_use: int, *, relay: bool) -> Shares:
    """Part ``limit`` descriptors, of which ``in_use`` are open before the ports are.

    UsageError where they are too few to run. ``relay``: there is one here.
    """
    free = limit - in_use - START
    files = min(MOST_FILES, max(FEWEST_FILES, free // 4))
    connections = free - files
    if connections < FEWEST_CONNECTIONS:
        needed = in_use + START + FEWEST_FILES + FEWEST_CONNECTIONS
        raise UsageError(
            f"this process may hold {limit} files and connections open at once, and needs at least {needed}: "
            f"raise the hard limit of open files (as root `ulimit -Hn {max(4096, needed)}` before the start, "
            "LimitNOFILE= of a service, `ulimits: nofile` of a container)"
        )
    other = connections // 4
    own_relay = other if relay else 0
    return Shares(other, connections - other - own_relay, own_relay)


def raise_limit(wanted: int) -> int:
    """Let this process open ``wanted`` descriptors, or as many as its hard limit allows; return how many it
    may open now."""
    if sys.platform == "win32":
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        with contextlib.suppress(ValueError, OSError):  # some systems cap it below the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def limit_now() -> int:
    """Descriptors that this process may hold open."""
    if sys.platform == "win32":
        return UNBOUNDED
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return UNBOUNDED if soft == resource.RLIM_INFINITY else min(soft, UNBOUNDED)


def numbers_in_use() -> list[int]:
    """Numbers of the open descriptors; where the list itself cannot be opened, of all that may be open."""
    for path in LISTED_IN:
        with contextlib.suppress(OSError):
            return [int(name) for name in os.listdir(path)]
    return list(range(limit_now())) if sys.platform != "win32" else []
