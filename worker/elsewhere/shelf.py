"""Saved activations of one micro-batch, put away in the forward and read again by the backward.

An op's backward reads what the op saved in the order in which it saved it, and two ops may share a tensor. So
reads are not writes reversed. Their order is the same for every micro-batch, and is learned from the first.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch

from atoll.errors import StorageError
from atoll.job import Place
from hostos.files.refusals import disk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from atoll.saved import Shelf

_READER = ThreadPoolExecutor(1, "atoll-read-ahead")
PAGE = 4096  # of files past the kernel's cache: whole ones, to and from addresses that are multiples of it
PIECE = 256 * PAGE  # written at once
SOON = 3  # a tensor that comes again within so many reads is held until then


class ReadOrder:
    """Numbers that the backward of the newest micro-batch has read, in this order."""

    def __init__(self) -> None:
        self._known: list[int] = []

    def next(self, at: int, number: int) -> list[int]:
        """Take note that read ``at`` of a micro-batch was of ``number``; return the next ones, as far as they
        are known."""
        if self._known[at : at + 1] != [number]:
            self._known[at:] = [number]
        return self._known[at + 1 : at + 1 + SOON]


class FileShelf:
    """File without a name, gone with the micro-batch. It is written and read, not mapped: mapped pages count
    as resident until they are dropped. What comes next by ``order`` is read ahead, once that is known.

    Where the file system can, bytes pass the kernel's cache by: its pages count as the worker's memory, and
    at the limit each write would wait until others are taken back.
    """

    def __init__(self, folder: Path | None, device: torch.device, order: ReadOrder | None = None) -> None:
        with tempfile.TemporaryFile(dir=folder) as file:
            self._file = os.dup(file.fileno())
        self._direct = _past_cache(self._file)
        finalize(self, os.close, self._file)
        self._device = device
        self._places: list[tuple[int, int]] = []  # offset, bytes
        self._ahead: tuple[int, Future[Tensor]] | None = None
        self._order, self._reads = order or ReadOrder(), 0
        self._again: dict[int, Tensor] = {}  # what comes again soon

    def put(self, data: Tensor) -> int:
        """Take a tensor of bytes; return its number. StorageError where the disk does not."""
        offset = _whole(sum(self._places[-1])) if self._places else 0
        left = _bytes_of(data.cpu())
        with disk("store activations"):
            for at in range(0, len(left), PIECE):
                self._write(left[at : at + PIECE], offset + at)
        self._places.append((offset, data.numel()))
        return len(self._places) - 1

    def get(self, number: int) -> Tensor:
        """Return what was put away under a number, on the device."""
        found = self._again.get(number)
        if found is None:
            ahead, self._ahead = self._ahead, None
            found = ahead[1].result() if ahead is not None and ahead[0] == number else self._read(number)
        soon = self._order.next(self._reads, number)
        self._reads += 1
        self._again = {n: held for n, held in {**self._again, number: found}.items() if n in soon}
        following = next((n for n in soon if n not in self._again), None)
        if self._ahead is None and following is not None and following < len(self._places):
            self._ahead = following, _READER.submit(self._read, following)
        return found.to(self._device)

    def _write(self, piece: memoryview, at: int) -> None:
        if self._direct:
            room = _rooms.piece
            room[: len(piece)] = piece
            piece = room[: _whole(len(piece))]
        while piece:
            written = os.pwrite(self._file, piece, at)
            piece, at = piece[written:], at + written

    def _read(self, number: int) -> Tensor:
        offset, n_bytes = self._places[number]
        found = torch.empty(n_bytes, dtype=torch.uint8)
        left, at = _bytes_of(found), offset
        while left:
            wanted = min(len(left), PIECE)
            room = _rooms.piece[: _whole(wanted)] if self._direct else left
            read = min(os.preadv(self._file, [room], at), len(left))
            if not read:
                raise StorageError("stored activations are truncated")
            if self._direct:
                left[:read] = room[:read]
            left, at = left[read:], at + read
        return found


class _Rooms(threading.local):
    """Memory of each thread for a piece, at an address that files past the cache take."""

    def __init__(self) -> None:
        self.piece = memoryview(mmap.mmap(-1, PIECE))


_rooms = _Rooms()


def _past_cache(file: int) -> bool:
    """Have a file's bytes pass the kernel's cache by; return whether its file system does that."""
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _whole(n_bytes: int) -> int:
    """Return the bytes of the pages that so many bytes take."""
    return -(-n_bytes // PAGE) * PAGE


class PinnedShelf:
    """In the host's pinned memory, of a stage on a GPU. Untried on one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: list[Tensor] = []

    def put(self, data: Tensor) -> int:
        """Take a tensor of bytes; return its number."""
        self._held.append(torch.empty(data.shape, dtype=data.dtype, pin_memory=True).copy_(data))
        return len(self._held) - 1

    def get(self, number: int) -> Tensor:
        """Return what was put away under a number, on the device."""
        return self._held[number].to(self._device, non_blocking=True)


def _bytes_of(data: Tensor) -> memoryview:
    buffer: Any = data.numpy()
    return memoryview(buffer)


def shelves(place: Place, folder: Path | None, device: torch.device) -> Callable[[], Shelf] | None:
    """Return what makes a micro-batch's shelf; None where all stays on the device. On a CPU it is a file, as
    the host's memory is the device's own."""
    if place is Place.DEVICE:
        return None
    if place is Place.HOST and device.type != "cpu":
        return lambda: PinnedShelf(device)
    order = ReadOrder()
    return lambda: FileShelf(folder, device, order)
