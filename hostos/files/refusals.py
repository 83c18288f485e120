"""What a disk and the limits of a process refuse, in words."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.errors import StorageError

ROOM = "free space or choose another --state-dir"
"""Remedy for a disk without room for the state folder."""
_FILES = "raise the limit of open files: `ulimit -n`, LimitNOFILE= of a service"
PROCESSES = "raise the limit of processes: `ulimit -u`, TasksMax= of a service, --pids-limit of a container"
_OF_LIMITS = {  # where another folder would change nothing
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.EFBIG: "raise the limit of a file's size, `ulimit -f`, or use a file system that has larger files",
    errno.EAGAIN: PROCESSES,  # of a fork
    errno.ENOMEM: "free memory, or raise its limit: `ulimit -v`, MemoryMax= of a service",
}
NO_THREAD = f"cannot start another thread; {PROCESSES}"


def refusal(error: OSError, doing: str, remedy: str = "") -> StorageError:
    """Return "cannot ``doing``: why; ``remedy``", or another remedy where a limit of the process is why."""
    remedy = _OF_LIMITS.get(error.errno or 0, remedy)
    return StorageError(f"cannot {doing}: {error.strerror or error}{remedy and f'; {remedy}'}")


@contextmanager
def disk(doing: str, remedy: str = "") -> Iterator[None]:
    """Use a disk within: what it refuses is raised as StorageError, as ``refusal`` puts it."""
    try:
        yield
    except OSError as error:
        raise refusal(error, doing, remedy) from None
