"""Keeps chunk-sized memory in the process between chunks.

glibc gives freed megabytes back to the kernel and takes them again for the next chunk; the page
faults of that cost a third of a loopback link's rate.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
KEEP_BYTES = 64 << 20
LARGE_BYTES = 32 << 20
"""From here on every block is its own mapping, as tensors want it; glibc allows no more."""


def keep_chunk_memory() -> bool:
    """Make glibc keep up to 64 MiB; False on other platforms, where nothing changes."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = (
        (_M_MMAP_THRESHOLD, LARGE_BYTES),
        (_M_TRIM_THRESHOLD, KEEP_BYTES),
        (_M_TOP_PAD, KEEP_BYTES // 4),
        # Chunks are made in one thread and freed in another: separate arenas only hoard them.
        (_M_ARENA_MAX, 1),
    )
    results = [mallopt(option, value) for option, value in wanted]
    return all(result == 1 for result in results)


def give_back() -> None:
    """Return what is free in the heap to the system: after a round a client waits, often for long."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
