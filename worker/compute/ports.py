"""The compute process's ports: blobs, micro-batches and links, all by way of the daemon's pipe."""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from atoll import errors
from atoll.errors import AtollError, ConnectionFailed
from protos import atoll_compute_pb2 as pb
from protos import atoll_control_pb2 as control
from worker.blobs import BlobFile
from worker.cancel import Cancel
from worker.pipe.arena import Allocator, Arena
from worker.pipe.keys import from_key, to_key
from worker.spans import Span, Spans
from worker.stage.batches import Arrived, Fetch
from worker.transport.contract import PeerLost, Receiver

if TYPE_CHECKING:
    from worker.links.ports import Arrival
    from worker.transport.frames import MessageKey

POLL_S = 0.1
ANNOUNCED_AT_ONCE = 4096
READ_AT_ONCE, READ_BYTES = 16, 8 << 20  # blocks that were read and may wait for a message to travel with

Send = Callable[[pb.FromCompute], None]


@dataclass(frozen=True, slots=True)
class Arenas:
    """Where tensors lie: the daemon writes ``incoming``, this process ``outgoing``."""

    incoming: Arena
    outgoing: Arena


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The most that may be on its way to one peer."""

    bytes: int
    messages: int


Asked = pb.FetchBlobs | pb.StoreFiles | pb.FetchBatches | pb.JobLinks | pb.FetchNear | pb.LendBlob
_BODIES = {
    pb.FetchBlobs: "fetch",
    pb.StoreFiles: "store",
    pb.FetchBatches: "batches",
    pb.JobLinks: "connect",
    pb.FetchNear: "near",
    pb.LendBlob: "lend",
}


@dataclass
class _Request:
    progress: Callable[[int], None]
    replies: queue.SimpleQueue[pb.Answer | control.Batch] = field(default_factory=queue.SimpleQueue)


class Requests:
    """What was asked of the daemon and is not answered."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._open: dict[int, _Request] = {}

    def ask(
        self, asked: Asked, cancel: Cancel | None, progress: Callable[[int], None] = lambda _: None
    ) -> int:
        """Ask, and return the answer's figure. Raises the daemon's error, Cancelled."""
        return next(r.bytes for r in self._replies(asked, cancel, progress) if isinstance(r, pb.Answer))

    def batches(self, asked: pb.FetchBatches) -> Iterator[control.Batch]:
        """Ask, and yield what comes until the answer does. Raises as ``ask``."""
        for reply in self._replies(asked):
            if isinstance(reply, control.Batch):
                yield reply

    def answered(self, number: int, reply: pb.Answer | control.Batch) -> None:
        """Pass on the daemon's word on a request; nobody may wait for it any more."""
        request = self._open.get(number)
        if request is not None:
            request.replies.put(reply)

    def transferred(self, number: int, total: int) -> None:
        """Pass on that so many bytes of a request have come or gone."""
        request = self._open.get(number)
        if request is not None:
            request.progress(total)

    def _replies(
        self, asked: Asked, cancel: Cancel | None = None, progress: Callable[[int], None] = lambda _: None
    ) -> Iterator[pb.Answer | control.Batch]:
        number, request = next(self._numbers), _Request(progress)
        self._open[number] = request
        answered = False
        try:
            asked.request = number
            self._send(pb.FromCompute(**{_BODIES[type(asked)]: asked}))  # type: ignore[arg-type]
            while not answered:
                reply = _next(request, cancel)
                if isinstance(reply, pb.Answer):
                    answered = True
                    if reply.kind:
                        raise _error(reply)
                yield reply
        finally:
            del self._open[number]
            if not answered:
                self._send(pb.FromCompute(cancel=number))


def _next(request: _Request, cancel: Cancel | None) -> pb.Answer | control.Batch:
    while True:
        if cancel is not None:
            cancel.check()
        try:
            return request.replies.get(timeout=POLL_S if cancel is not None else None)
        except queue.Empty:
            continue


def _error(answer: pb.Answer) -> Exception:
    if answer.peer:
        return PeerLost(answer.peer, answer.error)
    kind = getattr(errors, answer.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, AtollError)):
        kind = ConnectionFailed
    return kind(answer.error)


class DaemonBlobs:
    """``BlobStore`` of the daemon: it fetches and sends, files are read and written here."""

    def __init__(self, requests: Requests, folder: Path) -> None:
        self._requests, self._folder = requests, folder

    def path(self, name: str) -> Path:
        return self._folder / name

    def fetch(
        self, wanted: Mapping[str, int], cancel: Cancel, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        blobs = [control.BlobRef(hash=name, size=most) for name, most in wanted.items()]
        before = 0

        def came(total: int) -> None:
            nonlocal before
            progress(total - before)
            before = total

        came(self._requests.ask(pb.FetchBlobs(blobs=blobs), cancel, came))

    def store(
        self,
        files: Sequence[BlobFile],
        cancel: Cancel,
        progress: Callable[[int], None] = lambda nbytes: None,
        *,
        new: bool = False,
    ) -> int:
        return self._requests.ask(pb.StoreFiles(files=_files(files), new=new), cancel, progress)

    def keep(self, files: Sequence[BlobFile], cancel: Cancel) -> None:
        self._requests.ask(pb.StoreFiles(files=_files(files), keep=True), cancel)

    def fetch_near(
        self,
        holder: str,
        wanted: Mapping[str, int],
        cancel: Cancel,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        blobs = [control.BlobRef(hash=name, size=most) for name, most in wanted.items()]
        self._requests.ask(pb.FetchNear(holder=holder, blobs=blobs), cancel, progress)

    def lend(self, blob: str, cancel: Cancel, file: BlobFile | None = None, borrower: str = "") -> None:
        [held] = _files([file]) if file is not None else [pb.StoreFile(hash=blob)]
        self._requests.ask(pb.LendBlob(file=held, borrower=borrower), cancel)


def _files(files: Sequence[BlobFile]) -> list[pb.StoreFile]:
    found = []
    for file in files:
        found.append(pb.StoreFile(hash=file.hash, size=file.size, path=str(file.path)))
        if (delta := file.delta) is not None:
            found[-1].delta_path, found[-1].delta_hash = str(delta.path), delta.hash
            found[-1].delta_size, found[-1].base = delta.size, delta.base
    return found


def daemon_batches(requests: Requests, job: str, micros: range | None) -> Fetch:
    """A job's micro-batches from the data provider; ``micros``: which of a step, None: all."""

    def fetch(evaluation: bool, inputs: tuple[str, ...], first_step: int, count: int) -> Iterator[Arrived]:
        wanted = control.BatchRequest(
            job=job, evaluation=evaluation, inputs=inputs, first_step=first_step, count=count
        )
        if micros is not None:
            wanted.first_micro, wanted.micros = micros.start, len(micros)

        for b in requests.batches(pb.FetchBatches(batches=wanted)):
            yield Arrived(b.step, b.micro, b.input, b.dtype, tuple(b.shape), b.data)

    return fetch


class DaemonNetwork:
    """Links to the plan's neighbours: tensors lie in the arenas, the daemon carries them.

    ``send`` is called by the compute thread, ``arrived``, ``freed`` and ``lost`` by the one that reads the
    pipe.
    """

    def __init__(self, send: Send, requests: Requests, arenas: Arenas, bounds: QueueBounds, spans: Spans):
        self._tell, self._requests, self._spans = send, requests, spans
        self._incoming, self._outgoing = arenas.incoming, Allocator(arenas.outgoing)
        self._bounds = bounds
        self._room = threading.Condition()
        self._held: dict[int, tuple[str, int]] = {}  # offset -> peer, bytes: on its way
        self._under_way: dict[str, tuple[int, int]] = {}  # peer -> messages, bytes
        self._receivers: dict[str, Receiver] = {}
        self._lost: dict[str, str] = {}
        self._read_blocks: deque[int] = deque()
        self._read_bytes = 0

    # ------------------------------------------------------------ the links' side

    def register(self, job: str, receiver: Receiver) -> None:
        with self._room:
            self._receivers[job] = receiver

    def unregister(self, job: str, receiver: Receiver) -> None:
        with self._room:
            if self._receivers.get(job) is receiver:
                del self._receivers[job]

    def forget(self, job: str, plan_version: int | None = None) -> None:
        self._tell(pb.FromCompute(forget=pb.JobLinks(job=job, plan_version=plan_version or 0)))

    def announce(self, arrivals: list[tuple[Arrival, int]]) -> None:
        for first in range(0, len(arrivals), ANNOUNCED_AT_ONCE):
            wanted = [
                pb.Wanted(peer=arrival.peer, key=to_key(arrival.key), max_bytes=most)
                for arrival, most in arrivals[first : first + ANNOUNCED_AT_ONCE]
            ]
            # Before anything of a new plan can lie where something of the last one lay.
            self._tell(pb.FromCompute(freed=self._take_read(), wanted=pb.WantedList(messages=wanted)))

    def connect(self, job: str, plan_version: int, cancel: Cancel) -> None:
        """Be connected to every neighbour. Raises PeerLost naming the one that is not, Cancelled."""

        with self._room:
            self._lost.clear()
        self._requests.ask(pb.JobLinks(job=job, plan_version=plan_version), cancel)

    def send(
        self,
        peer: str,
        key: MessageKey,
        header: bytes,
        payload: bytes | bytearray | memoryview,
        timeout_s: float | None = None,
        more: bool = False,
    ) -> None:
        """Queue a message; waits while as much as may be is on its way. PeerLost, TimeoutError."""
        with self._spans.timed("send", key.step, key.micro, peer, len(payload)):
            self._hand_over(pb.Outgoing(peer=peer, header=header, more=more), key, payload, timeout_s)

    def record(
        self,
        peer: str,
        key: MessageKey,
        header: bytes,
        payload: bytes | bytearray | memoryview,
        timeout_s: float | None = None,
    ) -> None:
        """As ``send``, for the send log alone."""
        self._hand_over(pb.Outgoing(peer=peer, header=header, log_only=True), key, payload, timeout_s)

    def _hand_over(
        self,
        outgoing: pb.Outgoing,
        key: MessageKey,
        payload: bytes | bytearray | memoryview,
        timeout_s: float | None,
    ) -> None:
        size = len(payload)
        outgoing.offset = self._allocate(outgoing.peer, size, timeout_s)
        self._outgoing.arena.block(outgoing.offset, size)[:] = np.frombuffer(payload, np.uint8)
        outgoing.key.CopyFrom(to_key(key))
        outgoing.size = size
        self._tell(pb.FromCompute(freed=self._take_read(), outgoing=outgoing))

    def _allocate(self, peer: str, size: int, timeout_s: float | None) -> int:
        deadline_s = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        with self._room:
            while True:
                if peer in self._lost:
                    raise PeerLost(peer, self._lost[peer])
                messages, held = self._under_way.get(peer, (0, 0))
                fits = not messages or (
                    messages < self._bounds.messages and held + size <= self._bounds.bytes
                )
                offset = self._outgoing.allocate(size) if fits else None
                if offset is not None:
                    self._held[offset] = (peer, size)
                    self._under_way[peer] = (messages + 1, held + size)
                    return offset
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"{held} bytes for {peer} are still in flight")
                self._room.wait(min(left_s, POLL_S * 10))

    # ------------------------------------------------------------ the daemon's side

    def arrived(self, m: pb.Arrived) -> None:
        """A message lies in the daemon's arena: copy it, free it, deliver it."""
        key = from_key(m.key)
        with self._room:
            receiver = self._receivers.get(key.job)
        buffer = receiver.expect(m.peer, key, m.size) if receiver is not None else None
        if buffer is not None:
            np.frombuffer(buffer, np.uint8)[:] = self._incoming.block(m.offset, m.size) if m.size else ()
        if m.size:
            self._read_blocks.append(m.offset)
            self._read_bytes += m.size
            most = min(READ_BYTES, self._incoming.size // 16)
            if len(self._read_blocks) >= READ_AT_ONCE or self._read_bytes >= most:
                self._tell(pb.FromCompute(freed=self._take_read()))
        if receiver is not None and buffer is not None:
            now_s = self._spans.now_s()
            receiver.deliver(m.peer, key, m.header, buffer)
            self._spans.add(Span("recv", key.step, key.micro, now_s - m.lasted_s, now_s, m.peer, m.size))

    def _take_read(self) -> list[int]:
        """Blocks that were read since the last call, to be freed; any thread."""
        taken: list[int] = []
        self._read_bytes = 0
        with contextlib.suppress(IndexError):  # another thread took the last one
            while self._read_blocks:
                taken.append(self._read_blocks.popleft())
        return taken

    def freed(self, offsets: Iterable[int]) -> None:
        """The daemon needs these blocks no more."""
        with self._room:
            for offset in offsets:
                peer, size = self._held.pop(offset, ("", 0))
                if not peer:
                    continue
                messages, held = self._under_way[peer]
                self._under_way[peer] = (messages - 1, held - size)
                self._outgoing.freed(offset)
            self._room.notify_all()

    def lost(self, peer: str, reason: str) -> None:
        """A peer is gone."""
        with self._room:
            self._lost[peer] = reason
            receivers = list(self._receivers.values())
            self._room.notify_all()
        for receiver in receivers:
            receiver.lost(peer, reason)

    def tidy(self) -> None:
        """Return memory that nothing is on its way in."""
        self._outgoing.tidy()
