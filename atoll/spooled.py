"""Rows that are gathered one after the other: in memory while they are few, else in a file without a name.

A file's pages are the system's to drop, so data that are larger than memory can be stacked, hashed and sent.
The file lies where temporary files do (``TMPDIR``), and is gone with the array.
"""

from __future__ import annotations

import tempfile
from typing import IO, TYPE_CHECKING

import numpy as np

from atoll.errors import StorageError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    Array = NDArray[np.generic]

IN_MEMORY_BYTES = 32 << 20
"""Of one input's rows, before they go to a file."""


class Spool:
    """Rows of one shape, which become one array; their type is as numpy would stack them."""

    def __init__(self) -> None:
        self._like: Array | None = None  # no rows, of their shape and type
        self._begin()

    def _begin(self) -> None:
        self._parts: list[Array] = []
        self._waiting = self._rows = 0  # bytes that are in memory, rows in all
        self._file: IO[bytes] | None = None

    def add(self, rows: Array) -> tuple[int, ...] | None:
        """Take in rows, [n, ...]; or, where those before have another shape, return that and take none."""
        like = rows[:0].copy() if self._like is None else self._like
        if like.shape[1:] != rows.shape[1:]:
            return like.shape[1:]
        if like.dtype != rows.dtype:
            like = np.concatenate([like, rows[:0]])
            self._retype(like.dtype)
        self._like = like
        self._append(rows.astype(like.dtype, copy=False))
        return None

    def array(self) -> Array:
        """Return all rows, once, at the end. StorageError where the disk has no room for them."""
        if self._like is None:
            raise ValueError("no rows were added")
        if self._file is None:
            return np.concatenate(self._parts)
        self._spill()
        with self._file as file:  # the map keeps it
            return np.memmap(file, self._like.dtype, "r+", 0, (self._rows, *self._like.shape[1:]))

    def _append(self, rows: Array) -> None:
        self._parts.append(rows)
        self._rows, self._waiting = self._rows + len(rows), self._waiting + rows.nbytes
        if self._waiting > IN_MEMORY_BYTES:
            self._spill()

    def _spill(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="atoll-rows-")  # noqa: SIM115
            for part in self._parts:
                self._file.write(np.ascontiguousarray(part).view(np.uint8).data)
            self._file.flush()
        except OSError as error:
            raise StorageError(
                f"no room for the data's rows under {tempfile.gettempdir()}: {error.strerror}; set TMPDIR to "
                "a folder on a larger disk"
            ) from None
        self._parts, self._waiting = [], 0

    def _retype(self, dtype: DTypeLike) -> None:
        """Go on with another type: numbers of a wider one came."""
        if not self._rows:
            return
        before = self.array()
        n = max(1, IN_MEMORY_BYTES // 8 // max(1, before[0:1].nbytes))
        self._begin()
        for at in range(0, len(before), n):
            self._append(before[at : at + n].astype(dtype))
