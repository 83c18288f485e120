"""The send log: messages of training steps that the held stage sent, on disk in wire form.

Whoever takes over a neighbour's stage repeats its steps from them (decision 033). Records follow each other
in files of some steps each; only where a step lies is kept in memory. A thread writes what was appended; a
disk that is full or too slow costs the oldest steps, or all of them, never a step of training. Nothing is
synced: a daemon that dies takes its stage with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import structlog

from atoll.errors import StorageError
from hostos.files.private_files import private_folder
from worker.hosting import TUNED
from worker.transport.frames import Buffer, Direction, MessageKey

log = structlog.get_logger()

LOGGED = frozenset(
    {
        Direction.BACKWARD,
        Direction.TIED_PARTIAL,
        Direction.TIED_TOTAL,
        Direction.FORWARD,
        Direction.PART,
        Direction.TOTAL,
    }
)
NOTHING = (1 << 63) - 1
"""``logged_from`` of a log that holds no step and will hold none."""
MAX_SEGMENT_BYTES = 64 << 20
MAX_PENDING_BYTES = 128 << 20
"""Appended and not on disk: a disk that falls so far behind costs the log its steps."""
MAX_STEPS = 1 << 17
_RECORD = struct.Struct("!IIIIBHQ")  # version, rank, micro, edge, direction, bytes of header and payload


class Record(NamedTuple):
    """A message of the log, and where the next one of its step begins."""

    key: MessageKey
    header: bytes
    payload: bytes
    next: int


@dataclass(eq=False)
class _Segment:
    path: Path
    size: int = 0
    last_step: int = 0  # written to it, or about to be


@dataclass(eq=False)
class _Step:
    """Where a step's records lie: (segment, begin, end) one after the other."""

    number: int
    pieces: list[tuple[_Segment, int, int]] = field(default_factory=list)


class _Pending(NamedTuple):
    step: _Step
    head: bytes
    payload: Buffer


class SendLog:
    """Log of one job's stage from ``first_step`` on; thread-safe. ``append`` never waits unless asked to."""

    def __init__(self, folder: Path, job: str, max_bytes: int, first_step: int) -> None:
        """``folder``: of its own, which ``close`` removes. ``max_bytes`` 0: nothing is logged."""
        self._folder, self._job, self._max_bytes = folder, job, max_bytes
        self._from = first_step if max_bytes else NOTHING
        self._lock = threading.Lock()  # of all fields
        self._writing = threading.Lock()  # of the newest file; taken before _lock
        self._wake = threading.Condition(self._lock)
        self._steps: dict[int, _Step] = {}  # ascending
        self._segments: list[_Segment] = []
        self._garbage: list[_Segment] = []  # to be deleted by who writes
        self._pending: list[_Pending] = []
        self._pending_bytes = 0  # of these, and of those being written
        self._due = self._closed = self._failing = False
        self._limit = max_bytes
        self._numbers = 0
        if max_bytes:
            threading.Thread(target=self._write, name="atoll-send-log", daemon=True).start()

    @property
    def logged_from(self) -> int:
        """The first step from which on everything that was sent is here."""
        return self._from

    @property
    def newest(self) -> int:
        """The last step that anything was appended of; -1 before the first."""
        with self._lock:
            return next(reversed(self._steps), -1)

    # ------------------------------------------------------------ what is sent

    def append(
        self, rank: int, key: MessageKey, header: bytes, payload: Buffer, *, wait: bool = False
    ) -> None:
        """Note a message to ``rank``, whose payload must not change. ``wait``: until there is room for it,
        where that can be had by writing; otherwise the log gives up what it has."""
        if key.direction not in LOGGED:
            return
        which = (key.plan_version, rank, key.micro, key.edge, int(key.direction))
        head = _RECORD.pack(*which, len(header), len(payload)) + header
        if len(payload) <= TUNED.copied_bytes:
            payload = bytes(payload)
        if wait and self._pending_bytes + len(payload) > MAX_PENDING_BYTES // 2:
            self._drain()
        with self._lock:
            if self._closed or key.step < self._from:
                return
            step = self._steps.get(key.step)
            if step is None:
                if key.step < next(reversed(self._steps), -1):
                    return  # of no step that anybody computes now
                step = self._steps[key.step] = _Step(key.step)
                if len(self._steps) > MAX_STEPS:
                    self._give_up(next(iter(self._steps)))
            self._pending.append(_Pending(step, head, payload))
            self._pending_bytes += len(head) + len(payload)
            if self._pending_bytes > MAX_PENDING_BYTES and len(self._pending) > 1:
                log.warning("send_log.behind", job=self._job, step=key.step, bytes=self._pending_bytes)
                self._give_up(key.step)
            self._due = self._due or self._pending_bytes >= TUNED.write_bytes
            if self._due:
                self._wake.notify()

    def trim(self, step: int) -> None:
        """Nobody will ask for messages of steps before ``step``."""
        with self._lock:
            if self._from < step:
                self._give_up(step - 1)

    def drop_from(self, step: int) -> None:
        """Forget ``step`` and later ones: they begin anew."""
        with self._lock:
            for number in [number for number in self._steps if number >= step]:
                del self._steps[number]
            self._forget_pending()

    def close(self) -> None:
        """Have everything removed, as soon as nothing is being written."""
        with self._lock:
            self._closed = True
            self._steps.clear()
            self._forget_pending()
            self._wake.notify()

    # ------------------------------------------------------------ what is asked for

    def records(self, step: int, rank: int, at: int = 0) -> Iterator[Record]:
        """Messages of ``step`` to ``rank`` in the order in which they were sent, from position ``at`` of the
        step on, as far as there are any. StorageError when the step is not here, or no longer."""
        self._drain()
        with self._lock:
            if step < self._from or self._closed:
                raise StorageError(f"step {step} is not in the send log, which begins at {self._from}")
            found = self._steps.get(step)
            pieces = list(found.pieces) if found is not None else []
        begin = 0
        for segment, first, end in pieces:
            if at < begin + end - first:
                yield from self._read(segment, max(first, first + at - begin), end, begin - first, step, rank)
            begin += end - first

    def _read(
        self, segment: _Segment, at: int, end: int, base: int, step: int, rank: int
    ) -> Iterator[Record]:
        try:
            with segment.path.open("rb") as file:
                while at < end:
                    file.seek(at)
                    version, to, micro, edge, direction, n_header, n_payload = _RECORD.unpack(
                        file.read(_RECORD.size)
                    )
                    at += _RECORD.size + n_header + n_payload
                    if to == rank:
                        key = MessageKey(self._job, version, step, micro, edge, Direction(direction))
                        header, payload = file.read(n_header), file.read(n_payload)
                        if len(payload) < n_payload:
                            raise ValueError("a record is cut short")
                        yield Record(key, header, payload, at + base)
        except (OSError, ValueError, struct.error) as error:
            raise StorageError(f"step {step} of the send log cannot be read: {error}") from None

    # ------------------------------------------------------------ files

    def _write(self) -> None:
        """Thread: what was appended."""
        while not self._closed:
            with self._lock:
                self._wake.wait_for(lambda: self._due or self._closed)
                self._due = False
            self._drain()
        with self._writing:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _drain(self) -> None:
        """Put on disk what was appended by now."""
        with self._writing:
            with self._lock:
                batch, self._pending = self._pending, []
                if self._closed:
                    return
            try:
                for step, pending in groupby(batch, key=lambda entry: entry.step):
                    self._write_step(step, list(pending))
                self._failing = self._failing and not batch
            except (OSError, StorageError) as error:
                with self._lock:
                    lost = next(reversed(self._steps), self._from)
                    self._give_up(lost)
                if not self._failing:  # a full disk fails every step
                    log.warning("send_log.not_written", job=self._job, step=lost, reason=str(error))
                self._failing = True
            finally:
                with self._lock:
                    self._pending_bytes = sum(len(p.head) + len(p.payload) for p in self._pending)
                    garbage, self._garbage = self._garbage, []
                for segment in garbage:
                    with contextlib.suppress(OSError):  # the folder goes as a whole in the end
                        segment.path.unlink()

    def _write_step(self, step: _Step, pending: list[_Pending]) -> None:
        """Write a step's messages; files change only between steps. OSError."""
        segment = self._segment_of(step)
        with segment.path.open("ab") as file:
            for entry in pending:
                file.write(entry.head)
                file.write(entry.payload)
            end = file.tell()
        with self._lock:
            step.pieces.append((segment, segment.size, end))
            segment.size = end
            held = sum(s.size for s in self._segments)
            while held > self._limit and self._segments:
                held -= self._segments[0].size
                self._give_up(self._segments[0].last_step)

    def _segment_of(self, step: _Step) -> _Segment:
        """The file that a step goes to. StorageError where the disk has no room for one."""
        with self._lock:
            newest = self._segments[-1] if self._segments else None
            most = min(MAX_SEGMENT_BYTES, self._limit // TUNED.segments)
            if newest is not None and (newest.size < most or newest.last_step >= step.number):
                newest.last_step = max(newest.last_step, step.number)
                return newest
            held = sum(segment.size for segment in self._segments)
        private_folder(self._folder)
        limit = min(
            self._max_bytes, int(TUNED.free_disk_share * (shutil.disk_usage(self._folder).free + held))
        )
        self._numbers += 1
        segment = _Segment(self._folder / str(self._numbers), last_step=step.number)
        os.close(os.open(segment.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with self._lock:
            self._limit = limit
            self._segments.append(segment)
        return segment

    def _give_up(self, step: int) -> None:
        """Hold nothing of ``step`` and before; the lock is held."""
        self._from = max(self._from, step + 1)
        while self._steps and next(iter(self._steps)) <= step:
            del self._steps[next(iter(self._steps))]
        while self._segments and self._segments[0].last_step <= step:
            self._garbage.append(self._segments.pop(0))
        self._due = self._due or bool(self._garbage)
        self._forget_pending()
        self._wake.notify()

    def _forget_pending(self) -> None:
        """Write nothing of steps that are not held; the lock is held."""
        left = [entry for entry in self._pending if self._steps.get(entry.step.number) is entry.step]
        self._pending_bytes -= sum(len(p.head) + len(p.payload) for p in self._pending)
        self._pending_bytes += sum(len(p.head) + len(p.payload) for p in left)
        self._pending = left
