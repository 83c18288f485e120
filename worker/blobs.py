"""Files between this machine and the blob store: content-addressed, resumable.

Downloads are kept in a bounded folder and verified before they are used; uploads send only what the
store lacks. What a blob holds is for others to say: ``worker.stage.tensor_blobs`` of a stage's tensors.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import structlog

from atoll.errors import AccessDenied, AtollError, BadFrame, ConnectionFailed, StorageError, UsageError
from compressors.deltas import HEAD_BYTES, decode, head_of
from hostos.files.refusals import ROOM, disk
from hostos.retries import retrying, stop_after_pauses
from protos.blob_transfer import BlobPort, Change, Chunk, LocalBlob, Patch, fetch, upload
from worker.cancel import Cancel
from worker.manners.traffic import Traffic

if TYPE_CHECKING:
    from tenacity import RetryCallState, Retrying

    from atoll.opdag import StateMeta

log = structlog.get_logger()

CHUNK_BYTES = 1 << 17
"""Each is a sign of life to the coordinator: a link of 1 Mbit/s carries one in a second."""

HEADER_BYTES = 64 << 10  # a blob's safetensors header is far below this
STATE_KEYS = 7  # beside the value, at most, each float32 of its shape: three of an optimizer, four of a peer
POLL_S = 0.1
PATCHED_AT_ONCE, PATCHED_AT_ONCE_BYTES = 1000, 64 << 20  # files of a call, and what these are as a whole
MOST_CHANGES = 8  # deltas in a row that a blob is made by
PATIENCE_S = 20.0  # of pauses in a row without a new byte, while the coordinator is there
VERIFIED_S = 60.0  # a blob that was hashed so lately is used without hashing it again


class BlobCache:
    """Blobs on disk under their hash; the least recently used go when ``max_bytes`` is exceeded, those to be
    kept never. What lay here for a while is hashed before it is used."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._kept: dict[int, frozenset[str]] = {}
        self._pinned: frozenset[str] = frozenset()
        self.changed = threading.Condition()
        self.busy: set[str] = set()  # being fetched: two that write one file would spoil it
        self._verified_s: dict[str, float] = {}
        with disk(f"create {directory}", "choose another --state-dir"):
            # One that is there may be a disk of its own, and stays as it is.
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        return self._directory / name

    def held(self, name: str) -> int | None:
        """None when the blob is whole here, else how many of its bytes are."""
        path = self.path(name)
        if path.is_file() and self._sound(name, path):
            os.utime(path)
            return None
        part = path.with_suffix(".part")
        return part.stat().st_size if part.is_file() else 0

    def _sound(self, name: str, path: Path) -> bool:
        """Whether a file still is what its name says; one that is not goes."""
        now_s = time.monotonic()
        if now_s - self._verified_s.get(name, -VERIFIED_S) < VERIFIED_S:
            return True
        try:
            sound = _sha256(path) == name
        except OSError:
            sound = False
        if sound:
            self._verified_s[name] = now_s
            return True
        log.warning("blob.damaged", blob=name)
        self.discard((name,))
        return False

    def size(self, name: str) -> int:
        """Bytes of a blob that are here, whole or not."""
        for path in (self.path(name), self.path(name).with_suffix(".part")):
            with suppress(OSError):
                return path.stat().st_size
        return 0

    def keep(self, names: Iterable[str], owner: int = 0) -> None:
        """Never delete these to make room, until ``owner`` names others."""
        with self.changed:
            self._kept[owner] = frozenset(names)

    def pin(self, names: Iterable[str]) -> None:
        """Never delete these, which this machine's owner added, and count them towards no bound."""
        with self.changed:
            self._pinned = frozenset(names)

    def release(self, names: Iterable[str], owner: int) -> None:
        """Delete what ``owner`` kept and no other does, unless it is being fetched."""
        with self.changed:
            others = [kept for other, kept in self._kept.items() if other != owner]
            self.discard(frozenset(names).difference(self.busy, self._pinned, *others))

    def discard(self, names: Iterable[str]) -> None:
        """Delete blobs, and what there is of them; where the disk refuses that, they stay."""
        for name in names:
            self._verified_s.pop(name, None)
            for path in (self.path(name), self.path(name).with_suffix(".part")):
                with suppress(OSError):  # the next write reports what is wrong with the disk
                    path.unlink()

    def lacking(self, names: Iterable[str]) -> list[tuple[str, int]]:
        """Blobs that are not whole here, each with how many of its bytes are."""
        return [(name, held) for name in names if (held := self.held(name)) is not None]

    def write(self, chunk: Chunk) -> None:
        """Append a chunk; a blob's last chunk verifies it. BadFrame when the hash differs."""
        path = self.path(chunk.hash)
        part = path.with_suffix(".part")
        with disk(f"write {path}", ROOM):
            with part.open("ab") as file:
                if file.tell() != chunk.offset:
                    raise BadFrame(f"blob {chunk.hash[:12]}: bytes at {chunk.offset}, expected {file.tell()}")
                file.write(chunk.data)
                size = file.tell()
            if size < chunk.size:
                return
            if _sha256(part) != chunk.hash:
                part.unlink()
                raise BadFrame(f"blob {chunk.hash[:12]} arrived damaged: its sha256 differs")
            with part.open("rb") as file:  # a name outlives a power cut, and so must what it stands for
                os.fsync(file.fileno())
            part.replace(path)
            self._verified_s[chunk.hash] = time.monotonic()

    def trim(self, keep: Iterable[str] = ()) -> None:
        """Delete the least recently used blobs beyond the bound, never those in ``keep``.

        Every device of a daemon fetches into this folder: a file may get its name, or go, at any moment.
        """
        with self.changed:
            kept = frozenset[str]().union(keep, self.busy, *self._kept.values())
            found: list[tuple[float, int, Path]] = []
            for path in self._directory.iterdir():
                with suppress(FileNotFoundError):
                    seen = path.stat()
                    if stat.S_ISREG(seen.st_mode) and path.stem not in self._pinned:
                        found.append((seen.st_mtime, seen.st_size, path))
            total = sum(size for _, size, _ in found)
            for _, size, path in sorted(found):
                if total <= self._max_bytes:
                    return
                if path.stem not in kept:
                    total -= size
                    self._verified_s.pop(path.stem, None)
                    path.unlink(missing_ok=True)


def _never() -> bool:
    return False


def attempts(cancel: Cancel, away: Callable[[], bool] = _never) -> Retrying:
    """Attempts of a transfer, until PATIENCE_S have passed in a row; what passes while the coordinator is
    ``away`` counts for nothing, as a stage waits for it too. Cancelled as soon as that is set in a pause."""
    enough = stop_after_pauses(PATIENCE_S)

    def stop(state: RetryCallState) -> bool:
        if away():
            state.idle_for = 0.0
        return enough(state)

    return retrying(stop, cancel.wait)


def most_bytes(state: StateMeta) -> int:
    """Upper bound of a tensor's blob: value, optimizer state, header."""
    return state.meta.nbytes + STATE_KEYS * 4 * state.meta.elements + HEADER_BYTES


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """A file with what changed since the blob ``base``, which the store had; ``hash``: of the delta."""

    path: Path
    hash: str
    size: int
    base: str


@dataclass(frozen=True, slots=True)
class BlobFile:
    """A file to store; ``hash``: sha256 of its bytes, hexadecimal. ``delta``: a shorter way to the store."""

    path: Path
    hash: str
    size: int
    delta: DeltaFile | None = None


class BlobStore(Protocol):
    """The blob store in files, as whoever computes sees it."""

    def path(self, name: str) -> Path:
        """Where a blob that was fetched lies; read it, and leave it as it is."""

    def fetch(
        self, wanted: Mapping[str, int], cancel: Cancel, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        """Have every blob of ``wanted`` (hash -> most bytes) in its file; ``progress`` hears of bytes that
        came. BadFrame, ConnectionFailed, StorageError, Cancelled."""

    def store(
        self,
        files: Sequence[BlobFile],
        cancel: Cancel,
        progress: Callable[[int], None] = lambda nbytes: None,
        *,
        new: bool = False,
    ) -> int:
        """Store files; returns the bytes that travelled, which ``progress`` hears of piece by piece. ``new``:
        the store cannot have any of them, so that question's round trip is saved. StorageError (a full
        store), ConnectionFailed, Cancelled."""

    def keep(self, files: Sequence[BlobFile], cancel: Cancel) -> None:
        """Have files in this machine's own folder, as if they had been fetched. BadFrame for one that is not
        what its hash says, StorageError, Cancelled."""

    def fetch_near(
        self,
        holder: str,
        wanted: Mapping[str, int],
        cancel: Cancel,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Have of ``wanted`` what a worker of the same site lends, as far as it can send it. BadFrame,
        StorageError, Cancelled."""

    def lend(self, blob: str, cancel: Cancel, file: BlobFile | None = None, borrower: str = "") -> None:
        """Let ``borrower`` have a file, or without one let every worker that the coordinator names have what
        is fetched under that hash. BadFrame, StorageError, UsageError where this machine's owner does not
        allow it, Cancelled."""


class NearBlobs(Protocol):
    """A peer that may have blobs as well."""

    def get(self, wanted: list[tuple[str, int]]) -> Iterable[Chunk]:
        """Yield the chunks of each blob from its offset on. Raises AtollError for what it cannot send."""


class Neighbours(Protocol):
    """Workers that the coordinator named, as a source of blobs and as who borrows them."""

    def lender(self, worker: str, cancel: Cancel) -> NearBlobs:
        """Return what a worker lends; ``cancel`` ends the wait for what it is fetching itself."""

    def lend(self, blob: str, borrower: str) -> None:
        """Let ``borrower`` have a blob of the cache, "": any of them."""


class BlobFiles:
    """``BlobStore`` over a port. Raises ConnectionFailed after PATIENCE_S without a new byte."""

    def __init__(
        self,
        port: BlobPort,
        cache: BlobCache,
        max_bytes_per_s: float | None = None,
        traffic: Traffic | None = None,
        away: Callable[[], bool] = _never,
    ) -> None:
        """``max_bytes_per_s`` of uploads, on average, None: as fast as it goes; within what ``traffic`` lets
        pass. ``away``: whether the coordinator is known to be, which makes no transfer fail."""
        self._port, self._cache, self._rate, self._away = port, cache, max_bytes_per_s, away
        self._traffic = traffic or Traffic()
        self._near: tuple[NearBlobs, ...] = ()
        self.neighbours: Neighbours | None = None  # known once there are links

    def prefer(self, near: Sequence[NearBlobs]) -> None:
        """Ask these first from now on, in this order; the store has what they cannot send."""
        self._near = tuple(near)

    def path(self, name: str) -> Path:
        return self._cache.path(name)

    def fetch(
        self,
        wanted: Mapping[str, int],
        cancel: Cancel,
        progress: Callable[[int], None] = lambda _: None,
        near: Sequence[NearBlobs] | None = None,
    ) -> None:
        """As ``BlobStore``; ``near``: whom to ask first, None: those that are preferred."""
        cache = self._cache
        with cache.changed:
            while not cache.busy.isdisjoint(wanted):
                cancel.check()
                cache.changed.wait(POLL_S)
            cache.busy.update(wanted)
        try:
            self._fetch(wanted, cancel, progress, self._near if near is None else near)
        finally:
            with cache.changed:
                cache.busy.difference_update(wanted)
                cache.changed.notify_all()

    def _fetch(
        self,
        wanted: Mapping[str, int],
        cancel: Cancel,
        progress: Callable[[int], None],
        near: Sequence[NearBlobs],
    ) -> None:
        self._cache.trim(wanted)
        for one in near:
            self._fetch_near(one, wanted, cancel, progress)
        self._fetch_changes(wanted, cancel, progress)
        self._fetch_whole(wanted, cancel, progress)

    def _fetch_whole(
        self, wanted: Mapping[str, int], cancel: Cancel, progress: Callable[[int], None]
    ) -> None:
        for chunk in fetch(self._port.get, partial(self._cache.lacking, wanted), self._attempts(cancel)):
            self._take(chunk, wanted, cancel, progress)
            cancel.wait(self._traffic.received(len(chunk.data)))

    def _fetch_changes(
        self, wanted: Mapping[str, int], cancel: Cancel, progress: Callable[[int], None]
    ) -> None:
        """Make what is lacking of older blobs that are here and of the deltas since. Whatever does not come
        that way is fetched whole; what has come of deltas stays for the next try where this is cancelled.
        """
        lacking = [name for name, held in self._cache.lacking(wanted) if not held]
        deltas: dict[str, int] = {}
        try:
            found = {change.hash: change for change in self._port.changes(lacking)} if lacking else {}
            ways = [way for name in lacking if (way := self._way(name, found, wanted[name]))]
            deltas = {change.delta: change.size for way in ways for change in way}
            if deltas:
                self._fetch_whole(deltas, cancel, progress)
                made = sum(self._made(way, cancel) for way in ways)
                log.info("blob.made", blobs=len(ways), bytes=sum(deltas.values()), of=made)
        except (AtollError, OSError) as error:
            log.info("blob.not_made", reason=str(error))
        self._cache.discard(deltas)

    def _way(self, name: str, found: Mapping[str, Change], most: int) -> list[Change]:
        """Return the deltas that lead from a blob that is here to ``name``, the oldest first."""
        way: list[Change] = []
        while (change := found.get(name)) is not None and len(way) < MOST_CHANGES:
            way.insert(0, change)
            if sum(one.size for one in way) > most:
                break
            if self._cache.held(change.base) is None:
                return way if self._cache.size(change.base) <= most else []
            name = change.base
        return []

    def _made(self, way: Sequence[Change], cancel: Cancel) -> int:
        """Make blobs of deltas, one of the other; returns the bytes of the last, which alone stays."""
        cache, size = self._cache, 0
        begun = {change.hash for change in way}
        try:
            for change in way:
                base, delta = (np.memmap(cache.path(n), np.uint8, "r") for n in (change.base, change.delta))
                size, offset = head_of(delta[:HEAD_BYTES].tobytes()).size, 0
                for piece in decode(base, delta):
                    cancel.check()
                    cache.write(Chunk(change.hash, size, offset, piece))
                    offset += len(piece)
            begun.discard(way[-1].hash)
        finally:
            cache.discard(begun)
        return size

    def _take(
        self, chunk: Chunk, wanted: Mapping[str, int], cancel: Cancel, progress: Callable[[int], None]
    ) -> None:
        cancel.check()
        if chunk.size > wanted.get(chunk.hash, -1):
            raise BadFrame(
                f"blob {chunk.hash[:12]} of {chunk.size} bytes; at most {wanted.get(chunk.hash)} fit"
            )
        self._cache.write(chunk)
        progress(len(chunk.data))

    def _fetch_near(
        self, near: NearBlobs, wanted: Mapping[str, int], cancel: Cancel, progress: Callable[[int], None]
    ) -> None:
        """Fetch from a peer what it can send. What it began and did not end may be wrong, and goes."""
        lacking = dict(self._cache.lacking(wanted))
        if not lacking:
            return
        came = 0
        try:
            for chunk in near.get(list(lacking.items())):
                self._take(chunk, wanted, cancel, progress)
                came += len(chunk.data)
            log.info("copy.fetched", bytes=came)
        except AtollError as error:
            log.info("copy.not_fetched", reason=str(error))
            begun = self._cache.lacking(lacking)
            self._cache.discard(name for name, held in begun if held != lacking[name])

    def store(
        self,
        files: Sequence[BlobFile],
        cancel: Cancel,
        progress: Callable[[int], None] = lambda nbytes: None,
        *,
        new: bool = False,
    ) -> int:
        pace = self._paced(cancel)

        def before(nbytes: int) -> None:
            pace(nbytes)
            progress(nbytes)

        short = {file.hash: file.delta for file in files if file.delta is not None}
        travelled, done = self._patched(files, short, cancel, before) if short else (0, frozenset())
        return travelled + upload(
            self._port,
            [LocalBlob(f.hash, f.size, partial(_pieces, f.path)) for f in files if f.hash not in done],
            self._attempts(cancel),
            before=before,
            new=new,
        )

    def _patched(
        self,
        files: Sequence[BlobFile],
        short: Mapping[str, DeltaFile],
        cancel: Cancel,
        before: Callable[[int], None],
    ) -> tuple[int, frozenset[str]]:
        """Send deltas of what the store lacks; returns the bytes that travelled and the blobs that are whole
        now. Whatever does not come of it that way goes as a whole."""
        travelled, done = 0, frozenset[str]()
        try:
            lacking = self._port.missing(list(short))
            wanted = [f for f in files if f.delta is not None and not lacking.get(f.hash, 1)]
            for group in _groups(wanted):
                deltas = [short[file.hash] for file in group]
                travelled += upload(
                    self._port,
                    [LocalBlob(d.hash, d.size, partial(_pieces, d.path)) for d in deltas],
                    self._attempts(cancel),
                    before=before,
                )
                done |= frozenset(
                    self._port.patch(
                        [
                            Patch(file.hash, file.size, delta.base, delta.hash)
                            for file, delta in zip(group, deltas, strict=True)
                        ]
                    )
                )
        except (UsageError, AccessDenied, ConnectionFailed) as error:
            log.info("state.not_patched", reason=str(error))
        if done:
            whole = sum(file.size for file in files if file.hash in done)
            log.info("state.patched", blobs=len(done), bytes=travelled, of=whole)
        return travelled, done

    def keep(self, files: Sequence[BlobFile], cancel: Cancel) -> None:
        cache = self._cache
        for file in files:
            if cache.held(file.hash) is None:
                continue
            cache.discard((file.hash,))  # what has come of it otherwise is the longer way
            offset = 0
            for piece in _pieces(file.path, 0):
                cancel.check()
                cache.write(Chunk(file.hash, file.size, offset, piece))
                offset += len(piece)
            if cache.held(file.hash) is not None:
                raise BadFrame(f"{file.path.name} has {offset} bytes, {file.size} were named")

    def fetch_near(
        self,
        holder: str,
        wanted: Mapping[str, int],
        cancel: Cancel,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        if self.neighbours is not None:
            self._fetch_near(self.neighbours.lender(holder, cancel), wanted, cancel, progress)

    def lend(self, blob: str, cancel: Cancel, file: BlobFile | None = None, borrower: str = "") -> None:
        if file is not None:
            self.keep([file], cancel)
        if self.neighbours is not None:
            self.neighbours.lend(blob, borrower)

    def _attempts(self, cancel: Cancel) -> Retrying:
        return attempts(cancel, self._away)

    def _paced(self, cancel: Cancel) -> Callable[[int], None]:
        """Wait as long as the rates demand; raises Cancelled."""
        pace = _Pace(self._rate)
        return lambda nbytes: cancel.wait(max(pace.delay_s(nbytes), self._traffic.sent(nbytes)))


def _groups(files: Iterable[BlobFile]) -> Iterator[list[BlobFile]]:
    """Files that are patched by one call, which the store answers once it has read and written them all."""
    group: list[BlobFile] = []
    for file in files:
        group.append(file)
        if sum(one.size for one in group) >= PATCHED_AT_ONCE_BYTES or len(group) == PATCHED_AT_ONCE:
            yield group
            group = []
    if group:
        yield group


def _pieces(path: Path, offset: int) -> Iterator[bytes]:
    """The file's bytes from ``offset`` on. StorageError unless it is a plain file: who wrote it may have put
    a link there, to what is none of its business."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with disk(f"read {path}"):
        descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StorageError(f"{path} is not a plain file")
        file.seek(offset)
        while piece := file.read(CHUNK_BYTES):
            yield piece


class _Pace:
    """Guests' manners: at most ``rate`` bytes a second on average (None: as fast as it goes)."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._due_s = 0.0

    def delay_s(self, nbytes: int) -> float:
        """Seconds to wait before sending ``nbytes``."""
        if self._rate is None:
            return 0.0
        now = time.monotonic()
        begin = max(self._due_s, now)
        self._due_s = begin + nbytes / self._rate
        return begin - now


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
