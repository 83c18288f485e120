"""Locks on open files, which the kernel drops with the process; what has none of them is refused in words."""

from __future__ import annotations

from typing import IO

from atoll.errors import UsageError

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

REFUSED = "Atoll needs the file locks of Linux or macOS; on Windows run it in WSL: wsl --install -d Debian"


def lock(file: int | IO[str], *, shared: bool = False, wait: bool = True) -> None:
    """Lock an open file or descriptor.

    Raises BlockingIOError where another process has it and ``wait`` is false, OSError where its file system
    has no locks, UsageError on a system that has none.
    """
    if fcntl is None:
        raise UsageError(REFUSED)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
