"""Arrays of app runs while they are needed: large ones on disk, small ones in memory, none for longer.

A part is kept for every run that put it here and goes when the last of them drops it. Nothing here
must survive the process: after a restart the owner sends again what is still needed.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from atoll.errors import BadFrame, StorageError
from coordinator.blobs import CHUNK_BYTES, BlobStore
from protos import bounds

MAX_SMALL_BYTES = 256 << 20  # of all small parts in memory; further ones go to the disk


class PartStore:
    """Parts by hash, each held by one run or several; disk work may run in any thread."""

    def __init__(self, root: Path, max_part_bytes: int, quota_bytes: int) -> None:
        shutil.rmtree(root, ignore_errors=True)
        try:
            self.store = BlobStore(root, max_part_bytes, quota_bytes, durable=False)
        except OSError as error:
            raise StorageError(
                f"cannot create {root}: {error.strerror}; choose another --state-dir"
            ) from None
        self._small: dict[str, bytes] = {}
        self._small_bytes = 0
        self._holders: dict[str, set[int]] = {}

    def take_small(self, run: int, name: str, data: bytes) -> None:
        """Keep bytes that came with a message. BadFrame when they are not what their name says."""
        if hashlib.sha256(data).hexdigest() != bounds.blob_hash("part", name):
            raise BadFrame(f"part {name[:12]} arrived damaged: its sha256 differs")
        self._holders.setdefault(name, set()).add(run)
        if name in self._small:
            return
        if self._small_bytes + len(data) > MAX_SMALL_BYTES:
            self.store.put(data)
            return
        self._small[name] = data
        self._small_bytes += len(data)

    def write(self, run: int, name: str, size: int, offset: int, data: bytes) -> bool:
        """Take in the next bytes of a large part; True once it is whole. As ``BlobStore.write``."""
        whole = self.store.write(name, size, offset, data)
        if whole:
            self._holders.setdefault(name, set()).add(run)
        return whole

    def has(self, run: int, name: str) -> bool:
        """Whether the part is here for this run."""
        return run in self._holders.get(name, ())

    def small(self, name: str) -> bytes | None:
        """A small part's bytes."""
        return self._small.get(name)

    def size(self, run: int, name: str) -> int:
        """Bytes of a part; StorageError when it is not here for this run."""
        if not self.has(run, name):
            raise StorageError(f"part {name[:12]} is not here for run {run}; it was dropped, or never came")
        data = self._small.get(name)
        return len(data) if data is not None else self.store.size(name)

    def chunks(self, name: str, offset: int) -> Iterator[bytes]:
        """The part from ``offset`` on, in pieces of at most 1 MiB."""
        data = self._small.get(name)
        if data is None:
            yield from self.store.chunks(name, offset)
            return
        for at in range(offset, len(data), CHUNK_BYTES):
            yield data[at : at + CHUNK_BYTES]

    def drop(self, run: int, names: Collection[str] | None) -> tuple[list[str], list[str]]:
        """The run needs these no more (None: any); returns those that nobody needs, and those of them
        whose files may now go."""
        if names is None:
            names = [name for name, runs in self._holders.items() if run in runs]
        gone, files = [], []
        for name in names:
            holders = self._holders.get(name)
            if holders is None or run not in holders:
                continue
            holders.discard(run)
            if holders:
                continue
            del self._holders[name]
            gone.append(name)
            data = self._small.pop(name, None)
            if data is None:
                files.append(name)
            else:
                self._small_bytes -= len(data)
        return gone, files
