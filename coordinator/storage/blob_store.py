"""Content-addressed store on disk: weights, data and checkpoints, named by their SHA-256.

A blob lies at ``ab/cdef...``; while it arrives it is ``partial/HASH``, whose length says where to
go on, so an upload resumes after any interruption. What a worker sends is a file of its own, which no
other can spoil: its bytes are verified only when all are there. A blob appears under its name only when its
bytes hash to it and are on the disk: nothing half-written is ever read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import re
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import BadFrame, StorageError, UsageError
from compressors.deltas import HEAD_BYTES, decode, head_of
from hostos.files.private_files import private_folder, sync_folder
from hostos.files.refusals import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"[0-9a-f]{64}")
_PARTIAL = re.compile(r"[0-9a-f]{64}(-[0-9a-f]{16})?")


class Gone(StorageError):
    """The store answers, and does not have it: nobody gets it by asking again."""


class OtherBytes(UsageError):
    """All that came under a name does not hash to it."""


class BlobStore:
    """Blobs under one folder; safe for several threads of one process.

    ``max_blob_bytes`` bounds one blob, ``quota_bytes`` all of them together; not ``durable``: what is
    lost with the machine is sent again.
    """

    url = ""  # of what stands behind the folder

    def __init__(
        self,
        root: Path,
        max_blob_bytes: int = 16 << 30,
        quota_bytes: int = 1 << 40,
        durable: bool = True,
        *,
        reading: bool = False,
    ) -> None:
        """``reading``: another process keeps this store, this one only looks up paths."""
        self.root = root
        self.max_blob_bytes = max_blob_bytes
        self.quota_bytes = quota_bytes
        self.durable = durable
        self._lock = threading.Condition()
        self._verifying: set[Path] = set()  # partial blobs that are read, and that nobody may write
        private_folder(root)
        (root / "partial").mkdir(exist_ok=True, mode=0o700)
        self._used = 0
        if not reading:
            self._forget_scraps()
            self._used = sum(p.stat().st_size for p in root.rglob("*") if p.is_file())

    def path(self, name: str) -> Path:
        """Return the path of a whole blob; UsageError for a name that is no hash."""
        return self._whole(name)

    def _whole(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise UsageError(f"blob name {name[:80]!r} is not 64 hexadecimal digits")
        return self.root / name[:2] / name[2:]

    def has(self, name: str) -> bool:
        """Return whether the whole blob is here."""
        return self._whole(name).exists()

    def size(self, name: str) -> int:
        """Bytes of a whole blob; Gone when it is not here, StorageError when it cannot be read now."""
        with self._given(name) as path:
            return path.stat().st_size

    def held(self, name: str, by: str = "") -> int:
        """Return how many bytes of the blob have arrived; of one that is not whole, from ``by``: a worker, or
        "" for the owners and the coordinator itself."""
        whole = self._whole(name)
        # Others write meanwhile: what is no whole blob yet and no incomplete one any more has become whole.
        return _size(whole) or self.arrived(name, by) or _size(whole)

    def arrived(self, name: str, by: str) -> int:
        """Return how many bytes of a blob have arrived from ``by`` and make no whole one yet."""
        return _size(self._partial(name, by))

    def resumes(self, name: str, by: str = "", *, known: bool = True) -> int:
        """Return the offset at which ``by`` resumes an incomplete blob: at the last byte that is here, not
        behind it.

        A coordinator that was killed between a blob's last byte and its name has all of it, and would wait
        for what nobody has left to send.
        """
        return max(0, (self.held(name, by) if known else self.arrived(name, by)) - 1)

    def write(
        self, name: str, size: int, offset: int, data: bytes, by: str = "", *, known: bool = True
    ) -> bool:
        """Take in the next bytes of a blob that ``by`` sends; True once it is whole and verified. One that is
        here already is, unless ``by`` is not to know that (``known``): it then shows that it has every byte.

        Bytes already here are skipped, a gap is refused. UsageError for impossible figures or
        bytes that do not hash to the name (the partial blob is dropped), StorageError when the
        disk or the quota is full.
        """
        if not 0 <= size <= self.max_blob_bytes or offset < 0 or offset + len(data) > size:
            raise UsageError(
                f"blob {name[:12]}: bytes [{offset}, {offset + len(data)}) of {size}; "
                f"a blob has at most {self.max_blob_bytes}"
            )
        partial = self._partial(name, by)
        with self._lock:
            self._lock.wait_for(lambda: partial not in self._verifying)
            whole = known and (self.has(name) or self._whole(name).exists())
            complete = not whole and self._take(name, size, offset, data, by, known=known)
            if complete:
                self._verifying.add(partial)
        if complete:
            self._finish(name, partial)
        if whole or complete:
            self._kept(name)
        return whole or complete

    def _take(self, name: str, size: int, offset: int, data: bytes, by: str, *, known: bool) -> bool:
        """Append what is new of a chunk; True once every byte is here."""
        here = self.held(name, by) if known else self.arrived(name, by)
        if here > size:  # they are not this blob's, and no upload would ever end
            self._drop(self._partial(name, by))
            here = 0
        if offset > here:
            raise UsageError(f"blob {name[:12]}: bytes [{here}, {offset}) are missing; go on at {here}")
        if size and not data:
            return False  # no file for what may never come
        self._append(name, data[here - offset :], by)
        return here + max(0, len(data) - (here - offset)) == size

    def patch(self, name: str, size: int, base: str, delta: str, by: str = "", *, known: bool = True) -> bool:
        """Make a blob of ``delta``, a blob itself, and of ``base``.

        As ``write``: what is made appears under its name only once its bytes hash to it. UsageError for a
        delta of other blobs, or that is none; Gone where delta or base are not here.
        """
        offset, complete = 0, False
        with self._given(base) as before, self._given(delta) as changes:
            if not before.stat().st_size or not changes.stat().st_size:
                raise UsageError(f"blob {name[:12]}: its delta or its base is empty")
            old, coded = (np.memmap(path, np.uint8, "r") for path in (before, changes))
            try:
                head = head_of(coded[:HEAD_BYTES].tobytes())
                if (head.base, head.new, head.size) != (base, name, size):
                    raise UsageError(f"blob {name[:12]}: the delta {delta[:12]} is one of other blobs")
                for piece in decode(old, coded):
                    complete = self.write(name, size, offset, piece, by, known=known)
                    offset += len(piece)
            except BadFrame as error:
                partial = self._partial(name, by)
                with self._lock:
                    if partial.exists():
                        self._drop(partial)
                raise UsageError(f"blob {name[:12]}: {error}") from None
        return complete

    def _kept(self, name: str) -> None:
        """A whole blob lies in the folder: do what else it takes for the store to have it."""

    def put(self, data: bytes) -> str:
        """Store whole bytes; returns their name."""
        name = hashlib.sha256(data).hexdigest()
        if not data:
            self.write(name, 0, 0, b"")
            return name
        for offset in range(0, len(data), CHUNK_BYTES):
            self.write(name, len(data), offset, data[offset : offset + CHUNK_BYTES])
        return name

    @property
    def partial(self) -> Path:
        """Folder of incomplete blobs."""
        return self.root / "partial"

    @property
    def roomy(self) -> bool:
        """Whether less than half of the quota is used, and as much as is used is free on the disk."""
        return self._used <= min(self.quota_bytes - self._used, shutil.disk_usage(self.root).free)

    def adopt(self, file: Path, name: str, size: int) -> None:
        """A file of our own, hashed and on the disk, becomes the blob ``name``.

        UsageError for a size that it does not have, StorageError when the disk or the quota is full.
        """
        whole = self._whole(name)
        try:
            if file.stat().st_size != size:
                raise UsageError(f"blob {name[:12]} was said to have {size} bytes, it has others")
            with self._lock:
                known = whole.exists()
                self._bounded(0 if known else size)
                self._name(file, whole)
                self._used += 0 if known else size
        except OSError as error:
            raise storage_error(error, self.root) from error
        self._kept(name)

    def read(self, name: str) -> bytes:
        """The whole blob, for small ones."""
        return b"".join(self.chunks(name))

    def head(self, name: str, n_bytes: int) -> bytes:
        """Return the first ``n_bytes`` of a whole blob, fewer where it is shorter; errors as ``size``."""
        with self._given(name) as path, path.open("rb") as file:
            return file.read(n_bytes)

    def rotten(self, name: str) -> bool:
        """Read a whole blob again: True where its bytes are gone or do not hash to its name any more. Such a
        blob is dropped, so that whoever has it may send it again. StorageError when it cannot be read now."""
        if self._sound(name):
            return False
        self.discard([name])
        return True

    def chunks(self, name: str, offset: int = 0) -> Iterator[bytes]:
        """The blob from ``offset`` on, in pieces of at most 1 MiB; errors as ``size``."""
        if offset < 0 or offset > self.size(name):
            raise UsageError(f"blob {name[:12]} has {self.size(name)} bytes; asked from {offset}")
        with self._given(name) as path, path.open("rb") as file:
            file.seek(offset)
            while piece := file.read(CHUNK_BYTES):
                yield piece

    def _sound(self, name: str) -> bool:
        try:
            with self._given(name) as path, path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == name
        except Gone:
            return False

    @contextlib.contextmanager
    def _given(self, name: str) -> Iterator[Path]:
        """The path of a whole blob that is read now, and what its errors mean."""
        try:
            yield self.path(name)
        except FileNotFoundError:
            raise Gone(f"blob {name[:12]} is not in the store; submit the job again") from None
        except OSError as error:
            raise refusal(error, f"read under {self.root}", "check its disk") from error

    def delete(self, names: Collection[str], unless: Callable[[str], bool] = lambda name: False) -> int:
        """Delete these blobs where they are here; returns the bytes freed.

        ``unless(name)`` is asked while nobody writes: such a blob stays.
        """
        freed = 0
        with self._lock:
            for name in names:
                path = self._whole(name)
                if path.exists() and not unless(name):
                    freed += path.stat().st_size
                    path.unlink()
            self._used -= freed
        return freed

    def touch(self, name: str) -> None:
        """Mark the blob as needed: a sweep treats it as new. A missing one is ignored."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            os.utime(self._whole(name))

    def give_way(self, names: Mapping[str, bool], by: str) -> None:
        """Delete what has arrived of these blobs from ``by``; with a true value the whole blob, too."""
        self.discard([name for name, whole in names.items() if whole], by)
        partial = {self._partial(name, by) for name in names}
        with self._lock:
            self._lock.wait_for(lambda: self._verifying.isdisjoint(partial))
            for path in filter(Path.exists, partial):
                self._drop(path)

    def discard(self, names: Collection[str], by: str = "") -> int:
        """Delete these blobs, and what has arrived of them from ``by``; returns the bytes freed."""
        freed = 0
        partial = {self._partial(name, by) for name in names}
        with self._lock:
            self._lock.wait_for(lambda: self._verifying.isdisjoint(partial))
            for path in filter(Path.exists, (*map(self._whole, names), *partial)):
                freed += path.stat().st_size
                path.unlink()
            self._used -= freed
        return freed

    def sweep(self, keep: Collection[str], before_s: float = math.inf) -> tuple[int, int]:
        """Delete whole blobs outside ``keep`` and partial ones, where nothing was written to them since
        ``before_s`` (Unix time); returns how many and their bytes."""
        swept = freed = 0
        for folder in list(self.root.iterdir()):
            for path in folder.iterdir():
                partial = folder == self.partial
                ours = _PARTIAL.fullmatch(path.name) if partial else _NAME.fullmatch(folder.name + path.name)
                if not ours:
                    continue
                if not partial and folder.name + path.name in keep:
                    continue
                with self._lock:  # a blob at a time: nobody waits for a whole store
                    try:
                        found = path.stat()
                        if found.st_mtime >= before_s or path in self._verifying:
                            continue
                        path.unlink()
                    except FileNotFoundError:
                        continue
                    self._used -= found.st_size
                swept, freed = swept + 1, freed + found.st_size
        return swept, freed

    def _forget_scraps(self) -> None:
        """Remove the files among the partial blobs that are none: left by a process that was killed."""
        for path in self.partial.iterdir():
            if not _PARTIAL.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def _partial(self, name: str, by: str = "") -> Path:
        self._whole(name)
        return self.partial / (f"{name}-{hashlib.sha256(by.encode()).hexdigest()[:16]}" if by else name)

    def _drop(self, partial: Path) -> None:
        self._used -= partial.stat().st_size
        partial.unlink()

    def _bounded(self, more: int) -> None:
        if self._used + more > self.quota_bytes:
            raise StorageError(
                f"the blob store holds {self._used} of {self.quota_bytes} bytes; "
                "let go of ended jobs by `atoll forget JOB`, or raise --blob-quota of `atoll serve`"
            )

    def _append(self, name: str, data: bytes, by: str = "") -> None:
        self._bounded(len(data))
        try:
            with self._partial(name, by).open("ab") as file:
                file.write(data)
        except OSError as error:
            raise storage_error(error, self.root) from error
        self._used += len(data)

    def _finish(self, name: str, partial: Path) -> None:
        """A complete blob that is being verified gets its name; others are written meanwhile."""
        try:
            found = self._synced(partial)
            with self._lock:
                if found != name:
                    self._drop(partial)
                    raise OtherBytes(f"blob {name[:12]}: its bytes hash to {found[:12]}; send it again")
                whole = self._whole(name)
                if whole.exists():  # the same bytes, of somebody who was not to know that they are here
                    self._used -= whole.stat().st_size
                self._name(partial, whole)
                for other in self.partial.glob(f"{name}*"):  # of who sends the same, and need not go on
                    if other not in self._verifying:
                        self._drop(other)
        except OSError as error:
            raise storage_error(error, self.root) from error
        finally:
            with self._lock:
                self._verifying.discard(partial)
                self._lock.notify_all()

    def _synced(self, partial: Path) -> str:
        """The hash of a file that is on the disk."""
        with partial.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if self.durable:
                os.fsync(file.fileno())
        return found

    def _name(self, file: Path, whole: Path) -> None:
        """Move a file to its blob's name; where the store is durable, that name survives a power cut."""
        fresh = not whole.parent.exists()
        whole.parent.mkdir(exist_ok=True)
        file.replace(whole)
        if self.durable:
            sync_folder(whole.parent)
            if fresh:
                sync_folder(self.root)


def storage_error(error: OSError, where: Path) -> StorageError:
    """Return the error of a failed write, with its meaning for the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"the disk under {where} is full; free some space: jobs go on by themselves, a submit is to be "
            "repeated (what has arrived of it is kept)"
        )
    return refusal(error, f"write under {where}")


def _size(path: Path) -> int:
    """Bytes of a file, 0 where it is not, or goes in this moment."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
