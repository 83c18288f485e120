"""State that all connections to one peer share: messages out and in, the window, and their lock.

A peer is known for as long as it is not lost. Its ``session`` number is new each time, so that
after a restart or a loss on either side both begin from nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from atoll.messages.from_worker import Goodput
from worker.manners.traffic import Traffic
from worker.transport.contract import PeerLost, Receiver, TransportConfig, Way
from worker.transport.frames import MEASURED, MIN_CHUNK_BYTES, OF_STEPS, Ack, Data, MessageKey
from worker.transport.peers.busy_time import BusyTime
from worker.transport.peers.courtesy import Courtesy
from worker.transport.peers.inbox import Inbox
from worker.transport.peers.outbox import Chunk, Outbox
from worker.transport.peers.window import Sent, Window

if TYPE_CHECKING:
    from worker.transport.peers.connection import Connection


class Peer:
    """``lock`` guards every field; connections themselves live on the loop."""

    def __init__(
        self,
        name: str,
        session: int,
        config: TransportConfig,
        receivers: dict[str, Receiver],
        loop: asyncio.AbstractEventLoop,
        traffic: Traffic | None = None,
        courtesy: Courtesy | None = None,
    ) -> None:
        """``receivers``: who takes the messages of a job, by its name. ``traffic``: what this machine may
        send and receive; None: anything. ``courtesy``: what background messages make way for; None: for
        those to this peer."""
        self.name, self.session, self.config = name, session, config
        self.lock = threading.RLock()
        self.room = threading.Condition(self.lock)  # notified when what is waited for may have come
        self.remote_session: int | None = None
        self.connections: list[Connection] = []
        self._courtesy = courtesy or Courtesy(self.nudge)
        self.outbox = Outbox(self._courtesy.count)
        self.inbox = Inbox(self._expect, config.max_message_bytes, config.max_messages)
        self.window = Window(config.max_window_bytes)
        self.confirm: list[int] = []  # delivered here, not yet reported to the peer
        self.gone = ""  # why, once lost
        self.down_since_s: float | None = None
        self.down_reason = ""
        self.relayed = False  # by its last connection
        self.doubted_until_s = 0.0  # each connection is to show until then that it lives
        self.moving_until_s = 0.0  # one of both ends has another address: it may be away until then
        self.acks: list[tuple[int, int]] | None = None  # (peer's clock ns, bytes), while somebody measures
        self.echoes: dict[int, float] = {}  # ping -> round trip; 0 = awaited
        self.used_s = time.monotonic()  # the last chunk either way
        self.progress = 0  # chunks of steps either way: stands still when nothing moves
        self.traffic = traffic or Traffic()
        self._busy = BusyTime()
        self._measured_bytes = 0  # acknowledged since the last report
        self._receivers, self._loop = receivers, loop
        self._nudged = False

    # -- sending

    def submit(
        self,
        key: MessageKey,
        meta: bytes,
        payload: memoryview,
        timeout_s: float | None,
        *,
        more: bool,
        background: bool = False,
    ) -> None:
        """Queue a message; waits while the queue is full. ``more``: another one follows at once, with which
        this one may leave; ``background``: everything else goes first. Raises PeerLost, or TimeoutError."""
        has_place = self._has_background_place if background else self._has_place
        with self.lock:
            if not has_place(len(payload)):
                self.nudge()
                if not self.room.wait_for(lambda: self.gone or has_place(len(payload)), timeout_s):
                    raise TimeoutError(
                        f"{self.name} did not take {len(payload)} bytes within {timeout_s} s: "
                        f"{self.outbox.held} bytes in {len(self.outbox)} messages are still unconfirmed"
                    )
            if self.gone:
                raise PeerLost(self.name, self.gone)
            if background:
                self.outbox.add_background(key, meta, payload)
            else:
                self.outbox.add(key, meta, payload)
            if not more:
                self.nudge()

    def _has_place(self, nbytes: int) -> bool:
        box, config = self.outbox, self.config
        if box.numbered >= config.max_messages or box.span >= 4 * config.max_messages:
            return False
        return not box.urgent or box.held + nbytes <= config.max_queued_bytes

    def _has_background_place(self, nbytes: int) -> bool:
        box, config = self.outbox, self.config
        if box.behind >= config.max_background_messages:
            return False
        return not box.background_held or box.background_held + nbytes <= config.max_background_bytes

    def wait_for_moved(self) -> None:
        """Give the peer time to be found, or to find us, at another address; on the loop."""
        with self.lock:
            now_s = time.monotonic()
            self.moving_until_s = now_s + self.config.move_s
            self.doubted_until_s = now_s + 2 * self.config.silence_s

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything sent is confirmed; False when it is not in time, or the peer lost."""
        with self.lock:
            self.nudge()
            idle = self.room.wait_for(
                lambda: self.gone or not (len(self.outbox) or self.window.in_flight), timeout_s
            )
            return bool(idle and not self.gone)

    def nudge(self) -> None:
        """Something to send may be there; any thread."""
        with self.lock:
            if self._nudged:
                return
            self._nudged = True
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        with self.lock:
            self._nudged = False
            for connection in self.connections:
                if connection.urgent:
                    connection.wake()
            self.wake_one()

    def wake_one(self) -> None:
        """Wake the emptiest connection at rest for what waits; on the loop, under the lock."""
        if self.window.open and (self.outbox.waiting or self._lets_background):
            resting = [connection for connection in self._outbound if connection.resting]
            if resting:
                min(resting, key=lambda connection: connection.in_flight).wake()

    @property
    def _lets_background(self) -> bool:
        """Whether a background chunk waits and may leave."""
        return not self._courtesy.gives_way and self.window.quiet and self.outbox.idles_for_background

    @property
    def chunk(self) -> int:
        """Bytes of the next chunk, a multiple of 4 KiB."""
        most = int(min(self.traffic.piece_bytes, self.window.chunk))
        return max(4 * MIN_CHUNK_BYTES, most) & -MIN_CHUNK_BYTES

    def take(self, connection: Connection) -> Chunk | None:
        """The next chunk for this connection, if the window is open and its share of it not used up."""
        if not self.has_room(connection):
            return None
        return self.outbox.take(self.chunk, background=self._lets_background)

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

    def data_frame(self, chunk: Chunk) -> Data:
        """Head of a chunk. One of a message confirmed in the meantime may still leave; the peer drops it."""
        message, oldest = chunk.message, min(self.outbox.oldest, chunk.message.number)
        meta = b"" if chunk.offset else message.meta
        return Data(message.number, message.key, chunk.offset, len(message.payload), meta, oldest)

    def note_sent(self, now_s: float, key: MessageKey, nbytes: int) -> Sent:
        """A chunk leaves."""
        self.used_s = now_s
        self.progress += key.direction in OF_STEPS
        self._busy.sent(now_s, nbytes, idle=not self.window.in_flight)
        return self.window.sent(now_s, nbytes, backlogged=self.outbox.waiting)

    def note_acked(self, now_s: float, frame: Ack, nbytes: int, arrived: list[tuple[Chunk, Sent]]) -> None:
        """``nbytes`` more arrived, and with them all of the chunks ``arrived``."""
        if nbytes:
            self.progress += not arrived or any(
                chunk.message.key.direction in OF_STEPS for chunk, _ in arrived
            )
            self.window.acked(now_s, 1e-9 * frame.clock_ns, nbytes, arrived[-1][1] if arrived else None)
            if self.acks is not None:
                self.acks.append((frame.clock_ns, nbytes))
        for chunk, _ in arrived:
            self.outbox.acknowledged(chunk)
        measured = sum(
            chunk.length
            for chunk, _ in arrived
            if chunk.message.key.direction in MEASURED and not chunk.message.background
        )
        if nbytes and arrived:
            # A hostile peer may acknowledge half a chunk and then the rest: never more than is new.
            self._measured_bytes += min(measured, nbytes)
            rtt_s, share, idle = (
                self.window.rtt_s or 0.0,
                min(1.0, measured / nbytes),
                not self.window.in_flight,
            )
            self._busy.acked(now_s, arrived[0][1].at_s, rtt_s, share, idle=idle)
        for number in frame.confirmed:
            self.outbox.confirmed(number)
        if frame.confirmed or not self.window.in_flight:
            self.room.notify_all()
        self.wake_one()

    def note_echo(self, number: int, now_s: float, rtt_s: float) -> None:
        """A ping was answered."""
        with self.lock:
            self.window.note_rtt(now_s, rtt_s)
            if number in self.echoes:
                self.echoes[number] = rtt_s
                self.room.notify_all()

    # -- receiving

    def receive(self, frame: Data, payload: memoryview) -> None:
        """Take a chunk, and deliver the message that it completes. Raises BadFrame."""
        with self.lock:
            if self.gone:
                return
            complete = self.inbox.take(frame, payload)
            self.used_s = time.monotonic()
            self.progress += frame.key.direction in OF_STEPS
        receiver = self._receivers.get(frame.key.job)
        if complete is not None and complete.buffer is not None and receiver is not None:
            receiver.deliver(self.name, frame.key, complete.meta, complete.buffer)
        with self.lock:
            if self.inbox.is_done(frame.number):  # perhaps sent again, so the confirmation was lost
                self.confirm.append(frame.number)

    def _expect(self, key: MessageKey, total: int) -> memoryview | None:
        receiver = self._receivers.get(key.job)
        return receiver.expect(self.name, key, total) if receiver is not None else None

    def forget(self, unwanted: Callable[[MessageKey], bool], *, background: bool = True) -> None:
        """Drop what is queued or half received of these keys, ``background`` messages perhaps not."""
        with self.lock:
            self.outbox.drop(unwanted, background=background)
            self.inbox.drop(unwanted)
            self.room.notify_all()

    # -- connections come and go

    def attach(self, connection: Connection) -> None:
        """One more connection."""
        with self.lock:
            self.connections.append(connection)
            self.relayed = self.way is Way.RELAYED
            self.down_since_s = None
            self.outbox.ask_again(self.window.chunk)
            self.nudge()

    def detach(self, connection: Connection, unsettled: list[Chunk]) -> None:
        """One less; the chunks it carried leave again over another."""
        now_s = time.monotonic()
        with self.lock:
            self.connections.remove(connection)
            if connection.in_flight:
                self._busy.broke(now_s)
                self.window.broke(connection.in_flight)
            self.outbox.give_back(unsettled)
            if self.connections:
                self.outbox.ask_again(self.window.chunk)
                self.connections[0].owe()  # what it took along to confirm may be lost
                self.nudge()
            else:
                self.down_since_s, self.down_reason = now_s, connection.reason

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
    def way(self) -> Way | None:
        """How the peer is joined: by the least distant of its connections; None: not now."""
        return min((c.way for c in self.connections), key=list(Way).index, default=None)

    @property
    def front(self) -> Connection | None:
        """The connection that measurements use."""
        return self.connections[0] if self.connections else None

    def goodput(self) -> Goodput:
        """What was acknowledged of training's boundary tensors since the last call."""
        with self.lock:
            nbytes, self._measured_bytes = self._measured_bytes, 0
            rtt_s, quickest_bps = self.window.rtt_s or 0.0, 8.0 * self._busy.take_quickest()
            return Goodput(self.name, nbytes, self._busy.take(), rtt_s, quickest_bps=quickest_bps)


class Peers:
    """The peers of one network by name, those that it has met and not lost. ``changed`` guards them."""

    def __init__(self, make: Callable[[str, int], Peer]) -> None:
        """``make`` a peer of a name under a session."""
        self._make = make
        self._named: dict[str, Peer] = {}
        self.changed = threading.Condition(threading.RLock())  # notified when somebody was joined or lost

    def find(self, name: str) -> Peer | None:
        """Return the peer's state, None where it was never met or is lost."""
        return self._named.get(name)

    def known(self, name: str) -> Peer:
        """Return the peer's state. Raises PeerLost."""
        found = self._named.get(name)
        if found is None:
            raise PeerLost(name, "not connected")
        return found

    def all(self) -> list[Peer]:
        """Every peer."""
        return list(self._named.values())

    def met(self, name: str, remote_session: int | None, session: int | None) -> tuple[Peer, Peer | None]:
        """Return the peer's state, and the one that it takes the place of where its session shows that the
        peer has forgotten that."""
        with self.changed:
            before = self._named.get(name)
            if before is not None and (
                remote_session is None or before.remote_session in (None, remote_session)
            ):
                before.remote_session = remote_session or before.remote_session
                return before, None
            fresh = self._named[name] = self._make(name, session or secrets.randbits(63))
            fresh.remote_session = remote_session
        return fresh, before

    def forget_unmet(self, name: str) -> None:
        """A peer that was never connected is not there to be sent to."""
        with self.changed:
            found = self._named.get(name)
            if found is None or found.remote_session is not None:
                return
            del self._named[name]
        found.forget(lambda _: True)

    def remove(self, peer: Peer) -> None:
        """Forget a peer that is lost, unless another state has taken its place."""
        if self._named.get(peer.name) is peer:
            del self._named[peer.name]

    def connections(self, name: str) -> int:
        """How many streams to this peer are open."""
        with self.changed:
            found = self._named.get(name)
            return len(found.connections) if found else 0

    def watched(self, now_s: float, *, asleep: bool) -> Iterator[Peer]:
        """Have connections ping and look for silence; yields peers whose time to come back is over.
        ``asleep``: we were stopped, not they."""
        for peer in self.all():
            with peer.lock:
                for connection in list(peer.connections):
                    connection.watch(now_s, asleep=asleep)
            config, since_s = peer.config, peer.down_since_s
            patience_s = max(config.reconnect_s, 6 * (peer.window.rtt_s or 0.0))
            if peer.relayed:
                patience_s = max(patience_s, config.relay_reconnect_s)
                # A relay that is away is nobody's fault here (decision 032), for as long as that.
                peer.progress += since_s is not None
            if now_s < peer.moving_until_s:
                peer.progress += since_s is not None
                continue
            if since_s is not None and now_s - since_s > patience_s:
                yield peer
