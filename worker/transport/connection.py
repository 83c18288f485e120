"""One stream to a peer: frames out and frames in, in whatever thread has them.

A message starts in the thread that queued it, when nothing is being written, and else in the one that
tells that the last is; what arrives is handed to ``receive``. Both ends of a connection are alike, whoever
dialled. Frames leave in this order: control, acknowledgements, data by urgency, measurements; small ones
that wait leave as one message. What the other side does not wait for is acknowledged with the data that
goes back next.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from atoll.errors import BadFrame
from worker.transport.bundle import LEAST_ROOM, MAX_BUNDLE_BYTES, MAX_FRAMES, join, room_for, split, within
from worker.transport.frames import (
    MAX_CHUNK_BYTES,
    MEASURED,
    Ack,
    Buffer,
    Close,
    Data,
    Flag,
    Frame,
    Hello,
    Ping,
    Pong,
    Probe,
    decode,
    encode,
)
from worker.transport.outbox import Chunk
from worker.transport.receipts import Receipts
from worker.transport.turns import Turns
from worker.transport.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.transport.grpc_streams import NewWire, Wire
    from worker.transport.peer import Peer

_PROBE_FILLER = bytes(MAX_CHUNK_BYTES)
_numbers = itertools.count()


class Connection:
    """State of one stream; attached to its peer between ``open`` and ``fail``."""

    def __init__(self, hello: Hello, *, dialled: bool, checksum: bool, on_end: Callable[[Connection], None]):
        self.hello = hello  # ours
        self.remote: Hello | None = None
        self.number = next(_numbers)
        self.dialled = dialled
        self.checksum = Flag.CHECKSUM if checksum else 0
        self.peer: Peer | None = None
        self.window = Window()
        self.greeted = threading.Event()  # or ended before that
        self.reason = ""
        self.leaving = False  # the peer said goodbye
        self.deaf = False  # it sent what is none of the protocol: nothing more of it is looked at
        self.silent = False  # nothing came for too long
        self.heard_s = time.monotonic()
        self.asked_s = float("-inf")  # the first ping since something was heard
        self._on_end = on_end
        self.gone = threading.Event()
        self._lock = Turns()  # the peer's, once attached
        self._wire: Wire | None = None
        self._writing = False
        self.said_all = False  # the last frame has left
        self._control: deque[Frame] = deque()
        self._closing = False
        self._receipts = Receipts()
        self._reading = False  # more frames of the same message are being read
        self._under_way: deque[tuple[int, Chunk | None]] = deque()  # (end byte, chunk)
        self._pings: dict[int, float] = {}
        self._ping_number = 0

    # -- life

    def _hold(self) -> Turns:
        """Take the lock that guards this connection; it joins its peer's while others wait for its own."""
        while True:
            lock = self._lock
            lock.acquire()
            if lock is self._lock:
                return lock
            lock.release()

    def begin(self, wire: NewWire) -> None:
        """Say hello; all else waits until the peer has, too."""
        self._wire, self._writing = wire, True
        wire.open()
        if not wire.send(encode(self.hello), self._written):
            self.fail("connection broken")

    def open(self, remote: Hello, peer: Peer, shaped: Callable[[Wire], Wire]) -> None:
        """Join the peer: from now on its lock guards this connection, too."""
        with peer.lock, self._lock:
            if self.gone.is_set():
                return
            if self._wire is not None:
                self._wire = shaped(self._wire)
            self._lock = peer.lock
            self.window = Window(maximum=peer.config.max_window_bytes)
            self.remote, self.peer = remote, peer
            peer.lanes.append(self)
            peer.down_since_s = None
            peer.outbox.ask_again(self.window.chunk)
            self.greeted.set()
            peer.lock.put_off(self._write)

    @property
    def ended(self) -> bool:
        return self._closing or self.gone.is_set()

    def close(self, reason: str, *, leaving: bool) -> None:
        """Say why, then end once the frame is out."""
        lock = self._hold()
        try:
            if not self._closing:
                self._control.append(Close(leaving, reason))
                self._closing = True
            self.greeted.set()
            self.nudge()
        finally:
            lock.release()

    def fail(self, reason: str) -> None:
        """The stream is over; what it carried goes back to the peer. Any thread; the first call counts."""
        lock = self._hold()
        try:
            if self.gone.is_set():
                return
            self.reason = self.reason or reason
            self.gone.set()
            if self.peer is not None:
                self._detach(self.peer)
        finally:
            lock.release()
        self.greeted.set()
        try:
            self._on_end(self)
        finally:
            self._end_wire()

    def _end_wire(self) -> None:
        if self._wire is not None:
            self._wire.end()

    def _detach(self, peer: Peer) -> None:
        now_s = time.monotonic()
        peer.lanes.remove(self)
        if self.window.in_flight:
            peer.settled(now_s, self.window.in_flight, 0.0, arrived=False)
        peer.outbox.give_back([chunk for _, chunk in self._under_way if chunk is not None])
        self._under_way.clear()
        if peer.lanes:
            peer.outbox.ask_again(self.window.chunk)
            peer.nudge()
        else:
            peer.down_since_s, peer.down_reason, peer.down_silent = now_s, self.reason, self.silent
        peer.last_rtt_s = self.window.rtt_s or peer.last_rtt_s

    # -- sending half

    @property
    def waiting(self) -> bool:
        """Nothing is being written."""
        return not self._writing

    @property
    def outbound(self) -> bool:
        """Every other one is the dialler's, the first among them."""
        return (self.hello.lane % 2 == 0) == self.dialled

    def nudge(self) -> None:
        if not self._writing:
            self._lock.put_off(self._write)  # not under the lock: encrypting a chunk takes a while

    def _write(self) -> None:
        """Start the next message, unless one is being written. Always put off: while this runs, others that
        its choice gave something to do wait for their turn."""
        lock = self._hold()
        try:
            wire = self._wire
            if self._writing or self.said_all or wire is None or not self.greeted.is_set():
                return
            frames = self._next_frames()
            self._writing = bool(frames)
            self.said_all = not frames and self.ended
        finally:
            lock.release()
        if self.said_all:
            self._end_wire()
        elif frames:
            try:
                begun = wire.send(join([encode(*frame) for frame in frames]), self._written)
            except Exception:
                # Frames of ours beyond a bound, or no memory; what they carried goes over another stream.
                self.fail("cannot send")
                raise
            if not begun:
                self.fail("connection broken")

    def _written(self) -> None:
        self._writing = False  # who has the lock first may write
        self._lock.run(self._write)

    def _next_frames(self) -> list[tuple[Frame, Buffer]]:
        """What leaves next, small frames together; the lock is held."""
        head, payload = self._choose()
        if head is None:
            return []
        frames = [(head, payload)]
        room = min(MAX_BUNDLE_BYTES, self.window.chunk) - LEAST_ROOM
        if len(payload) < room:
            frames += self._choose_more(room - room_for(head, payload))
        if self._receipts.pending and not self._reading:
            self._take_along(frames)
        return frames

    def _choose_more(self, room: int) -> list[tuple[Frame, Buffer]]:
        """Frames that wait, in their order, while they are small; the lock is held."""
        found: list[tuple[Frame, Buffer]] = []
        while room >= LEAST_ROOM and len(found) + 2 < MAX_FRAMES:
            head, payload = self._choose(within(room))
            if head is None:
                break
            found.append((head, payload))
            room -= room_for(head, payload)
        return found

    def _take_along(self, frames: list[tuple[Frame, Buffer]]) -> None:
        """Acknowledge what arrived, where data leaves anyway."""
        peer = self.peer
        if peer is None:
            return
        for at, (head, _) in enumerate(frames):
            if isinstance(head, Data):
                frames.insert(at, (self._acknowledgement(peer), b""))
                return

    def _choose(self, most: int | None = None) -> tuple[Frame | None, Buffer]:
        """The frame to send now, or None; ``most``: with no more data than that, and no
        measurement. The lock is held."""
        if self.gone.is_set():
            return None, b""
        if self._control:
            return self._control.popleft(), b""
        peer = self.peer
        if peer is None or self._closing:
            return None, b""
        if self._receipts.due and not self._reading:
            return self._acknowledgement(peer), b""
        chunk = peer.take(self, most)
        waiting = peer.outbox.waiting
        if chunk is not None:
            flags = self._note_sent(peer, chunk, chunk.length, last=not waiting)
            if waiting and not self.window.open:
                peer.nudge()  # this connection has its fill
            view = chunk.message.payload[chunk.offset : chunk.offset + chunk.length]
            return peer.data_frame(chunk, flags), view
        if most is not None:
            return None, b""
        # One stream: the first windows of eight overflow a slow line's buffer, and what its
        # losses hold back and then release in bursts reads as three times the line's rate.
        if peer.probe_bytes > 0 and self.window.open and peer.lanes[:1] == [self]:
            length = min(self.window.chunk, peer.probe_bytes)
            peer.probe_bytes -= length
            flags = self._note_sent(peer, None, length, last=not peer.probe_bytes)
            return Probe(flags), memoryview(_PROBE_FILLER)[:length]
        if waiting:
            peer.relieve()
        elif self.window.unasked:
            # Another connection took the last chunk; ours must not stay unacknowledged.
            self.press()
        return (self._control.popleft(), b"") if self._control else (None, b"")

    def _acknowledgement(self, peer: Peer) -> Ack:
        return self._receipts.take(time.monotonic(), peer.to_confirm())

    def _note_sent(self, peer: Peer, chunk: Chunk | None, length: int, *, last: bool) -> int:
        now_s = time.monotonic()
        ask = self.window.sent(now_s, length, last=last)
        if ask == Flag.ACK_SOON and (peer.awaited or chunk is None):
            self.window.pressed()
            ask = Flag.ACK_NOW
        self._under_way.append((self.window.sent_bytes, chunk))
        peer.sent(now_s, length, last=last)
        return self.checksum | ask

    def press(self, again: bool = False) -> None:
        """Somebody waits for the acknowledgement of what is under way; the peer's lock is held."""
        if self.window.unpressed or (again and not self._control):
            self.window.pressed()
            self._control.append(Probe(Flag.ACK_NOW))
            self.nudge()

    @property
    def owes(self) -> bool:
        """Something that arrived is still to be acknowledged."""
        return self._receipts.pending

    def settle_receipts(self, now_s: float, *, stranded: bool) -> None:
        """Acknowledge what found nothing to travel with, or what another connection left behind when
        it broke; the peer's lock is held."""
        if stranded or self._receipts.overdue(now_s):
            self._receipts.due = True
            self.nudge()

    @property
    def spare(self) -> bool:
        """Nothing under way, and not the first connection of a peer that we work with: it need not
        show that the peer lives. A pool of hundreds would else be woken by its own pings alone."""
        peer = self.peer
        if peer is None or self.window.in_flight:
            return False
        idle = time.monotonic() - peer.used_s > peer.config.idle_s
        return idle or self not in peer.lanes[:1]

    def heard(self, now_s: float) -> bool:
        """What came of late shows that the other side lives."""
        return self.peer is not None and now_s - self.heard_s < self.peer.config.ping_s / 2

    def unanswered_s(self, now_s: float) -> float:
        """How long the other side, asked whether it lives, has said nothing at all."""
        return now_s - self.asked_s if self.asked_s > self.heard_s else 0.0

    def ping(self, now_s: float) -> int:
        """Queue an echo request; returns its number."""
        lock = self._hold()
        try:
            self._ping_number += 1
            if len(self._pings) > 16:
                self._pings.clear()
            self._pings[self._ping_number] = now_s
            if self.asked_s <= self.heard_s:
                self.asked_s = now_s
            if not self._closing:  # CLOSE is a side's last frame
                self._control.append(Ping(self._ping_number))
                self.nudge()
            return self._ping_number
        finally:
            lock.release()

    # -- receiving half

    def receive(self, message: bytes) -> None:
        """Handle one message. Raises BadFrame: the caller then closes this connection."""
        frames = split(message)
        # What arrived together is acknowledged together.
        self._reading = len(frames) > 1
        try:
            for frame in frames:
                if not self.gone.is_set():
                    self._handle(frame)
        finally:
            if self._reading:
                with self._lock:
                    self._reading = False
                    if self._receipts.due:
                        self.nudge()

    def _handle(self, message: Buffer) -> None:
        frame, payload = decode(message)
        self.heard_s = time.monotonic()
        if isinstance(frame, Data):
            self._on_data(frame, payload)
        elif isinstance(frame, Ack):
            self._on_ack(frame)
        elif isinstance(frame, Probe):
            self._count(len(payload), frame.flags)
        elif isinstance(frame, Ping):
            with self._lock:
                if len(self._control) < 64 and not self._closing:
                    self._control.append(Pong(frame.number))
                self.nudge()
        elif isinstance(frame, Pong):
            self._on_pong(frame)
        elif isinstance(frame, Close):
            self.leaving = frame.leaving
            self.fail(f"{'left' if frame.leaving else 'closed'}: {frame.reason}" if frame.reason else "left")
        else:
            raise BadFrame("a second HELLO on one connection")

    def _attached(self) -> Peer:
        if self.peer is None:
            raise BadFrame("data before HELLO")
        return self.peer

    def _on_data(self, frame: Data, payload: memoryview) -> None:
        peer = self._attached()
        nbytes = len(payload)
        with peer.lock:
            if peer.gone:
                return
            # Copying under the lock keeps nobody waiting who would not wait for the interpreter anyway.
            complete = peer.inbox.take(frame, payload)
            if complete is None and peer.inbox.is_done(frame.number):
                peer.confirm.append(frame.number)  # sent again, so the confirmation was lost
            peer.received_bytes += nbytes
            peer.used_s = self.heard_s
            peer.progress += 1
            if complete is None:
                self._note_arrival(nbytes, frame.flags)
                return
        if complete.buffer is not None:
            peer.deliver(peer.name, frame.key, complete.meta, complete.buffer)
        with peer.lock:
            peer.confirm.append(frame.number)
            self._note_arrival(nbytes, frame.flags)

    def _count(self, nbytes: int, flags: int) -> None:
        peer = self._attached()
        with peer.lock:
            peer.progress += 1 if nbytes else 0  # a question is none
            self._note_arrival(nbytes, flags)

    def _note_arrival(self, nbytes: int, flags: int) -> None:
        self._receipts.arrived(self.heard_s, nbytes, flags)
        if self._receipts.due and not self._reading:
            self.nudge()

    def _on_ack(self, frame: Ack) -> None:
        peer = self._attached()
        now_s = time.monotonic()
        with peer.lock:
            if self.gone.is_set():
                return  # what it carried has already gone back
            if frame.received > self.window.sent_bytes:
                raise BadFrame(f"{frame.received} bytes acknowledged, {self.window.sent_bytes} sent")
            in_time_s = now_s - peer.lateness(self, now_s, frame.clock_ns)
            for received, age_us in frame.marks:
                self._on_mark(peer, in_time_s - 1e-6 * age_us, received)
            if peer.probe_acks is not None:
                peer.probe_acks.append((self.number, frame.clock_ns, frame.received))
                if peer.probe_done:
                    peer.room.notify_all()
            peer.confirmed(frame.confirmed)
            if peer.outbox.waiting or peer.probe_bytes > 0:
                self.nudge()  # its window may have opened

    def _on_mark(self, peer: Peer, at_s: float, received: int) -> None:
        """The peer had ``received`` bytes; told at once and without a queue, we had known it at ``at_s``."""
        new = self.window.acked(at_s, received)
        measured = 0
        while self._under_way and self._under_way[0][0] <= received:
            chunk = self._under_way.popleft()[1]
            if chunk is not None:
                peer.outbox.acknowledged(chunk)
                measured += chunk.length if chunk.message.key.direction in MEASURED else 0
        if new:
            # A hostile peer may acknowledge half a chunk and then the rest: never more than is new.
            measured = min(measured, new)
            peer.settled(at_s, new, self.window.rtt_s or 0.0, arrived=True, measured=measured)
            peer.fit(self)

    def _on_pong(self, frame: Pong) -> None:
        now_s = time.monotonic()
        with self._lock:
            sent_s = self._pings.pop(frame.number, None)
            if sent_s is None:
                return
            self.window.note_rtt(now_s, now_s - sent_s)
            if self.peer is not None and (self.number, frame.number) in self.peer.echoes:
                self.peer.echoes[self.number, frame.number] = now_s - sent_s
                self.peer.room.notify_all()
