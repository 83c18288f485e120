"""How glibc keeps freed memory: of chunks in a daemon, of tensors in a compute process.

glibc gives freed megabytes back to the kernel and takes them again for the next chunk; the page
faults of that cost a third of a loopback link's rate.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Sequence

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
KEEP_BYTES = 64 << 20
TENSOR_BYTES = 2 << 20
"""In a compute process every block of this size is its own mapping, of large pages, which cost a step next to
nothing. From 512 KiB on a ResNet's activations cost 40 % of its CPU time for 5 % less memory."""
KEPT_BYTES = 4 << 20
LARGE_BYTES = 32 << 20
"""From here on every block is its own mapping, as tensors want it; glibc allows no more."""


def keep_chunk_memory() -> bool:
    """Make glibc keep up to 64 MiB; False on other platforms, where nothing changes."""
    return _set(
        (
            (_M_MMAP_THRESHOLD, LARGE_BYTES),
            (_M_TRIM_THRESHOLD, KEEP_BYTES),
            (_M_TOP_PAD, KEEP_BYTES // 4),
            # Chunks are made in one thread and freed in another: separate arenas only hoard them.
            (_M_ARENA_MAX, 1),
        )
    )


def keep_no_tensors() -> bool:
    """Make glibc give a tensor's memory back when it is freed; False on other platforms.

    By itself it learns from the first large block that is freed to keep all below 32 MiB in a heap, where
    tensors that live long lie between those that do not. A stage's peak was up to half as high again as what
    it held.
    """
    return _set(((_M_MMAP_THRESHOLD, TENSOR_BYTES), (_M_TRIM_THRESHOLD, KEPT_BYTES), (_M_ARENA_MAX, 1)))


def give_back() -> None:
    """Return what is free in the heap to the system, also between blocks that are not."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _set(options: Sequence[tuple[int, int]]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    results = [mallopt(option, value) for option, value in options]
    return all(result == 1 for result in results)
