"""One pipe to a peer: a coroutine that sends frames and one that handles those that arrive.

Both ends are alike, whoever dialled. Frames leave in this order: control, the acknowledgement of
everything that arrived, data by urgency; small ones that wait leave as one message.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import AtollError, BadFrame
from protos.text_limits import clean
from worker.transport import TUNED
from worker.transport.contract import Way
from worker.transport.frames import (
    MAX_CONFIRMED,
    MAX_FRAMES,
    MAX_REASON_BYTES,
    Ack,
    Close,
    Data,
    Frame,
    Ping,
    Pong,
    decode_all,
    encode,
)

if TYPE_CHECKING:
    from worker.transport.peers.outbox import Chunk
    from worker.transport.peers.peer import Peer
    from worker.transport.peers.window import Sent
    from worker.transport.pipes import Pipe

log = structlog.get_logger()

MAX_PONGS = 64  # waiting to be sent
MAX_PINGS = 16  # unanswered
_ping_numbers = itertools.count(1)


class Connection:
    """Attached to its peer from the start to the end of ``run``. Methods are called on the loop, under the
    peer's lock where it says so."""

    def __init__(
        self, pipe: Pipe, peer: Peer, *, outbound: bool, summed: bool, way: Way = Way.DIRECT
    ) -> None:
        """``outbound``: for data of ours, where there are enough connections for each end to have its own.
        ``summed``: payloads too, as no TLS does it."""
        self.peer, self.outbound, self.way = peer, outbound, way
        self.in_flight = 0  # bytes
        self.reason = ""
        self.leaving = False  # the peer said goodbye
        self.heard_s = time.monotonic()
        self.asked_s: float | None = None  # the first ping since something was heard
        self._pipe, self._summed = pipe, summed
        self._busy = asyncio.Event()  # unset: the sender waits for something to do
        self._busy.set()
        self._held = False  # data of ours waits for its turn
        self._control: deque[Frame] = deque()
        self._closing = False
        self._owes = False  # an acknowledgement
        self._received = self._sent = self._acked = 0  # bytes of payload
        self._under_way: deque[tuple[int, Chunk, Sent]] = deque()  # (end byte, chunk, ...)
        self._pings: dict[int, float] = {}
        self._pinged_s = self.heard_s
        self._over = asyncio.Event()
        # What arrived before this machine may take it in: (when, data); at most the sender's window.
        self._early: asyncio.Queue[tuple[float, Data, memoryview]] = asyncio.Queue()
        self._waiting = 0  # of these
        peer.attach(self)

    # -- life

    async def run(self) -> None:
        """Send and receive until either end closes or the pipe breaks; ``reason`` then says why."""
        tasks = [asyncio.create_task(self._work(half)) for half in (self._send_all, self._receive_all)]
        taking = asyncio.create_task(self._work(self._take_early))
        try:
            await self._over.wait()
            if self._closing:  # our last frame is to leave, and the other side to see it
                await asyncio.wait(tasks, timeout=self.peer.config.close_s)
        finally:
            self.peer.detach(self, [chunk for _, chunk, _ in self._under_way])
            for task in (*tasks, taking):
                task.cancel()
            await asyncio.gather(*tasks, taking, return_exceptions=True)
            await self._pipe.close()

    async def _work(self, half: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await half()
        except AtollError as error:
            self.fail(str(error))
        except Exception as error:
            log.exception("stream.failed", peer=self.peer.name)
            self.fail(f"{type(error).__name__} here")
        else:
            self.fail("connection closed by the peer")

    def fail(self, reason: str) -> None:
        """End at once; after ``close`` once that has left."""
        self.reason = self.reason or clean(reason, MAX_REASON_BYTES)
        self._over.set()

    def close(self, reason: str, *, leaving: bool) -> None:
        """Say why, then end."""
        if not self._closing:
            self._control.append(Close(leaving, reason))
            self._closing = True
            self.reason = self.reason or "closed"
            self.wake()

    # -- sending half

    @property
    def resting(self) -> bool:
        return not (self._busy.is_set() or self._held)

    @property
    def urgent(self) -> bool:
        """Something other than data is to be sent; the lock is held."""
        return bool(self._control) or self._owes

    def wake(self) -> None:
        """Something to send may be there."""
        self._busy.set()

    def owe(self) -> None:
        """Acknowledge what arrived, with whatever leaves next."""
        self._owes = True
        self.wake()

    async def _send_all(self) -> None:
        while True:
            with self.peer.lock:
                urgent, data = self._urgent_frames(), self._data_frames()
            if urgent or data:
                await self._turn(len(data))
                await self._pipe.send(urgent + data)
            elif self._closing:
                await self._pipe.finish()
                return
            else:
                self._busy.clear()
                await self._busy.wait()

    async def _turn(self, nbytes: int) -> None:
        """Wait until data of this size may leave; control and acknowledgements pass meanwhile."""
        wait_s = self.peer.traffic.sent(nbytes)
        if wait_s <= 0:
            return
        until_s, self._held = time.monotonic() + wait_s, True
        while not self._closing and (left_s := until_s - time.monotonic()) > 0:
            self._busy.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._busy.wait(), left_s)
            with self.peer.lock:
                urgent = self._urgent_frames() if not self._closing else b""
            if urgent:
                await self._pipe.send(urgent)
        self._held = False
        self.wake()

    def _urgent_frames(self) -> bytes:
        """What passes data: control, then an acknowledgement; the lock is held."""
        peer = self.peer
        found: list[bytes] = []
        while self._control and len(found) < MAX_FRAMES // 2:
            found.append(encode(self._control.popleft()))
        if self._closing:  # CLOSE is a side's last frame
            return b"".join(found)
        if self._owes:
            now, peer.confirm = tuple(peer.confirm[:MAX_CONFIRMED]), peer.confirm[MAX_CONFIRMED:]
            self._owes = bool(peer.confirm)
            found.append(encode(Ack(self._received, time.monotonic_ns(), now)))
        return b"".join(found)

    def _data_frames(self) -> bytes:
        """Chunks that leave together; the lock is held."""
        peer = self.peer
        found: list[bytes] = []
        if self._closing:
            return b""
        size, enough = 0, min(peer.chunk, TUNED.together_bytes)
        while size < enough and len(found) < MAX_FRAMES // 2 - 1 and (chunk := peer.take(self)) is not None:
            payload = chunk.message.payload[chunk.offset : chunk.offset + chunk.length]
            frame = peer.data_frame(chunk)
            found.append(encode(frame, payload, summed=self._summed))
            self.in_flight += len(payload)
            self._sent += len(payload)
            sent = peer.note_sent(time.monotonic(), chunk.message.key, len(payload))
            self._under_way.append((self._sent, chunk, sent))
            size += len(payload) + len(frame.meta)
        peer.wake_one()
        return b"".join(found)

    def ping(self, now_s: float) -> int:
        """Queue an echo request; returns its number. Any thread, under the lock."""
        number = next(_ping_numbers)
        if len(self._pings) >= MAX_PINGS:
            self._pings.clear()
        self._pings[number] = self._pinged_s = now_s
        if self.asked_s is None or self.asked_s <= self.heard_s:
            self.asked_s = now_s
        if not self._closing:
            self._control.append(Ping(number))
            self.peer.nudge()
        return number

    def watch(self, now_s: float, *, asleep: bool) -> None:
        """Ask whether the other side lives, and end when it has not answered for too long. ``asleep``: this
        process was stopped meanwhile. Under the lock."""
        peer, config = self.peer, self.peer.config
        spare = now_s - peer.used_s > config.idle_s or peer.front is not self
        unused = spare and not self.in_flight and now_s >= peer.doubted_until_s
        if asleep or unused or (self.asked_s is not None and self.asked_s <= self.heard_s):
            self.asked_s = None  # silence counts from the next question
        # An answer may wait behind a second of data on a slow link.
        if self.asked_s is not None and now_s - self.asked_s > config.silence_s - config.ping_s / 2:
            self.fail(f"silent for {now_s - self.heard_s:.1f} s")
            # The others may be as dead: where the peer has moved, all are.
            peer.doubted_until_s = now_s + 2 * config.silence_s
        every_s = TUNED.spare_ping_s if unused else config.ping_s
        if now_s - self._pinged_s >= every_s and now_s - self.heard_s >= every_s / 2:
            self.ping(now_s)

    # -- receiving half

    async def _receive_all(self) -> None:
        try:
            while not self.leaving and (message := await self._pipe.receive()) is not None:
                wait_s = self.peer.traffic.received(len(message))
                for frame, payload in decode_all(message):
                    self._handle(frame, payload, wait_s)
                    if self._over.is_set():
                        return
        except BadFrame as error:
            self._malformed(error)

    async def _take_early(self) -> None:
        """Take in data when its time has come; until then it is not acknowledged, so the sender's window
        closes, while signs of life pass."""
        try:
            while True:
                at_s, frame, payload = await self._early.get()
                await asyncio.sleep(max(0.0, at_s - time.monotonic()))
                self._take(frame, payload)
                self._waiting -= 1
        except BadFrame as error:
            self._malformed(error)
            await self._over.wait()

    def _malformed(self, error: BadFrame) -> None:
        log.warning("peer.malformed", peer=self.peer.name, reason=str(error))
        self.close(str(error), leaving=False)

    def _take(self, frame: Data, payload: memoryview) -> None:
        self.peer.receive(frame, payload)
        self._received += len(payload)
        self.owe()

    def _handle(self, frame: Frame, payload: memoryview, wait_s: float = 0.0) -> None:
        self.heard_s = time.monotonic()
        match frame:
            case Data() if wait_s > 0.0 or self._waiting:  # in order: acknowledgements count bytes
                self._waiting += 1
                self._early.put_nowait((self.heard_s + wait_s, frame, payload))
            case Data():
                self._take(frame, payload)
            case Ack():
                with self.peer.lock:
                    self._on_ack(frame)
            case Ping(number):
                if len(self._control) < MAX_PONGS and not self._closing:
                    self._control.append(Pong(number))
                    self.wake()
            case Pong(number):
                sent_s = self._pings.pop(number, None)
                if sent_s is not None:
                    self.peer.note_echo(number, self.heard_s, self.heard_s - sent_s)
            case Close(leaving, reason):
                self.leaving = leaving
                self.fail(f"{'left' if leaving else 'closed'}: {reason}" if reason else "left")
            case _:
                raise BadFrame("a second HELLO on one connection")

    def _on_ack(self, frame: Ack) -> None:
        if not self._acked <= frame.received <= self._sent:
            raise BadFrame(f"{frame.received} bytes acknowledged, {self._sent} sent")
        arrived: list[tuple[Chunk, Sent]] = []
        while self._under_way and self._under_way[0][0] <= frame.received:
            arrived.append(self._under_way.popleft()[1:])
        new, self._acked = frame.received - self._acked, frame.received
        self.in_flight -= new
        self.peer.note_acked(self.heard_s, frame, new, arrived)
