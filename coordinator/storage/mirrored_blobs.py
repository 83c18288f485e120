"""Blobs behind an URL: an object store, with the folder in front of it.

A blob arrives in the folder, is verified there, and counts as stored once the object store has it too: a
checkpoint's manifest, written after its blobs, never names what a lost machine takes along. Readers map
files, so what only the object store has is fetched when its path is asked for, and verified. A folder that is
empty, as on another machine, fills by itself. One coordinator owns a prefix: it deletes what its jobs do not
need.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

from atoll.errors import StorageError
from coordinator.storage.blob_store import BlobStore, storage_error
from coordinator.storage.object_store import PART_BYTES, SCHEME, Listed, Objects, S3Objects


def blob_store(
    root: Path,
    url: str = "",
    max_blob_bytes: int = 16 << 30,
    quota_bytes: int = 1 << 40,
    *,
    reading: bool = False,
) -> BlobStore:
    """Return the store in ``root``, with what ``url`` names behind it where that is an object store.

    UsageError for an URL that cannot be used, StorageError where the store does not answer.
    """
    if not url.startswith(SCHEME):
        return BlobStore(root, max_blob_bytes, quota_bytes, reading=reading)
    found = MirroredBlobStore(root, S3Objects(url), max_blob_bytes, quota_bytes, reading=reading)
    found.url = url
    return found


class MirroredBlobStore(BlobStore):
    """``BlobStore`` whose blobs an object store holds; ``quota_bytes`` bounds the folder."""

    def __init__(
        self,
        root: Path,
        objects: Objects,
        max_blob_bytes: int = 16 << 30,
        quota_bytes: int = 1 << 40,
        *,
        reading: bool = False,
    ) -> None:
        """Send what only the folder has, as after a kill between the two, or where the URL is new."""
        super().__init__(root, max_blob_bytes, quota_bytes, reading=reading)
        self._objects, self._reading = objects, reading
        self._wire = threading.Lock()  # held by one upload, deletion or fetch
        self._there: dict[str, Listed] = {} if reading else objects.listed()
        if not reading:
            for file in root.glob("[0-9a-f][0-9a-f]/*"):
                self._kept(file.parent.name + file.name)

    # ------------------------------------------------------------ reading

    def path(self, name: str) -> Path:
        """Return the path of a whole blob, fetched where only the object store has it; StorageError where
        that does not answer."""
        whole = self._whole(name)
        if not whole.exists() and (self._reading or name in self._there):
            self._fetch(name)
        return whole

    def has(self, name: str) -> bool:
        """Return whether the object store has the blob."""
        whole = self._whole(name)
        return whole.exists() if self._reading else name in self._there

    def size(self, name: str) -> int:
        """Bytes of a whole blob; Gone when it is not here."""
        listed = self._there.get(name)
        return listed.size if listed is not None else super().size(name)

    def held(self, name: str, by: str = "") -> int:
        """Return how many bytes of the blob have arrived."""
        listed = self._there.get(name)
        return listed.size if listed is not None else super().held(name, by)

    def rotten(self, name: str) -> bool:
        """The same; a local copy that rotted is fetched anew, and only where that one is no better the blob
        is dropped."""
        if self._sound(name):
            return False
        super().discard([name])
        return not self._fetch(name)

    def _fetch(self, name: str) -> bool:
        """Copy an object into the folder; False where there is none, or its bytes are not its name's: it is
        dropped, as nobody could send the blob again while the store takes it for whole."""
        with self._wire:
            size = self._there[name].size if name in self._there else self._objects.size(name)
            if size is None or self._whole(name).exists():
                return size is not None
            scrap = self.partial / f".fetch-{os.getpid()}-{name}"
            try:
                if not self._copied(name, size, scrap):
                    if not self._reading:
                        self._objects.delete([name])  # else it would stand in the way of a better one
                        self._there.pop(name, None)
                    return False
                with self._lock:
                    self._bounded(size)
                    self._name(scrap, self._whole(name))
                    self._used += size
            except OSError as error:
                raise storage_error(error, self.root) from error
            finally:
                scrap.unlink(missing_ok=True)
        return True

    def _copied(self, name: str, size: int, scrap: Path) -> bool:
        """Write an object to a file that is then on the disk; False as ``_fetch``."""
        digest = hashlib.sha256()
        with scrap.open("wb") as file:
            for at in range(0, size, PART_BYTES):
                piece = self._objects.read(name, at, min(PART_BYTES, size - at))
                if piece is None:
                    return False
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest() == name

    # ------------------------------------------------------------ writing

    def _kept(self, name: str) -> None:
        """Send a blob that lies in the folder. StorageError where that fails: the store does not have it
        then, and whoever sends its last byte again makes it try again."""
        if self._reading or name in self._there:
            return
        with self._wire:
            whole = self._whole(name)
            if name in self._there or not whole.exists():
                return
            size = whole.stat().st_size
            self._objects.put(name, whole, size)
            self._there[name] = Listed(size, time.time())

    def touch(self, name: str) -> None:
        """Mark the blob as needed."""
        super().touch(name)
        listed = self._there.get(name)
        if listed is not None:
            self._there[name] = replace(listed, written_s=time.time())

    # ------------------------------------------------------------ deleting

    def delete(self, names: Collection[str], unless: Callable[[str], bool] = lambda name: False) -> int:
        """The same, in both places."""
        with self._lock:
            going = [name for name in names if not unless(name)]
        freed = super().delete(going, unless)
        self._forget(name for name in going if not unless(name))
        return freed

    def discard(self, names: Collection[str], by: str = "") -> int:
        """The same, in both places."""
        freed = super().discard(names, by)
        self._forget(names)
        return freed

    def sweep(self, keep: Collection[str], before_s: float = math.inf) -> tuple[int, int]:
        """The same, in both places; the figures are the folder's."""
        swept = super().sweep(keep, before_s)
        self._forget(
            name
            for name, listed in list(self._there.items())
            if name not in keep and listed.written_s < before_s
        )
        return swept

    def _forget(self, names: Iterable[str]) -> None:
        """Delete the objects whose local copies are gone. One that stays, as the store does not answer, is
        listed at the next start and swept then."""
        with self._wire:
            going = [name for name in names if name in self._there and not self._whole(name).exists()]
            for name in going:
                del self._there[name]
            with contextlib.suppress(StorageError):
                self._objects.delete(going)
