"""Shared memory for tensors between the daemon and its compute process.

An arena is a file without a name that both map; its descriptor is inherited. One side allocates, the
other reads at the offsets that it is given. A file of a fixed size (sealed, on Linux) cannot be cut short
by the other side, which would kill whoever reads it. Memory is taken when it is written, not before.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from atoll.errors import BadFrame

ALIGNED = 64
PAGE = mmap.ALLOCATIONGRANULARITY
HEAD_BYTES = PAGE
"""What is not allocated, at the arena's begin: a page of status."""
GIVEN_BACK_BYTES = 16 << 20
"""An arena that is empty again returns its memory where it had used more."""

Block = NDArray[np.uint8]


class Arena:
    """A mapped arena of ``size`` bytes, the status page included."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        self._map = mmap.mmap(descriptor, size)
        self.head = memoryview(self._map)[:HEAD_BYTES]
        self._address = _address(np.frombuffer(self._map, np.uint8, 1))

    @classmethod
    def make(cls, size: int) -> Arena:
        """A new one of at least ``size`` bytes to allocate; ``descriptor`` is for the other side. OSError."""
        size = HEAD_BYTES + -(-size // PAGE) * PAGE
        descriptor = _sealed_file(size)
        try:
            return cls(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise

    def block(self, offset: int, size: int) -> Block:
        """The bytes [offset, offset + size). BadFrame when they are not in the arena."""
        if not HEAD_BYTES <= offset <= offset + size <= self.size:
            raise BadFrame(f"bytes {offset} to {offset + size} of an arena of {self.size}")
        return np.frombuffer(self._map, np.uint8, size, offset)

    def offset_of(self, block: Block) -> int | None:
        """Where a block begins; None when it does not lie in this arena."""
        offset = _address(block) - self._address
        return offset if 0 <= offset < self.size else None

    def give_back(self, first: int, last: int) -> None:
        """Return memory of the bytes [first, last) to the machine; they read as zeros then."""
        first, last = -(-first // PAGE) * PAGE, last // PAGE * PAGE
        if last > first and hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE, first, last - first)

    def close_descriptor(self) -> None:
        """Close the descriptor; the map stays as long as anything refers to it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Allocator:
    """Blocks of an arena, first fit from its begin; thread-safe.

    ``freed`` may be called where the interpreter collects what nobody refers to, in any thread and with
    any lock held, so it takes none: what it notes counts at the next allocation.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._lock = threading.Lock()
        self._taken: list[tuple[int, int]] = []  # (offset, end), ascending
        self._freed: list[int] = []
        self._highest = HEAD_BYTES

    def allocate(self, size: int) -> int | None:
        """Offset of a new block; None when there is no room. An empty block takes room, too."""
        wanted = max(ALIGNED, -(-size // ALIGNED) * ALIGNED)
        with self._lock:
            self._settle()
            at = HEAD_BYTES
            for index, (begin, end) in enumerate([*self._taken, (self.arena.size, self.arena.size)]):
                if begin - at >= wanted:
                    self._taken.insert(index, (at, at + wanted))
                    self._highest = max(self._highest, at + wanted)
                    return at
                at = end
            return None

    def freed(self, offset: int) -> None:
        """Take note that nobody uses the block at ``offset`` any more."""
        self._freed.append(offset)

    def tidy(self) -> None:
        """Return memory to the machine, where the arena is empty."""
        with self._lock:
            self._settle()

    def owned(self, offset: int, size: int) -> Block:
        """The block as an array that is freed with its last reference."""
        block = self.arena.block(offset, size)
        weakref.finalize(block, self.freed, offset).atexit = False
        return block

    def _settle(self) -> None:
        while self._freed:
            offset = self._freed.pop()
            at = bisect_left(self._taken, (offset, 0))
            if at < len(self._taken) and self._taken[at][0] == offset:
                del self._taken[at]
        if not self._taken and self._highest - HEAD_BYTES > GIVEN_BACK_BYTES:
            self.arena.give_back(HEAD_BYTES, self._highest)
            self._highest = HEAD_BYTES


def _address(block: Block) -> int:
    return int(block.__array_interface__["data"][0])


def _sealed_file(size: int) -> int:
    """Descriptor of a file of ``size`` zeros that has no name and cannot change its size."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            return os.dup(file.fileno())
    import fcntl

    descriptor = os.memfd_create("atoll-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor
