"""What all connections to one peer share: messages out and in, statistics, and its lock.

A peer is known for as long as it is not lost. Its ``session`` number is new each time, so that
after a restart or a loss on either side both begin from nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from worker.transport.contract import Deliver, PeerLost, TransportConfig
from worker.transport.frames import Data, MessageKey, confirmations
from worker.transport.inbox import Expect, Inbox
from worker.transport.lateness import Lateness
from worker.transport.line_time import LineTime
from worker.transport.outbox import Chunk, Outbox
from worker.transport.turns import Turns
from worker.transport.window import LARGEST_SHARED_CHUNK, Window, on_line


class Lane(Protocol):
    """A connection as its peer sees it."""

    number: int
    window: Window

    @property
    def waiting(self) -> bool:
        """Nothing is being written."""

    @property
    def outbound(self) -> bool:
        """Where each end has connections of its own for what it sends, this is one of ours."""

    def ping(self, now_s: float) -> int:
        """Send an echo request; returns its number."""

    def nudge(self) -> None:
        """Something to send may be there; the peer's lock is held."""

    def press(self, again: bool = False) -> None:
        """Ask for the acknowledgement of what is under way, ``again``: even if that was asked for already;
        the peer's lock is held."""

    @property
    def owes(self) -> bool:
        """Something that arrived is still to be acknowledged."""

    def settle_receipts(self, now_s: float, *, stranded: bool) -> None:
        """Acknowledge what has waited long enough, or, ``stranded``, anything; the lock is held."""


class Peer:
    """Shared state of one peer's connections. ``lock`` guards every field."""

    def __init__(
        self, name: str, session: int, config: TransportConfig, expect: Expect, deliver: Deliver
    ) -> None:
        self.name, self.session, self.config = name, session, config
        self.deliver = deliver
        self.lock = Turns()
        self.room = threading.Condition(self.lock)  # type: ignore[arg-type]
        self.remote_session: int | None = None
        self.lanes: list[Lane] = []
        self.outbox = Outbox()
        self.inbox = Inbox(name, expect, config.max_message_bytes, config.max_messages)
        self.confirm: list[int] = []  # delivered here, not yet told to the peer
        self.gone = ""  # why, once lost
        self.down_since_s: float | None = None
        self.down_reason = ""
        self.down_silent = False  # frozen, not cut: dialling again would only wait
        self.last_rtt_s = 0.0
        self.probe_bytes = 0  # still to be sent by a bandwidth measurement
        self.probe_acks: list[tuple[int, int, int]] | None = None  # (lane id, clock ns, bytes)
        self.echoes: dict[tuple[int, int], float] = {}  # (lane, ping) -> round trip; 0 = awaited
        self.received_bytes = 0
        self.used_s = time.monotonic()  # the last chunk either way
        self.progress = 0  # chunks either way: stands still when nothing moves
        self.awaited = 0  # who waits for confirmations now
        self.stirred = 0  # how often since something moved
        self._moved: tuple[int, int, float] | None = None  # bytes settled, oldest message, since when
        self._in_flight = 0
        self._settled = 0  # bytes that are no longer under way, on all connections
        self._window = Window()  # of all connections together
        self._line = LineTime()
        self._lateness = Lateness()
        self._measured_bytes = 0  # acknowledged since the last report

    # -- sending

    def submit(
        self,
        key: MessageKey,
        meta: bytes,
        payload: memoryview,
        timeout_s: float | None,
        more: bool = False,
    ) -> None:
        """Queue a message; waits while the queue is full. ``more``: another one follows at once, with which
        this one may leave. Raises PeerLost, or TimeoutError."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self.lock:
            while not self.gone and not self._has_room(len(payload)):
                self.nudge()
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise TimeoutError(
                        f"{self.name} did not take {len(payload)} bytes within {timeout_s} s: "
                        f"{self.outbox.held} bytes in {len(self.outbox)} messages are still unconfirmed"
                    )
                with self._awaiting():
                    self.room.wait(left_s)
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

    def nudge(self) -> None:
        """Something waits: wake the first connection that is at rest and has room.

        One is enough. When it has its fill it wakes the next, so a message that one flow can carry
        costs no thread of the other seven a look.
        """
        for lane in self._outbound:
            if lane.waiting and lane.window.open:
                lane.nudge()
                return

    def nudge_all(self) -> None:
        """Wake every connection, whatever its window."""
        for lane in self.lanes:
            lane.nudge()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything sent is confirmed; False when it is not in time, or the peer lost."""
        with self.lock, self._awaiting():
            return self.room.wait_for(lambda: self.gone or self.idle, timeout_s) and not self.gone

    @contextmanager
    def _awaiting(self) -> Iterator[None]:
        """Meanwhile acknowledgements are asked for at once; the lock is held."""
        self.awaited += 1
        self.press()
        try:
            yield
        finally:
            self.awaited -= 1

    def press(self) -> None:
        """Ask for the acknowledgement of everything under way."""
        with self.lock:
            for lane in self.lanes:
                lane.press()

    def relieve(self) -> None:
        """Something waits for a window to open, which only acknowledgements do: ask for what was not asked
        for; on a slow line, where asking costs as much as a chunk, only for more than one chunk, or where
        nothing else that is under way will be answered."""
        with self.lock:
            unasked = sum(lane.window.unasked_bytes for lane in self.lanes)
            if unasked > (LARGEST_SHARED_CHUNK if self._window.slow else 0) or 0 < self._in_flight <= unasked:
                self.press()

    def stir(self, now_s: float) -> dict[str, object] | None:
        """When what is to be sent has not moved for long, wake everybody and ask anew about what is under
        way; returns fields for the log, less and less often, None while all is well.

        A window opens by acknowledgements only. Whatever kept one from being asked for or sent, here or
        there, must not hold up a message for ever while both ends live.
        """
        state = self._settled, self.outbox.oldest
        if self.idle or not self.lanes or self._moved is None or self._moved[:2] != state:
            self._moved = *state, now_s
            self.stirred = 0
        elif now_s - self._moved[2] > self.config.still_s:
            self._moved = *state, now_s
            self.stirred += 1
            for lane in self.lanes:
                lane.press(again=True)
            self.nudge_all()
            self.room.notify_all()
            if not self.stirred & (self.stirred - 1):
                return {
                    "messages": len(self.outbox),
                    "bytes": self.outbox.held,
                    "in_flight": self._in_flight,
                    "windows": [lane.window.size for lane in self.lanes],
                    "line_window": self._window.size,
                }
        return None

    def take(self, lane: Lane, most: int | None = None) -> Chunk | None:
        """The next chunk for this connection, if its window and that of all together are open;
        ``most``: unless it has more bytes."""
        window = lane.window
        if not window.open or (len(self.lanes) > 1 and not (self._open and lane in self._outbound)):
            return None
        return self.outbox.take(window.chunk, most)

    @property
    def _outbound(self) -> list[Lane]:
        """The connections for what is sent from here. On a slow line each end has its own, so that its
        acknowledgements do not wait in a socket behind the other's data (docs/decisions/017)."""
        if not self._window.slow:
            return self.lanes
        return [lane for lane in self.lanes if lane.outbound] or self.lanes

    @property
    def _open(self) -> bool:
        """Eight streams' least windows are half a second of a slow line, on which messages would
        arrive side by side instead of one after the other: bytes under way are bounded in sum."""
        return self._window.in_flight < self._window.size_at(self.rtt_s)

    def data_frame(self, chunk: Chunk, flags: int) -> Data:
        message = chunk.message
        meta = b"" if chunk.offset else message.meta
        total, oldest = len(message.payload), self.outbox.oldest
        # A chunk of a message confirmed in the meantime may still leave; the peer drops it.
        return Data(
            message.number, message.key, chunk.offset, total, meta, flags, min(oldest, message.number)
        )

    def sent(self, now_s: float, nbytes: int, *, last: bool) -> None:
        """A chunk leaves; ``last``: nothing else waits."""
        self.used_s = now_s
        self._in_flight += nbytes
        self._line.sent(now_s, nbytes)
        self._window.sent(now_s, nbytes, last=last)
        self.progress += 1

    def settled(self, now_s: float, nbytes: int, rtt_s: float, *, arrived: bool, measured: int = 0) -> None:
        """``nbytes`` are no longer under way: acknowledged, or their connection broke. ``measured``
        of them are acknowledged and of a kind by which the link's rate is told (``frames.MEASURED``)."""
        self._in_flight -= nbytes
        self._settled += nbytes
        if not arrived:
            self._line.broke()
            self._window.broke()
        self._line.settled(now_s, nbytes, rtt_s, measured)
        self._window.acked(now_s, self._settled)
        if len(self.lanes) > 1 and self.outbox.waiting:
            self.nudge()  # there is room again, for whichever connection is free
        self._measured_bytes += measured
        if arrived:
            self.progress += 1
        if not self._in_flight:
            self.room.notify_all()

    def lateness(self, lane: Lane, now_s: float, clock_ns: int) -> float:
        """By how many seconds an acknowledgement on ``lane`` is late that left at ``clock_ns``, by the
        peer's clock."""
        late_s = self._lateness.note(now_s, 1e-9 * clock_ns)
        lane.window.late(late_s)
        self._window.late(late_s)
        return late_s

    def fit(self, lane: Lane) -> None:
        """Several connections share what the line carries; a measurement goes over one of them."""
        lane.window.fit(self._window, len(self.lanes) if self.probe_acks is None else 1)

    def confirmed(self, numbers: tuple[int, ...]) -> None:
        found = [self.outbox.confirmed(number) for number in numbers]
        if any(found):
            self.room.notify_all()

    # -- receiving

    def to_confirm(self) -> tuple[int, ...]:
        """Numbers of messages for the acknowledgement that leaves now."""
        now, self.confirm = confirmations(self.confirm)
        return now

    def settle_receipts(self, now_s: float) -> None:
        """Acknowledge what found nothing to travel with, on a connection that still is."""
        with self.lock:
            stranded = bool(self.confirm) and not any(lane.owes for lane in self.lanes)
            for lane in self.lanes:
                lane.settle_receipts(now_s, stranded=stranded and lane is self.lanes[0])

    @property
    def idle(self) -> bool:
        """Everything sent has arrived and is known to have."""
        return not len(self.outbox) and not self._in_flight

    # -- figures

    @property
    def front(self) -> Lane | None:
        """The connection that measurements use."""
        return self.lanes[0] if self.lanes else None

    @property
    def probe_done(self) -> bool:
        return self.probe_bytes <= 0 and not self._in_flight

    def goodput(self) -> tuple[int, float, float]:
        """Bytes of training's boundary tensors that were acknowledged since the last call, seconds in which
        the line carried them, and the bits/s of its quickest bursts."""
        nbytes, self._measured_bytes = self._measured_bytes, 0
        return nbytes, self._line.take(), 8.0 * self._line.take_quickest()

    @property
    def under_way(self) -> int:
        """Bytes that the line holds of what is sent here, at the rate that it has shown; 0 before."""
        return int(on_line(self._window.rate or 0.0, self.rtt_s or 0.0))

    @property
    def rtt_s(self) -> float | None:
        """Smallest recent round trip of any connection."""
        known = [lane.window.rtt_s for lane in self.lanes if lane.window.rtt_s is not None]
        return min(known, default=None)

    # -- the end

    def lose(self, reason: str) -> bool:
        """Forget what waits; True the first time."""
        with self.lock:
            if self.gone:
                return False
            self.gone = reason
            self.outbox.drop(lambda _: True)
            self.room.notify_all()
            self.nudge_all()
            return True
