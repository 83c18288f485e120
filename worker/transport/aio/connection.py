"""One pipe to a peer: a coroutine that sends frames and one that handles those that arrive.

Both ends are alike, whoever dialled. Frames leave in this order: control, the acknowledgement of
everything that arrived, data by urgency, measurements; small ones that wait leave as one message.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError, BadFrame
from protos.text_limits import clean
from worker.transport.aio.window import Sent
from worker.transport.bundle import MAX_BUNDLE_BYTES, MAX_FRAMES, join, split
from worker.transport.frames import (
    MAX_CHUNK_BYTES,
    MAX_REASON_BYTES,
    MEASURED,
    Ack,
    Buffer,
    Close,
    Data,
    Flag,
    Frame,
    Ping,
    Pong,
    Probe,
    confirmations,
    decode,
    encode,
)

if TYPE_CHECKING:
    from worker.transport.aio.peer import Peer
    from worker.transport.aio.pipes import Pipe
    from worker.transport.contract import Deliver, TransportConfig
    from worker.transport.outbox import Chunk

log = structlog.get_logger()

SPARE_PING_S = 15.0
"""Between the pings of a connection that need not show that the peer lives: keeps routers' mappings."""
MAX_PONGS = 64  # waiting to be sent
MAX_PINGS = 16  # unanswered
_FILLER = bytes(MAX_CHUNK_BYTES)
_numbers = itertools.count()


class Connection:
    """Attached to its peer from the start of ``run`` to its end. Methods are called on the loop, under the
    peer's lock where it says so."""

    def __init__(self, pipe: Pipe, peer: Peer, deliver: Deliver, *, outbound: bool, checksum: bool) -> None:
        """``outbound``: for data of ours, where there are enough connections for each end to have its own."""
        self.peer, self.outbound = peer, outbound
        self.number = next(_numbers)
        self.in_flight = 0  # bytes
        self.resting = False  # the sender waits for something to do
        self.reason = ""
        self.leaving = False  # the peer said goodbye
        self.silent = False  # nothing came for too long
        self.malformed = False  # it sent what is none of the protocol
        self.heard_s = time.monotonic()
        self.asked_s: float | None = None  # the first ping since something was heard
        self._pipe, self._deliver = pipe, deliver
        self._checksum = Flag.CHECKSUM if checksum else 0
        self._wanted = asyncio.Event()
        self._control: deque[Frame] = deque()
        self._closing = False
        self._owes = False  # an acknowledgement
        self._received = self._sent = self._acked = 0  # bytes of payload
        self._under_way: deque[tuple[int, Chunk | None, Sent]] = deque()  # (end byte, chunk, ...)
        self._pings: dict[int, float] = {}
        self._ping_number = 0
        self._pinged_s = self.heard_s
        self._tasks: list[asyncio.Task[None]] = []
        self._over = False
        peer.attach(self)

    # -- life

    async def run(self) -> None:
        """Send and receive until either end closes or the pipe breaks; ``reason`` then says why."""
        try:
            if not self._over:
                self._tasks = [asyncio.create_task(work) for work in (self._send_all(), self._receive_all())]
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                if self._closing:  # our last frame is to leave, and the other side to see it
                    await asyncio.wait(self._tasks, timeout=self.peer.config.close_s)
        finally:
            self._end()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._pipe.close()

    def _end(self) -> None:
        self._over = True
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                expected = isinstance(error, AtollError)
                if not expected:
                    log.error("stream.failed", peer=self.peer.name, exc_info=error)
                why = str(error) if expected else f"{type(error).__name__} here"
                self.reason = self.reason or clean(why, MAX_REASON_BYTES)
            task.cancel()
        self.reason = self.reason or "connection broken"
        self.peer.detach(self, [chunk for _, chunk, _ in self._under_way if chunk is not None])

    def fail(self, reason: str) -> None:
        """End at once."""
        self.reason = self.reason or reason
        self._over = True
        for task in self._tasks:
            task.cancel()

    def close(self, reason: str, *, leaving: bool) -> None:
        """Say why, then end."""
        if not self._closing:
            self._control.append(Close(leaving, reason))
            self._closing = True
            self.reason = self.reason or "closed"
            self.wake()

    # -- sending half

    @property
    def urgent(self) -> bool:
        """Something other than data is to be sent; the lock is held."""
        return bool(self._control) or self._owes

    def wake(self) -> None:
        """Something to send may be there."""
        self.resting = False
        self._wanted.set()

    def owe(self) -> None:
        """Acknowledge what arrived, with whatever leaves next."""
        self._owes = True
        self.wake()

    async def _send_all(self) -> None:
        while True:
            with self.peer.lock:
                frames = self._next_frames()
                self.resting = not frames
                if self.resting:
                    self._wanted.clear()
            if frames:
                await self._pipe.send(join([encode(*frame) for frame in frames]))
            elif self._closing:
                await self._pipe.finish()
                return
            else:
                await self._wanted.wait()

    def _next_frames(self) -> list[tuple[Frame, Buffer]]:
        peer = self.peer
        frames: list[tuple[Frame, Buffer]] = []
        while self._control and len(frames) < MAX_FRAMES // 2:
            frames.append((self._control.popleft(), b""))
        if self._closing:  # CLOSE is a side's last frame
            return frames
        if self._owes:
            now, peer.confirm = confirmations(peer.confirm)
            self._owes = bool(peer.confirm)
            frames.append((Ack(((self._received, 0),), time.monotonic_ns(), now), b""))
        size, enough = 0, min(peer.window.chunk, MAX_BUNDLE_BYTES // 2)
        while size < enough and len(frames) < MAX_FRAMES and (chunk := peer.take(self)) is not None:
            payload = chunk.message.payload[chunk.offset : chunk.offset + chunk.length]
            frame = peer.data_frame(chunk, self._checksum)
            self._note_sent(chunk, len(payload))
            frames.append((frame, payload))
            size += len(payload) + len(frame.meta)
        if not size and peer.probe_bytes > 0 and peer.has_room(self):
            length = min(peer.window.chunk, peer.probe_bytes)
            peer.probe_bytes -= length
            self._note_sent(None, length)
            frames.append((Probe(self._checksum | Flag.ACK_NOW), memoryview(_FILLER)[:length]))
        peer.wake_one()
        return frames

    def _note_sent(self, chunk: Chunk | None, nbytes: int) -> None:
        now_s, peer = time.monotonic(), self.peer
        backlogged = peer.outbox.waiting or peer.probe_bytes > 0
        self.in_flight += nbytes
        self._sent += nbytes
        self._under_way.append((self._sent, chunk, peer.window.sent(now_s, nbytes, backlogged=backlogged)))
        peer.note_sent(now_s, nbytes)

    def ping(self, now_s: float) -> int:
        """Queue an echo request; returns its number. Any thread, under the lock."""
        self._ping_number += 1
        if len(self._pings) >= MAX_PINGS:
            self._pings.clear()
        self._pings[self._ping_number] = self._pinged_s = now_s
        if self.asked_s is None or self.asked_s <= self.heard_s:
            self.asked_s = now_s
        if not self._closing:
            self._control.append(Ping(self._ping_number))
            self.peer.nudge()
        return self._ping_number

    def watch(self, now_s: float, config: TransportConfig, *, asleep: bool) -> None:
        """Ask whether the other side lives, and end when it has not answered for too long. ``asleep``: this
        process was stopped meanwhile. Under the lock."""
        peer = self.peer
        unused = not self.in_flight and (now_s - peer.used_s > config.idle_s or peer.front is not self)
        if asleep or unused or (self.asked_s is not None and self.asked_s <= self.heard_s):
            self.asked_s = None  # silence counts from the next question
        # An answer may wait behind a second of data on a slow link.
        if self.asked_s is not None and now_s - self.asked_s > config.silence_s - config.ping_s / 2:
            self.silent = True
            self.fail(f"silent for {now_s - self.heard_s:.1f} s")
        every_s = SPARE_PING_S if unused else config.ping_s
        if now_s - self._pinged_s >= every_s and now_s - self.heard_s >= every_s / 2:
            self.ping(now_s)

    # -- receiving half

    async def _receive_all(self) -> None:
        try:
            while not self.leaving and (message := await self._pipe.receive()) is not None:
                for part in split(message):
                    self._handle(*decode(part))
                    if self._over:
                        return
        except BadFrame as error:
            self.malformed = True
            self.close(str(error), leaving=False)
        self.reason = self.reason or "connection closed by the peer"

    def _handle(self, frame: Frame, payload: memoryview) -> None:
        self.heard_s = time.monotonic()
        peer = self.peer
        if isinstance(frame, Data):
            self._on_data(frame, payload)
        elif isinstance(frame, Ack):
            with peer.lock:
                self._on_ack(frame)
        elif isinstance(frame, Probe):
            with peer.lock:
                self._note_arrival(len(payload))
        elif isinstance(frame, Ping):
            if len(self._control) < MAX_PONGS and not self._closing:
                self._control.append(Pong(frame.number))
                self.wake()
        elif isinstance(frame, Pong):
            with peer.lock:
                self._on_pong(frame)
        elif isinstance(frame, Close):
            self.leaving = frame.leaving
            self.fail(f"{'left' if frame.leaving else 'closed'}: {frame.reason}" if frame.reason else "left")
        else:
            raise BadFrame("a second HELLO on one connection")

    def _on_data(self, frame: Data, payload: memoryview) -> None:
        peer = self.peer
        with peer.lock:
            if peer.gone:
                return
            complete = peer.inbox.take(frame, payload)
            if complete is None and peer.inbox.is_done(frame.number):
                peer.confirm.append(frame.number)  # sent again, so the confirmation was lost
            peer.used_s = self.heard_s
        if complete is not None and complete.buffer is not None:
            self._deliver(peer.name, frame.key, complete.meta, complete.buffer)
        with peer.lock:
            if complete is not None:
                peer.confirm.append(frame.number)
            self._note_arrival(len(payload))

    def _note_arrival(self, nbytes: int) -> None:
        self._received += nbytes
        self.peer.progress += 1 if nbytes else 0  # a question is none
        self.owe()

    def _on_ack(self, frame: Ack) -> None:
        now_s, peer = time.monotonic(), self.peer
        if frame.received > self._sent:
            raise BadFrame(f"{frame.received} bytes acknowledged, {self._sent} sent")
        new, measured, newest = max(0, frame.received - self._acked), 0, None
        while self._under_way and self._under_way[0][0] <= frame.received:
            _, chunk, newest = self._under_way.popleft()
            if chunk is not None:
                peer.outbox.acknowledged(chunk)
                measured += chunk.length if chunk.message.key.direction in MEASURED else 0
        if peer.probe_acks is not None:
            peer.probe_acks.append((self.number, frame.clock_ns, frame.received))
        if new:
            self._acked += new
            self.in_flight -= new
            peer.window.acked(now_s, 1e-9 * frame.clock_ns, new, newest)
            # A hostile peer may acknowledge half a chunk and then the rest: never more than is new.
            peer.note_settled(now_s, new, min(measured, new))
        peer.confirmed(frame.confirmed)
        peer.wake_one()

    def _on_pong(self, frame: Pong) -> None:
        now_s, peer = time.monotonic(), self.peer
        sent_s = self._pings.pop(frame.number, None)
        if sent_s is None:
            return
        peer.window.note_rtt(now_s, now_s - sent_s)
        if (self.number, frame.number) in peer.echoes:
            peer.echoes[self.number, frame.number] = now_s - sent_s
            peer.room.notify_all()
