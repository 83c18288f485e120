"""Keeps copies of stages' parts of checkpoints on this machine's disk, as the coordinator asks, while idle.

They lie in the cache of blobs, which does not delete what is kept as a copy, and take no more than the owner
lends and a quarter of the free disk. A thread fetches them, for half of the time at most.
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
from protos import atoll_control_pb2 as pb
from worker.cancel import Cancel, Cancelled

if TYPE_CHECKING:
    from worker.blobs import BlobCache, BlobStore
    from worker.session.wire import CopyAsked

log = structlog.get_logger()

FREE_SHARE = 0.25  # of what the disk has free, the most that copies take
MOST_REST_S = 1.0  # after a piece: a line that stood still is no reason to


class Copies:
    """``keep`` and ``may_work`` never wait; ``send`` hears of what is kept, or why it is not."""

    def __init__(
        self,
        blobs: BlobStore,
        cache: BlobCache,
        folder: Path,
        lent_bytes: int,
        send: Callable[[pb.FromWorker], None],
        owner: int = 0,
    ) -> None:
        """``folder``: on the disk of the cache. ``owner``: number of the device, where several share it."""
        self._owner = owner
        self._blobs, self._cache, self._folder, self._send = blobs, cache, folder, send
        self.lent_bytes = lent_bytes
        self._changed = threading.Condition()
        self._idle = self._closed = False
        self._wanted: tuple[CopyAsked, ...] = ()
        self._todo: list[CopyAsked] = []
        self._held: dict[str, pb.CopyHeld] = {}
        self._before: frozenset[str] = frozenset()  # blobs of the copies that were kept before these
        self._cancel = Cancel()
        self._thread = threading.Thread(target=self._work, name="atoll-copies", daemon=True)
        self._thread.start()

    def keep(self, copies: Sequence[CopyAsked]) -> None:
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
                self._cache.release(stale, self._owner)
            self._changed.notify()

    def may_work(self, idle: bool) -> None:
        """Fetch while there is nothing to compute."""
        with self._changed:
            if idle == self._idle:
                return
            self._idle = idle
            if idle:
                self._changed.notify()
            else:
                self._cancel.set("there is work")

    @property
    def offered(self) -> frozenset[str]:
        """Blobs of the copies that are whole here."""
        with self._changed:
            return _blobs_of([copy for copy in self._wanted if copy.name in self._held])

    @property
    def held(self) -> list[pb.CopyHeld]:
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
                self._changed.wait_for(lambda: self._closed or (self._idle and self._todo))
                if self._closed:
                    return
                copy, cancel = self._todo[0], Cancel()
                self._cancel = cancel
            try:
                answer = self._fetched(copy, cancel)
            except Cancelled:
                continue
            except Exception as error:  # the next copy must find this thread alive
                log.exception("copy.not_kept", job=copy.job, name=copy.name)
                cause = f"{type(error).__name__} in this worker"
                answer = pb.CopyHeld(job=copy.job, name=copy.name, error=cause)
            with self._changed:
                if not self._todo or self._todo[0] is not copy:
                    continue
                del self._todo[0]
                if not answer.error:
                    self._held[copy.name] = answer
            self._send(pb.FromWorker(copy_held=answer))

    def _fetched(self, copy: CopyAsked, cancel: Cancel) -> pb.CopyHeld:
        """Have a copy whole on disk; returns the answer to the coordinator. Raises Cancelled."""
        others = sum(held.bytes for held in self._held.values())
        came, busy_s, last_s = 0, 0.0, time.perf_counter()
        room = self._room() - others - self._here(copy)

        def progress(nbytes: int) -> None:
            nonlocal came, busy_s, last_s
            taken_s = time.perf_counter() - last_s
            came, busy_s = came + nbytes, busy_s + taken_s
            if came > room:
                raise StorageError(f"copies of more than the {self.lent_bytes} bytes that this worker lends")
            cancel.wait(min(taken_s, MOST_REST_S))
            last_s = time.perf_counter()

        try:
            if room < 0:
                raise StorageError(f"no room for copies beside {others} bytes of others")
            self._blobs.fetch(copy.blobs, cancel, progress)
        except AtollError as error:
            log.info("copy.not_kept", job=copy.job, name=copy.name, reason=str(error))
            if isinstance(error, StorageError):
                self._cache.release(set(copy.blobs) - self.offered, self._owner)
            return pb.CopyHeld(job=copy.job, name=copy.name, error=str(error)[:500])
        n_bytes = self._here(copy)
        log.info("copy.kept", job=copy.job, name=copy.name, bytes=n_bytes, fetched_bytes=came)
        return pb.CopyHeld(job=copy.job, name=copy.name, bytes=n_bytes, fetched_bytes=came, took_s=busy_s)

    def _room(self) -> int:
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError:
            free = 0
        held = sum(held.bytes for held in self._held.values())
        return min(self.lent_bytes, int(FREE_SHARE * (free + held)))

    def _here(self, copy: CopyAsked) -> int:
        return sum(map(self._cache.size, copy.blobs))


def _blobs_of(copies: Sequence[CopyAsked]) -> frozenset[str]:
    return frozenset(blob for copy in copies for blob in copy.blobs)
