"""Files and connections that this process may hold open at once, and for what they are kept.

A connection takes one, whoever opened it. So what strangers may open is bounded by what this process may hold
less what it needs for itself: else a flood takes the last one, and no file opens any more.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import UsageError

if sys.platform != "win32":  # which counts its handles otherwise
    import resource

LISTED_IN = (Path("/proc/self/fd"), Path("/dev/fd"))  # Linux, macOS
WORKER = 40  # that a worker cannot do without: with fewer gRPC ends the process
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


def hold_standard() -> None:
    """Make standard input, output and error such that nothing is lost in them, or written elsewhere.

    Closed ones become the null device: a file of ours that took their number would hold what libraries print.
    All of them wait; what the output's encoding lacks is shown as "?". What cannot be written to the error
    stream is lost.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # closed; the lowest free number is the next to be given
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        # Whoever shares a pipe may have it not wait for its reader. Python then drops what does not fit at
        # once, without an error, and the end of a long output is lost.
        with contextlib.suppress(OSError):
            os.set_blocking(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115 - for the process's life
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _Unfailing(sys.stderr)


class _Unfailing(io.TextIOWrapper):
    """An error stream that loses what cannot be written: its terminal has closed, its disk is full."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(
            stream.buffer, stream.encoding, stream.errors, line_buffering=True, write_through=True
        )
        self._stream = stream  # which would close the buffer with its last reference

    def write(self, text: str) -> int:
        """Write, or drop."""
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be."""
        with contextlib.suppress(OSError):
            super().flush()


def enough(limit: int) -> None:
    """UsageError where a worker cannot run with ``limit`` descriptors."""
    if limit < WORKER:
        raise UsageError(
            f"this process may hold {limit} files and connections open at once, and needs at least {WORKER}: "
            "raise the limit of open files (`ulimit -n`, LimitNOFILE= of a service, `ulimits: nofile` of a "
            "container)"
        )


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
