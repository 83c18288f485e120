"""Content-addressed blobs to and from the coordinator's store, resumable both ways.

Of a blob that broke off only the rest travels. Memory holds a piece at a time of what is read from files;
where blobs go, and how much of each is there, is the caller's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from atoll.errors import ConnectionFailed, UsageError
from hostos.retries import progressed

if TYPE_CHECKING:
    from tenacity import AttemptManager, Retrying


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [offset, offset + len(data)) of a blob of ``size`` bytes."""

    hash: str
    size: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Patch:
    """A blob of ``size`` bytes as a delta against another of that size: all by their hashes."""

    hash: str
    size: int
    base: str
    delta: str


@dataclass(frozen=True, slots=True)
class Change:
    """A blob that the blob ``base`` becomes by the blob ``delta`` of ``size`` bytes: all by their hashes."""

    hash: str
    base: str
    delta: str
    size: int


class BlobPort(Protocol):
    """The blob store as its users see it; every method raises ConnectionFailed when cut off and StorageError
    when the store refuses."""

    def get(self, wanted: list[tuple[str, int]]) -> Iterable[Chunk]:
        """Yield the chunks of each blob in the order of ``wanted``: (hash, offset to start from)."""
        ...

    def missing(self, hashes: list[str]) -> dict[str, int]:
        """Hash -> bytes already there, of those that are not whole."""
        ...

    def put(self, chunks: Iterator[Chunk]) -> Collection[str]:
        """Store what is not there yet; which blobs have become whole, or were."""
        ...

    def patch(self, patches: list[Patch]) -> Collection[str]:
        """Make blobs of deltas that were put; which have become whole. UsageError where nobody does that."""
        ...

    def changes(self, hashes: list[str]) -> list[Change]:
        """Return the deltas that lead to these blobs, each one's newest first. UsageError where nobody keeps
        any."""
        ...


@dataclass(frozen=True, slots=True)
class LocalBlob:
    """A blob to upload, read when it is needed: ``read(offset)`` gives its bytes from there on in pieces."""

    hash: str
    size: int
    read: Callable[[int], Iterable[bytes]]

    @classmethod
    def of(cls, read: Callable[[], bytes], piece_bytes: int) -> LocalBlob:
        """The blob that ``read`` returns; it must return the same bytes every time."""
        data = read()

        def pieces(offset: int) -> Iterator[bytes]:
            data = read()
            for at in range(offset, max(len(data), 1), piece_bytes):
                yield data[at : at + piece_bytes]

        return cls(hashlib.sha256(data).hexdigest(), len(data), pieces)

    @classmethod
    def streamed(cls, read: Callable[[int], Iterable[bytes]]) -> LocalBlob:
        """The blob whose pieces ``read(offset)`` gives, the same every time; never in memory as a whole."""
        digest, size = hashlib.sha256(), 0
        for piece in read(0):
            digest.update(piece)
            size += len(piece)
        return cls(digest.hexdigest(), size, read)


class _Sending:
    """An upload in progress: what has gone, over all streams and attempts."""

    def __init__(
        self,
        blobs: Mapping[str, LocalBlob],
        progress: Callable[[int, int], None],
        before: Callable[[int], None],
    ) -> None:
        self.blobs, self._progress, self._before = blobs, progress, before
        self.total = sum(blob.size for blob in blobs.values())
        self.sent = self._done = self._furthest = 0
        self._stopped = False
        self._lock = Lock()

    def attempt(
        self, port: BlobPort, missing: Mapping[str, int], attempt: AttemptManager, streams: int
    ) -> set[str]:
        """Send what is ``missing``; which blobs have become whole. Raises what the first stream that fails
        does, once all have stopped."""
        self._done = self.total - sum(self.blobs[name].size - at for name, at in missing.items())
        self._progress(self._done, self.total)
        self._stopped = False
        shares = [share for share in self._shares(missing, streams) if share]
        if len(shares) < 2:
            return {name for share in shares for name in port.put(self._chunks(share, attempt))}
        whole: set[str] = set()
        with ThreadPoolExecutor(len(shares)) as pool:
            futures = [pool.submit(port.put, self._chunks(share, attempt)) for share in shares]
            try:
                for future in as_completed(futures):
                    whole |= set(future.result())
            finally:
                self._stopped = True
        return whole

    def _shares(self, missing: Mapping[str, int], streams: int) -> list[dict[str, int]]:
        """The blobs by stream, about as many bytes in each."""
        shares: list[dict[str, int]] = [{} for _ in range(streams)]
        bytes_of = [0] * streams
        for name in sorted(missing, key=lambda name: missing[name] - self.blobs[name].size):
            least = bytes_of.index(min(bytes_of))
            shares[least][name] = missing[name]
            bytes_of[least] += self.blobs[name].size - missing[name]
        return shares

    def _chunks(self, missing: Mapping[str, int], attempt: AttemptManager) -> Iterator[Chunk]:
        for name, offset in missing.items():
            for piece in self.blobs[name].read(offset):
                if self._stopped:
                    raise ConnectionFailed("another stream of the upload has failed")
                self._before(len(piece))
                yield Chunk(name, self.blobs[name].size, offset, piece)
                offset += len(piece)
                self._gone(len(piece), attempt)

    def _gone(self, n_bytes: int, attempt: AttemptManager) -> None:
        with self._lock:
            self.sent += n_bytes
            self._done += n_bytes
            self._progress(self._done, self.total)
            if self._done > self._furthest:
                self._furthest = self._done
                progressed(attempt)


def upload(
    port: BlobPort,
    blobs: Iterable[LocalBlob],
    attempts: Retrying,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    before: Callable[[int], None] = lambda nbytes: None,
    new: bool = False,
    streams: int = 1,
) -> int:
    """Send what the store lacks, from where an earlier upload ended; returns the bytes that travelled.

    ``progress(bytes done, bytes in all)`` is called as it goes, ``before(nbytes)`` in front of every piece.
    ``new``: the store cannot have any of them, so that question's round trip is saved. ``streams``: blobs
    sent at a time, each from a thread of its own where there are several. Raises StorageError (a full store),
    ConnectionFailed, UsageError where the store refuses what was sent from its first byte, and what
    ``before`` raises.
    """
    by_hash = {blob.hash: blob for blob in blobs}
    sending = _Sending(by_hash, progress, before)
    for attempt in attempts:
        with attempt:
            found = dict.fromkeys(by_hash, 0) if new else port.missing(list(by_hash))
            new = False
            # What is longer than the blob is not of it.
            missing = {h: at if at < by_hash[h].size else 0 for h, at in found.items() if h in by_hash}
            try:
                whole = sending.attempt(port, missing, attempt, streams)
            except UsageError as error:
                if not any(missing.values()):
                    raise
                # What was there was not of the blob, as after a power cut: it is dropped now.
                raise ConnectionFailed(str(error)) from error
            if not missing.keys() <= whole:
                # A store that never has it must not be asked for ever.
                raise ConnectionFailed(f"the store did not keep {len(missing)} blobs that were sent")
    progress(sending.total, sending.total)
    return sending.sent


def fetch(
    get: Callable[[list[tuple[str, int]]], Iterable[Chunk]],
    lacking: Callable[[], list[tuple[str, int]]],
    attempts: Retrying,
) -> Iterator[Chunk]:
    """Yield chunks until ``lacking()``, pairs of a hash and the bytes that are there, is empty.

    Goes on after a lost connection; ConnectionFailed after so many attempts without a new chunk. What
    arrives is not checked here.
    """
    for attempt in attempts:
        with attempt:
            while wanted := lacking():
                for chunk in get(wanted):
                    yield chunk
                    progressed(attempt)
                if lacking() == wanted:
                    raise ConnectionFailed(f"the store sent nothing of {len(wanted)} blobs")
