"""State that all connections to one peer share: messages out and in, the window, and their lock.

A peer is known for as long as it is not lost. Its ``session`` number is new each time, so that
after a restart or a loss on either side both begin from nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from worker.transport.aio.window import Window
from worker.transport.contract import PeerLost, TransportConfig
from worker.transport.frames import Data, Flag, MessageKey
from worker.transport.inbox import Expect, Inbox
from worker.transport.line_time import LineTime
from worker.transport.outbox import Chunk, Outbox

if TYPE_CHECKING:
    from worker.transport.aio.connection import Connection


class Peer:
    """``lock`` guards every field; connections themselves live on the loop."""

    def __init__(
        self,
        name: str,
        session: int,
        config: TransportConfig,
        expect: Expect,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.name, self.session, self.config = name, session, config
        self.lock = threading.RLock()
        self.room = threading.Condition(self.lock)
        self.remote_session: int | None = None
        self.connections: list[Connection] = []
        self.outbox = Outbox()
        self.inbox = Inbox(name, expect, config.max_message_bytes, config.max_messages)
        self.window = Window(config.max_window_bytes)
        self.confirm: list[int] = []  # delivered here, not yet reported to the peer
        self.gone = ""  # why, once lost
        self.down_since_s: float | None = None
        self.down_reason = ""
        self.down_silent = False  # frozen, not cut: dialling again would only wait
        self.probe_bytes = 0  # still to be sent by a bandwidth measurement
        self.probe_acks: list[tuple[int, int, int]] | None = None  # (connection, clock ns, bytes)
        self.echoes: dict[tuple[int, int], float] = {}  # (connection, ping) -> round trip; 0 = awaited
        self.used_s = time.monotonic()  # the last chunk either way
        self.progress = 0  # chunks either way: stands still when nothing moves
        self._line = LineTime()
        self._measured_bytes = 0  # acknowledged since the last report
        self._loop = loop
        self._nudged = False

    # -- sending

    def submit(
        self, key: MessageKey, meta: bytes, payload: memoryview, timeout_s: float | None, *, more: bool
    ) -> None:
        """Queue a message; waits while the queue is full. ``more``: another one follows at once, with which
        this one may leave. Raises PeerLost, or TimeoutError."""
        with self.lock:
            if not self._has_room(len(payload)):
                self.nudge()
                if not self.room.wait_for(lambda: self.gone or self._has_room(len(payload)), timeout_s):
                    raise TimeoutError(
                        f"{self.name} did not take {len(payload)} bytes within {timeout_s} s: "
                        f"{self.outbox.held} bytes in {len(self.outbox)} messages are still unconfirmed"
                    )
            if self.gone:
                raise PeerLost(self.name, self.gone)
            self.outbox.add(key, meta, payload)
            if not more:
                self.nudge()

    def _has_room(self, nbytes: int) -> bool:
        box, config = self.outbox, self.config
        if len(box) >= config.max_messages or box.span >= 4 * config.max_messages:
            return False
        return not len(box) or box.held + nbytes <= config.max_queued_bytes

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything sent is confirmed; False when it is not in time, or the peer lost."""
        with self.lock:
            self.nudge()
            return self.room.wait_for(lambda: self.gone or self.idle, timeout_s) and not self.gone

    @property
    def idle(self) -> bool:
        """Everything sent has arrived and is known to have."""
        return not len(self.outbox) and not self.window.in_flight

    def nudge(self) -> None:
        """Something to send may be there; any thread."""
        with self.lock:
            if self._nudged:
                return
            self._nudged = True
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake)

    nudge_all = nudge

    def _wake(self) -> None:
        with self.lock:
            self._nudged = False
            for connection in self.connections:
                if connection.urgent:
                    connection.wake()
            self.wake_one()

    def wake_one(self) -> None:
        """Wake the emptiest connection at rest for what waits; on the loop, under the lock."""
        if self.window.open and (self.outbox.waiting or self.probe_bytes > 0):
            resting = [connection for connection in self._outbound if connection.resting]
            if resting:
                min(resting, key=lambda connection: connection.in_flight).wake()

    def take(self, connection: Connection) -> Chunk | None:
        """The next chunk for this connection, if the window is open and its share of it not used up."""
        return self.outbox.take(self.window.chunk) if self.has_room(connection) else None

    def has_room(self, connection: Connection) -> bool:
        """The window is open, and no other connection that could send is emptier: one whose flow has lost
        a packet is to hold no more than its part of the window."""
        ours = self._outbound
        least = min((other.in_flight for other in ours if other.resting), default=connection.in_flight)
        return self.window.open and connection in ours and connection.in_flight <= least

    @property
    def _outbound(self) -> list[Connection]:
        """The connections for what is sent from here: not those of the other end, whose acknowledgements
        would wait in a socket behind our data."""
        return [connection for connection in self.connections if connection.outbound] or self.connections

    def data_frame(self, chunk: Chunk, flags: int) -> Data:
        """Head of a chunk. One of a message confirmed in the meantime may still leave; the peer drops it."""
        message = chunk.message
        meta = b"" if chunk.offset else message.meta
        oldest = min(self.outbox.oldest, message.number)
        total = len(message.payload)
        return Data(message.number, message.key, chunk.offset, total, meta, flags | Flag.ACK_NOW, oldest)

    def note_sent(self, now_s: float, nbytes: int) -> None:
        """A chunk leaves."""
        self.used_s = now_s
        self.progress += 1
        self._line.sent(now_s, nbytes)

    def note_settled(self, now_s: float, nbytes: int, measured: int) -> None:
        """``nbytes`` are acknowledged, ``measured`` of them of a kind by which the link's rate is known."""
        self.progress += 1
        self._line.settled(now_s, nbytes, self.window.rtt_s or 0.0, measured)
        self._measured_bytes += measured
        if not self.window.in_flight:
            self.room.notify_all()

    def confirmed(self, numbers: tuple[int, ...]) -> None:
        """The peer has these messages whole."""
        found = [self.outbox.confirmed(number) for number in numbers]
        if any(found):
            self.room.notify_all()

    def forget(self, unwanted: Callable[[MessageKey], bool]) -> None:
        """Drop what is queued or half received of these keys."""
        with self.lock:
            self.outbox.drop(unwanted)
            self.inbox.drop(unwanted)
            self.room.notify_all()

    # -- connections come and go

    def attach(self, connection: Connection) -> None:
        """One more connection."""
        with self.lock:
            self.connections.append(connection)
            self.down_since_s = None
            self.outbox.ask_again(self.window.chunk)
            self.nudge()

    def detach(self, connection: Connection, unsettled: list[Chunk]) -> None:
        """One less; the chunks it carried leave again over another."""
        now_s = time.monotonic()
        with self.lock:
            self.connections.remove(connection)
            if connection.in_flight:
                self._line.broke()
                self._line.settled(now_s, connection.in_flight, self.window.rtt_s or 0.0, 0)
                self.window.broke(connection.in_flight)
            self.outbox.give_back(unsettled)
            if self.connections:
                self.outbox.ask_again(self.window.chunk)
                self.connections[0].owe()  # what it took along to confirm may be lost
                self.nudge()
            else:
                self.down_since_s, self.down_reason = now_s, connection.reason
                self.down_silent = connection.silent

    def lose(self, reason: str) -> bool:
        """Forget what waits; True the first time."""
        with self.lock:
            if self.gone:
                return False
            self.gone = reason
            self.outbox.drop(lambda _: True)
            self.room.notify_all()
            return True

    # -- figures

    @property
    def front(self) -> Connection | None:
        """The connection that measurements use."""
        return self.connections[0] if self.connections else None

    @property
    def probe_done(self) -> bool:
        return self.probe_bytes <= 0 and not self.window.in_flight

    def goodput(self) -> tuple[int, float, float]:
        """Bytes of training's boundary tensors that were acknowledged since the last call, seconds in which
        the link carried them, and the bits/s of its quickest bursts."""
        nbytes, self._measured_bytes = self._measured_bytes, 0
        return nbytes, self._line.take(), 8.0 * self._line.take_quickest()
