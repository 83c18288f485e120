"""Arrays of app runs while they are needed: large ones on disk, small ones in memory, none for longer.

A part is kept for whoever holds it: a run's owner for what it sends, a worker for what it has sent so
far, a message for its reply. It goes when the last of them lets go: two nodes may well answer with
the same bytes. Nothing here must survive the process: after a restart the owner sends again what is
still needed.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from atoll.errors import BadFrame, StorageError
from coordinator.storage.blob_store import CHUNK_BYTES, BlobStore
from protos import bounds

OWNER = ""
MAX_SMALL_BYTES = 256 << 20  # of all small parts in memory; further ones go to the disk


class PartStore:
    """Parts by hash, each with its holders, pairs of a run and a word; disk work may run in any thread."""

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
        self._holders: dict[str, set[tuple[int, str]]] = {}
        self._coming: Counter[str] = Counter()  # being written now
        self._lock = threading.Lock()  # never held while the disk works

    def take_small(self, run: int, name: str, data: bytes) -> None:
        """Keep bytes that came with a message. BadFrame when they are not what their name says."""
        if hashlib.sha256(data).hexdigest() != bounds.blob_hash("part", name):
            raise BadFrame(f"part {name[:12]} arrived damaged: its sha256 differs")
        with self._lock:
            self._holders.setdefault(name, set()).add((run, OWNER))
            if name in self._small:
                return
            if self._small_bytes + len(data) > MAX_SMALL_BYTES:
                self.store.put(data)
                return
            self._small[name] = data
            self._small_bytes += len(data)

    def write(self, run: int, holder: str, name: str, size: int, offset: int, data: bytes) -> bool:
        """Take in the next bytes of a large part; True once it is whole. As ``BlobStore.write``."""
        with self._lock:
            self._coming[name] += 1
            whole = name in self._small
        try:
            whole = whole or self.store.write(name, size, offset, data, holder)
        finally:
            with self._lock:
                self._coming[name] -= 1
                if not self._coming[name]:
                    del self._coming[name]
                if whole:
                    self._holders.setdefault(name, set()).add((run, holder))
        return whole

    def hand_over(self, run: int, old: str, new: str, names: Collection[str]) -> None:
        """What ``old`` held of these, ``new`` holds."""
        with self._lock:
            for name in names:
                holders = self._holders.get(name)
                if holders is not None and (run, old) in holders:
                    holders.discard((run, old))
                    holders.add((run, new))

    def has(self, run: int, name: str) -> bool:
        """Whether the part is here for this run."""
        return any(holder[0] == run for holder in list(self._holders.get(name, ())))

    def small(self, name: str) -> bytes | None:
        """A small part's bytes."""
        return self._small.get(name)

    def size(self, run: int, name: str) -> int:
        """Bytes of a part; StorageError when it is not here for this run."""
        if not self.has(run, name):
            raise StorageError(
                f"part {name[:12]} is not here for run {run}; it was dropped, or never arrived"
            )
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

    def drop(
        self, run: int, names: Collection[str] | None, holder: str | None
    ) -> tuple[list[str], list[str]]:
        """The holder (None: any of the run's) lets go of these (None: of all).

        Returns those that nobody holds now, and those of them whose files ``delete`` may remove.
        """
        gone, files = [], []
        with self._lock:
            for name in list(self._holders) if names is None else names:
                holders = self._holders.get(name, set())
                leaving = {h for h in holders if h[0] == run and holder in (None, h[1])}
                if not leaving:
                    continue
                holders -= leaving
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

    def delete(self, names: Collection[str]) -> None:
        """Remove files that still nobody holds: the same bytes may just have come again."""
        self.store.delete(names, unless=lambda name: name in self._holders or name in self._coming)
