"""Keeps copies of stages' parts of checkpoints on this machine's disk, as the coordinator asks, while idle;
and of the snapshots that the ranks of a plan keep for each other while they train (decision 058).

They lie in the cache of blobs, which does not delete what is kept as a copy, and take no more than the owner
lends and a quarter of the free disk. A thread fetches them: from the store for half of the time at most, from
a peer that trains as its link has time to spare.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError, StorageError
from atoll.messages.from_worker import CopyHeld, CopyStored
from worker.blobs import BlobFile
from worker.cancel import Cancel, Cancelled
from worker.hosting import TUNED

if TYPE_CHECKING:
    from atoll.messages.to_worker import PeerLink, StageCopy, StoreCopy
    from worker.blobs import BlobCache, BlobFiles, NearBlobs

log = structlog.get_logger()

MAX_STORING = 8  # copies on their way to the store


class Copies:
    """``keep`` and ``may_work`` never wait; ``send`` hears of what is kept, or why it is not."""

    def __init__(
        self,
        blobs: BlobFiles,
        cache: BlobCache,
        folder: Path,
        lent_bytes: int,
        send: Callable[[CopyHeld | CopyStored], None],
        near: Callable[[PeerLink], NearBlobs],
        owner: int = 0,
    ) -> None:
        """``folder``: on the disk of the cache. ``near(holder)``: what a peer keeps. ``owner``: number of the
        device, where several share it."""
        self._owner, self._near = owner, near
        self._blobs, self._cache, self._folder, self._send = blobs, cache, folder, send
        self.lent_bytes = lent_bytes
        self._changed = threading.Condition()
        self._idle = self._closed = False
        self._wanted: tuple[StageCopy, ...] = ()
        self._todo: list[StageCopy] = []
        self._fetching: StageCopy | None = None
        self._held: dict[str, CopyHeld] = {}
        self._before: frozenset[str] = frozenset()  # blobs of the copies that were kept before these
        self._own: frozenset[str] = frozenset()  # of the newest snapshot of the stage that is computed here
        self._storing = 0
        self._cancel = Cancel()
        self._thread = threading.Thread(target=self._work, name="atoll-copies", daemon=True)
        self._thread.start()

    def keep(self, copies: Sequence[StageCopy]) -> None:
        """Keep these copies, and no others, from now on."""
        with self._changed:
            now, last = _blobs_of(copies), _blobs_of(self._wanted)
            # A stage may be about to load what was kept until now; what was kept before that may go.
            stale, self._before = self._before - now - last, last
            self._cache.keep(now, self._owner)
            self._wanted, self._todo = tuple(copies), list(copies)
            self._held = {}
            self._cancel.set("other copies are wanted")
            if self._idle:
                self._take(frozenset())
            if self._idle or any(copy.working for copy in copies):
                self._cache.release(stale, self._owner)
            self._changed.notify()

    def take(self, files: Sequence[BlobFile], cancel: Cancel) -> None:
        """Keep the parts of a snapshot of the stage that is computed here, in place of the one before; those
        that are asked for as copies stay. Raises StorageError, BadFrame, Cancelled."""
        names = frozenset(file.hash for file in files)
        with self._changed:
            others = sum(map(self._cache.size, (_blobs_of(self._wanted) | self._own) - names))
            if sum(file.size for file in files) > self._room() - others:
                raise StorageError(
                    f"no room for a snapshot beside {others} bytes of copies: this worker lends "
                    f"{self.lent_bytes}; raise --copy-bytes or free space"
                )
            self._take(self._own | names)  # both until it is whole
        self._blobs.keep(files, cancel)
        with self._changed:
            self._take(names)

    def _take(self, names: frozenset[str]) -> None:
        self._own = names
        self._cache.keep(names, ~self._owner)  # an owner of its own beside those of copies

    def store(self, wanted: StoreCopy) -> None:
        """Put blobs that were kept as a copy into the store, and answer."""
        with self._changed:
            if self._storing >= MAX_STORING:
                return
            self._storing += 1
        threading.Thread(target=self._store, args=(wanted,), name="atoll-copies-up", daemon=True).start()

    def _store(self, wanted: StoreCopy) -> None:
        error = ""
        try:
            lacking = self._cache.lacking(wanted.blobs)
            if lacking:
                raise StorageError(f"{len(lacking)} of {len(wanted.blobs)} blobs are not here any more")
            files = [BlobFile(self._cache.path(b), b, self._cache.size(b)) for b in wanted.blobs]
            self._blobs.store(files, Cancel())
        except AtollError as failed:
            error = str(failed)[:500]
        except Exception as failed:  # the coordinator waits for an answer
            log.exception("copy.not_stored", job=wanted.job, name=wanted.name)
            error = f"{type(failed).__name__} in this worker"
        with self._changed:
            self._storing -= 1
        self._send(CopyStored(wanted.job, wanted.name, error))

    def may_work(self, idle: bool) -> None:
        """Fetch while there is nothing to compute."""
        with self._changed:
            if idle == self._idle:
                return
            self._idle = idle
            if idle:
                self._changed.notify()
            elif self._fetching is None or not self._fetching.working:
                self._cancel.set("there is work")

    @property
    def offered(self) -> frozenset[str]:
        """Blobs of the copies that are whole here."""
        with self._changed:
            return self._own | _blobs_of([copy for copy in self._wanted if copy.name in self._held])

    @property
    def held(self) -> list[CopyHeld]:
        """What is kept whole, for the introduction."""
        with self._changed:
            return list(self._held.values())

    def close(self) -> None:
        """Fetch nothing more."""
        with self._changed:
            self._closed = True
            self._cancel.set("leaving")
            self._changed.notify()

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                copy, cancel = self._next(), Cancel()
                if self._closed or copy is None:
                    return
                self._cancel, self._fetching = cancel, copy
            try:
                answer = self._fetched(copy, cancel)
            except Cancelled:
                continue
            except Exception as error:  # the next copy must find this thread alive
                log.exception("copy.not_kept", job=copy.job, name=copy.name)
                cause = f"{type(error).__name__} in this worker"
                answer = CopyHeld(copy.job, copy.name, error=cause)
            with self._changed:
                if all(other is not copy for other in self._todo):
                    continue
                self._todo = [other for other in self._todo if other is not copy]
                if not answer.error:
                    self._held[copy.name] = answer
            self._send(answer)

    def _next(self) -> StageCopy | None:
        return next((copy for copy in self._todo if self._idle or copy.working), None)

    def _fetched(self, copy: StageCopy, cancel: Cancel) -> CopyHeld:
        """Have a copy whole on disk; returns the answer to the coordinator. Raises Cancelled."""
        others = sum(held.n_bytes for held in self._held.values())
        came, busy_s, last_s = 0, 0.0, time.perf_counter()
        room = self._room() - others - self._here(copy)
        near = [self._near(holder) for holder in copy.holders] if copy.working else None

        def progress(nbytes: int) -> None:
            nonlocal came, busy_s, last_s
            taken_s = time.perf_counter() - last_s
            came, busy_s = came + nbytes, busy_s + taken_s
            if came > room:
                raise StorageError(f"copies of more than the {self.lent_bytes} bytes that this worker lends")
            if near is None:  # else who sends has waited: it knows the link
                cancel.wait(min(taken_s, TUNED.most_rest_s))
            last_s = time.perf_counter()

        try:
            if room < 0:
                raise StorageError(f"no room for copies beside {others} bytes of others")
            self._blobs.fetch(copy.blobs, cancel, progress, near)
        except AtollError as error:
            log.info("copy.not_kept", job=copy.job, name=copy.name, reason=str(error))
            if isinstance(error, StorageError):
                self._cache.release(set(copy.blobs) - self.offered, self._owner)
            return CopyHeld(copy.job, copy.name, error=str(error)[:500])
        n_bytes = self._here(copy)
        log.info("copy.kept", job=copy.job, name=copy.name, bytes=n_bytes, fetched_bytes=came)
        return CopyHeld(copy.job, copy.name, n_bytes, came, busy_s)

    def _room(self) -> int:
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError:
            free = 0
        held = sum(held.n_bytes for held in self._held.values())
        return min(self.lent_bytes, int(TUNED.free_disk_share * (free + held)))

    def _here(self, copy: StageCopy) -> int:
        return sum(map(self._cache.size, copy.blobs))


def _blobs_of(copies: Sequence[StageCopy]) -> frozenset[str]:
    return frozenset(blob for copy in copies for blob in copy.blobs)
