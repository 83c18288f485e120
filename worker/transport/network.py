"""PeerNetwork: long-lived gRPC streams between workers, either side may dial.

Mutual TLS names both ends: a server accepts only peers it was told to expect, under the name in
their certificate, and a client refuses a server with another name. A message is sent once and
delivered once: what a broken connection carried goes over the next one, and the receiver drops
what it already has. A peer whose connections stay broken, or that falls silent, is lost, once,
with the reason.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import structlog

from atoll.errors import AccessDenied, AtollError, BadFrame, ConnectionFailed, ProtocolMismatch
from protos import PROTOCOL_VERSION
from protos.credentials import peer_name
from protos.text_limits import clean
from worker.transport.channels import PeerServer, open_channel
from worker.transport.connection import Connection
from worker.transport.contract import Deliver, PeerLost, Receiver, TransportConfig
from worker.transport.frames import MAX_META_BYTES, MAX_REASON_BYTES, Direction, Hello, MessageKey, decode
from worker.transport.grpc_streams import AcceptedWire, DialledWire, Wire
from worker.transport.lanes import FIRST, Lanes, most_lanes
from worker.transport.measure import ECHOES, Goodput, burst, round_trip
from worker.transport.peer import Peer

if TYPE_CHECKING:
    from protos.credentials import Identity

__all__ = [
    "Direction",
    "Goodput",
    "MessageKey",
    "PeerLost",
    "PeerNetwork",
    "Receiver",
    "TransportConfig",
]

log = structlog.get_logger()

MAX_BACKOFF_S = 2.0
MAX_LANES = 32
"""Open streams of one peer, with those that broke unnoticed: all that were accepted share a thread."""
SPARE_ROUNDS = 30
"""Of pings: a spare connection gets one in so many, one in 15 s, which keeps routers' mappings alive and its
round trip known (``lateness``: half a minute). One in 8 were half of all pings of six homes."""


class _Refused(AtollError):
    """The peer does not expect us yet; worth another try."""


class Shaping(Protocol):
    """Slows down what this process sends: how the lab makes distant peers of processes on loopback."""

    label: str  # our name to the peers' shapings

    def shaped(self, wire: Wire, *names: str) -> Wire:
        """Return a wire that sends on ``wire`` in its own time; the peer is known under ``names``."""


class PeerNetwork:
    """All peer links of one worker. Methods may be called from any thread."""

    shaping: Shaping | None = None

    def __init__(
        self,
        identity: Identity | None,
        listen: tuple[str, int] | None,
        deliver: Deliver | None = None,
        lost: Callable[[str, str], None] | None = None,
        config: TransportConfig | None = None,
        *,
        expect: Callable[[str, MessageKey, int], memoryview | None] | None = None,
        name: str = "",
    ) -> None:
        """``identity`` None: no TLS, for loopback experiments; then ``name`` is believed.

        Raises ConnectionFailed when the port cannot be opened.
        """
        self.config = config or TransportConfig()
        self.name = identity.name if identity else name
        self.refused: Counter[str] = Counter()
        self._identity = identity
        self._deliver_default, self._lost_default, self._expect_default = deliver, lost, expect
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._peers: dict[str, Peer] = {}
        self._expected: set[str] = set()
        self._receivers: dict[str, Receiver] = {}
        self._connections: set[Connection] = set()
        self._cancels: dict[Connection, Callable[[], None]] = {}
        self._addresses: dict[Connection, tuple[str, int]] = {}
        self._dialled: dict[str, Lanes] = {}
        self._handshakes: dict[object, tuple[float, Callable[[], None]]] = {}
        self._threads: set[threading.Thread] = set()
        self._closing = threading.Event()
        self._server: PeerServer | None = None
        if listen is not None:
            self._server = PeerServer(identity, listen, self._accept, self.config.max_connections)
        self.port = self._server.port if self._server else 0
        self._spawn(self._watch, "peer-watch")

    # ---------------------------------------------------------------- connecting

    def admit(self, peer: str) -> None:
        """Accept connections of this peer from now on."""
        with self._lock:
            self._expected.add(peer)

    def dismiss(self, peer: str) -> None:
        """Refuse this peer from now on and close what it has open."""
        with self._lock:
            self._expected.discard(peer)
            connections = [c for c in self._connections if c.peer is not None and c.peer.name == peer]
            known = self._peers.pop(peer, None)
            self._dialled.pop(peer, None)
        if known is not None:
            known.lose("dismissed")
        self._close_all(connections, "no longer needed", leaving=True)

    def dial(self, peer: str, addresses: Sequence[tuple[str, int]], timeout_s: float) -> tuple[str, int]:
        """Connect to ``peer`` at the first address that answers as it; returns that address.

        Opens more connections where the round trip is long, and as traffic fills them. Raises
        ConnectionFailed after ``timeout_s``, AccessDenied or ProtocolMismatch when trying again
        cannot help.
        """
        self.admit(peer)
        deadline_s = time.monotonic() + timeout_s
        backoff_s = 0.05
        reasons: dict[tuple[str, int], AtollError] = {}
        while True:
            fatal: AtollError | None = None
            failed = False
            for address in addresses:
                try:
                    self._connect(peer, address, 0, 1, deadline_s)
                except (AccessDenied, ProtocolMismatch) as error:
                    fatal = error
                except AtollError as error:
                    failed = True
                    # What the deadline cut short says less than an answer that came before.
                    if address not in reasons or time.monotonic() < deadline_s:
                        reasons[address] = error
                else:
                    self._add_lanes(peer, address, deadline_s)
                    return address
            if fatal is not None and not failed:
                self._forget_unmet(peer)
                raise fatal
            if time.monotonic() + backoff_s >= deadline_s or self._closing.wait(backoff_s):
                self._forget_unmet(peer)
                tried = "; ".join(f"{host}:{port}: {why}" for (host, port), why in reasons.items())
                tried = tried or "no address known"
                raise ConnectionFailed(f"cannot reach {peer} within {timeout_s:g} s ({tried})") from fatal
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _forget_unmet(self, peer: str) -> None:
        """A peer that was never connected is not there to be sent to."""
        with self._lock:
            known = self._peers.get(peer)
            if known is not None and known.remote_session is None:
                del self._peers[peer]

    def wait_for(self, peer: str, timeout_s: float) -> None:
        """Wait until ``peer`` is connected, whoever dialled. Raises ConnectionFailed."""
        self.admit(peer)
        with self._lock:
            found = self._changed.wait_for(lambda: self.connected(peer), timeout_s)
        if not found:
            raise ConnectionFailed(f"{peer} did not connect within {timeout_s:g} s; is its port reachable?")

    def connected(self, peer: str) -> bool:
        with self._lock:
            known = self._peers.get(peer)
            return known is not None and bool(known.lanes)

    def connections(self, peer: str) -> int:
        """How many streams to this peer are open."""
        with self._lock:
            known = self._peers.get(peer)
            return len(known.lanes) if known else 0

    def _add_lanes(self, peer: str, address: tuple[str, int], deadline_s: float) -> None:
        streams = self.config.streams
        lanes = Lanes(address, streams or most_lanes(self.rtt(peer, echoes=3)))
        with self._lock:
            self._dialled[peer] = lanes
        self._open_lanes(peer, lanes, lanes.take(streams or FIRST), deadline_s)

    def _open_lanes(self, peer: str, lanes: Lanes, numbers: Sequence[int], deadline_s: float) -> None:
        pending = [
            self._spawn(
                self._try_connect, f"peer-lane-{peer}", peer, lanes.address, number, lanes.most, deadline_s
            )
            for number in numbers
        ]
        for thread in pending:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        lanes.growing = False

    def _try_connect(
        self, peer: str, address: tuple[str, int], lane: int, lanes: int, deadline_s: float
    ) -> None:
        """One more connection; the link works without it."""
        with self._lock:
            if peer not in self._dialled:  # dismissed or lost meanwhile
                return
        try:
            self._connect(peer, address, lane, lanes, deadline_s)
        except AtollError:
            self.refused["lane"] += 1

    def _connect(
        self, peer: str, address: tuple[str, int], lane: int, lanes: int, deadline_s: float
    ) -> Connection:
        channel = open_channel(self._identity, peer, address, use_proxy=self.config.use_proxy)
        known = self._peer(peer)
        hello = self._hello(known, lane, lanes)
        connection = Connection(hello, dialled=True, checksum=self._identity is None, on_end=self._ended)
        wire = DialledWire(channel, partial(self._take, connection), partial(self._broken, connection))
        with self._lock:
            self._connections.add(connection)
            self._cancels[connection] = wire.close
            self._addresses[connection] = address
        connection.begin(wire)
        left_s = min(self.config.handshake_s, deadline_s - time.monotonic())
        connection.greeted.wait(max(0.0, left_s))
        if connection.peer is None or connection.ended:
            connection.fail(f"no answer within {left_s:.1f} s")
            raise self._why(wire.call, connection)
        return connection

    def _why(self, call: Any, connection: Connection) -> AtollError:
        """The refusal or failure of a dial as an error of ours; ``call`` None: it was never made."""
        reason = connection.reason
        status = call.code() if call is not None and call.done() else None
        if status is grpc.StatusCode.FAILED_PRECONDITION:
            return ProtocolMismatch(reason)
        tls = "ssl handshake" in reason.lower() or "verification check" in reason.lower()
        if status is grpc.StatusCode.UNAUTHENTICATED or tls:
            return AccessDenied(f"{connection.hello.target} is not who answers, or refuses us: {reason}")
        return _Refused(reason)

    # ---------------------------------------------------------------- messages

    def register(self, job: str, receiver: Receiver) -> None:
        """Messages of ``job`` go to ``receiver``."""
        with self._lock:
            self._receivers[job] = receiver

    def unregister(self, job: str, receiver: Receiver) -> None:
        """Messages of ``job`` are refused from now on, unless another receiver has taken over."""
        with self._lock:
            if self._receivers.get(job) is receiver:
                del self._receivers[job]

    def send(
        self,
        peer: str,
        key: MessageKey,
        header: bytes,
        payload: bytes | bytearray | memoryview,
        timeout_s: float | None = None,
        more: bool = False,
    ) -> None:
        """Queue a message; it must not change until it is confirmed. Waits while the queue is full.

        ``more``: another message to this peer follows at once, and this one need not leave before it.
        Raises PeerLost, or TimeoutError after ``timeout_s``.
        """
        view = memoryview(payload).cast("B")
        if len(view) > self.config.max_message_bytes:
            raise ValueError(f"message of {len(view)} bytes; at most {self.config.max_message_bytes}")
        if len(header) > MAX_META_BYTES:
            raise ValueError(f"message header of {len(header)} bytes; at most {MAX_META_BYTES}")
        self._known(peer).submit(key, header, view, timeout_s, more)

    def flush(self, peer: str, timeout_s: float) -> bool:
        """Wait until everything sent to ``peer`` is confirmed; False when it is not in time."""
        return self._known(peer).flush(timeout_s)

    def forget(self, job: str, plan_version: int | None = None) -> None:
        """Drop what is queued or half received of a job, up to ``plan_version`` if given."""

        def unwanted(key: MessageKey) -> bool:
            return key.job == job and (plan_version is None or key.plan_version <= plan_version)

        for peer in self._all_peers():
            with peer.lock:
                peer.outbox.drop(unwanted)
                peer.inbox.drop(unwanted)
                peer.room.notify_all()

    def _expect(self, peer: str, key: MessageKey, total: int) -> memoryview | None:
        with self._lock:
            receiver = self._receivers.get(key.job)
        if receiver is not None:
            return receiver.expect(peer, key, total)
        return self._expect_default(peer, key, total) if self._expect_default else None

    def _deliver(self, peer: str, key: MessageKey, header: bytes, payload: memoryview) -> None:
        with self._lock:
            receiver = self._receivers.get(key.job)
        if receiver is not None:
            receiver.deliver(peer, key, header, payload)
        elif self._deliver_default is not None:
            self._deliver_default(peer, key, header, payload)

    # ---------------------------------------------------------------- figures

    def rtt(self, peer: str, echoes: int = ECHOES, timeout_s: float = 5.0) -> float:
        """Median round trip of 64-byte echoes, seconds. Raises PeerLost, ConnectionFailed."""
        return round_trip(self._known(peer), echoes, timeout_s)

    def bandwidth(self, peer: str, seconds: float, max_bytes: int) -> float:
        """Payload bits per second to ``peer``, as its own clock saw a burst arrive.

        Sends at most ``max_bytes`` for at most about ``seconds``, after all other traffic. The
        first quarter, in which TCP still grows, does not count. Raises PeerLost, ConnectionFailed.
        """
        return burst(self._known(peer), seconds, max_bytes)

    def goodput(self) -> list[Goodput]:
        """What was acknowledged of training's boundary tensors since the last call, for every peer."""
        found = []
        for peer in self._all_peers():
            with peer.lock:
                rtt_s = peer.rtt_s or 0.0
                nbytes, busy_s, quickest_bps = peer.goodput()
            if nbytes:
                found.append(Goodput(peer.name, nbytes, busy_s, rtt_s, quickest_bps))
        return found

    def progress(self) -> int:
        """Chunks sent, acknowledged and received so far; stands still when nothing moves."""
        return sum(peer.progress for peer in self._all_peers())

    def refusals(self) -> Counter[str]:
        """What was refused, by reason, of all peers that are not lost."""
        total = Counter(self.refused)
        for peer in self._all_peers():
            total.update(peer.inbox.refused)
        return total

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """Say goodbye, wait briefly for the last frames, stop every thread."""
        if self._closing.is_set():
            return
        self._closing.set()
        with self._lock:
            connections = list(self._connections)
        self._close_all(connections, "worker is leaving", leaving=True)
        if self._server is not None:
            self._server.close()
        for peer in self._all_peers():
            peer.lose("closed")
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(2.0)

    def _close_all(self, connections: Sequence[Connection], reason: str, *, leaving: bool) -> None:
        for connection in connections:
            connection.close(reason, leaving=leaving)
        deadline_s = time.monotonic() + self.config.close_s
        for connection in connections:
            connection.gone.wait(max(0.0, deadline_s - time.monotonic()))
        for connection in connections:
            connection.fail("closed")

    # ---------------------------------------------------------------- accepting

    def _accept(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        mark = object()
        with self._lock:
            expiry_s = time.monotonic() + self.config.handshake_s
            self._handshakes[mark] = (expiry_s, context.cancel)
        try:
            first = next(messages)
        except (grpc.RpcError, StopIteration):
            return iter(())
        finally:
            with self._lock:
                self._handshakes.pop(mark, None)
        try:
            frame = decode(first)[0]
            remote = self._check_hello(frame, peer_name(context.auth_context()))
        except ProtocolMismatch as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except AccessDenied as error:
            self.refused["stranger"] += 1
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except BadFrame as error:
            self.refused["malformed"] += 1
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        known = self._peer(remote.name, remote.session)
        hello = self._hello(known, remote.lane, remote.lanes)
        connection = Connection(hello, dialled=False, checksum=self._identity is None, on_end=self._ended)
        wire = AcceptedWire(context, partial(self._take, connection), partial(self._broken, connection))
        with self._lock:
            self._connections.add(connection)
            self._cancels[connection] = wire.close
        connection.begin(wire)
        self._open(connection, remote, known)
        wire.serve()
        # Returning ends the stream with OK.
        return iter(())

    def _check_hello(self, frame: object, certified: str | None) -> Hello:
        """Raises BadFrame, ProtocolMismatch or AccessDenied."""
        if not isinstance(frame, Hello):
            raise BadFrame("the first frame must be HELLO")
        if frame.protocol != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"peer speaks protocol {frame.protocol}, {self.name} speaks {PROTOCOL_VERSION}; update one"
            )
        if self._identity is not None and certified != frame.name:
            raise AccessDenied(f"certificate of {certified}, but the peer calls itself {frame.name!r}")
        if frame.target != self.name:
            raise AccessDenied(f"this is {self.name}, not {frame.target!r}")
        with self._lock:
            if frame.name not in self._expected:
                raise AccessDenied(f"{self.name} does not expect {frame.name!r}")
            known = self._peers.get(frame.name)
            if known is not None and len(known.lanes) >= MAX_LANES:
                raise AccessDenied(
                    f"{frame.name!r} has {len(known.lanes)} connections to {self.name} already"
                )
        return frame

    # ---------------------------------------------------------------- inside

    def _hello(self, peer: Peer, lane: int, lanes: int) -> Hello:
        label = self.shaping.label if self.shaping else ""
        return Hello(PROTOCOL_VERSION, peer.session, self.name, peer.name, label, lane, lanes)

    def _open(self, connection: Connection, remote: Hello, peer: Peer) -> None:
        with self._lock:
            host = self._addresses.get(connection, ("", 0))[0]
        shaping, names = self.shaping, (remote.label, remote.name, host)
        connection.open(remote, peer, lambda wire: shaping.shaped(wire, *names) if shaping else wire)
        with self._lock:
            self._changed.notify_all()

    def _peer(self, name: str, remote_session: int | None = None, session: int | None = None) -> Peer:
        """The peer's state; anew when its session shows that it has forgotten the old one.

        ``session``: the number under which the peer has just met us, if it has.
        """
        with self._lock:
            known = self._peers.get(name)
            if known is not None and remote_session is not None:
                if known.remote_session in (None, remote_session):
                    known.remote_session = remote_session
                    return known
            elif known is not None:
                return known
            self._peers[name] = fresh = Peer(
                name, session or secrets.randbits(63), self.config, self._expect, self._deliver
            )
            fresh.remote_session = remote_session
        if known is not None:
            self._lose(known, "restarted")
        return fresh

    def _known(self, name: str) -> Peer:
        with self._lock:
            known = self._peers.get(name)
        if known is None:
            raise PeerLost(name, "not connected")
        return known

    def _all_peers(self) -> list[Peer]:
        with self._lock:
            return list(self._peers.values())

    def _greet(self, connection: Connection, message: bytes) -> None:
        """The answer to our HELLO."""
        frame = decode(message)[0]
        if not isinstance(frame, Hello):
            raise BadFrame("the first frame must be HELLO")
        if (frame.name, frame.target) != (connection.hello.target, self.name):
            raise BadFrame(f"{frame.name!r} answered instead of {connection.hello.target!r}")
        # A peer that forgot us has just met us anew, under the number we gave: a fresh number would
        # make it forget us again, and the two would take turns at that for ever.
        known = self._peer(frame.name, frame.session, connection.hello.session)
        if known.session != connection.hello.session:
            connection.fail("the peer has restarted")
            return
        self._open(connection, frame, known)

    def _take(self, connection: Connection, message: bytes) -> None:
        """A message has arrived; in a thread of gRPC's."""
        if connection.deaf or connection.gone.is_set():
            return
        try:
            if connection.remote is None:
                self._greet(connection, message)
            else:
                connection.receive(message)
        except BadFrame as error:
            self.refused["malformed"] += 1
            connection.deaf = True
            connection.close(str(error), leaving=False)
            self._spawn(self._let_it_end, "peer-end", connection, str(error))

    def _broken(self, connection: Connection, reason: str) -> None:
        connection.fail(clean(reason, MAX_REASON_BYTES))

    def _let_it_end(self, connection: Connection, reason: str) -> None:
        """Thread: the other side is to see our CLOSE and end the stream."""
        connection.gone.wait(self.config.close_s)
        connection.fail(reason)

    def _ended(self, connection: Connection) -> None:
        """A connection is over: dial again, or take note of a goodbye."""
        with self._lock:
            self._connections.discard(connection)
            cancel = self._cancels.pop(connection, None)
            address = self._addresses.pop(connection, None)
            self._changed.notify_all()
        # A server's stream whose last frame is out ends by itself; cancelling could overtake it.
        if cancel is not None and (connection.dialled or not connection.said_all):
            self._spawn(cancel, "peer-close")  # waits for the thread that may have brought us here
        peer = connection.peer
        if peer is None or peer.gone or self._closing.is_set():
            return
        if connection.leaving:
            if not peer.lanes:
                self._lose(peer, connection.reason)
        elif connection.dialled and address is not None:
            self._spawn(self._redial, f"peer-redial-{peer.name}", peer, address, connection.hello)

    def _redial(self, peer: Peer, address: tuple[str, int], hello: Hello) -> None:
        """Replace a broken connection as long as the peer is not lost; runs in a thread of its own."""
        backoff_s = 0.02
        while not peer.gone and not self._closing.wait(backoff_s):
            with self._lock:
                if self._peers.get(peer.name) is not peer:
                    return
            try:
                self._connect(
                    peer.name, address, hello.lane, hello.lanes, time.monotonic() + self.config.handshake_s
                )
                return
            except AtollError:
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _lose(self, peer: Peer, reason: str) -> None:
        if not peer.lose(reason):
            return
        with self._lock:
            if self._peers.get(peer.name) is peer:
                del self._peers[peer.name]
                self._dialled.pop(peer.name, None)
            connections = [c for c in self._connections if c.peer is peer]
            receivers = list(self._receivers.values())
            self._changed.notify_all()
        for connection in connections:
            connection.fail(reason)
        if self._closing.is_set():
            return
        if self._lost_default is not None:
            self._lost_default(peer.name, reason)
        for receiver in receivers:
            receiver.lost(peer.name, reason)

    def _watch(self) -> None:
        """Thread: pings, silence, reconnect deadlines, stuck handshakes."""
        config = self.config
        last_s = pinged_s = time.monotonic()
        rounds = 0
        while not self._closing.wait(config.tick_s):
            now_s = time.monotonic()
            asleep_s = now_s - last_s - config.tick_s
            last_s = now_s
            with self._lock:
                connections = [c for c in self._connections if c.remote is not None]
                stuck = [cancel for expiry_s, cancel in self._handshakes.values() if now_s > expiry_s]
            for cancel in stuck:
                cancel()
            if asleep_s > config.ping_s:
                # We were stopped, not they.
                for connection in connections:
                    connection.asked_s = min(connection.asked_s, connection.heard_s)
            if now_s - pinged_s >= config.ping_s:
                pinged_s, rounds = now_s, rounds + 1
                for connection in connections:
                    if rounds % SPARE_ROUNDS == 0 or not (connection.spare or connection.heard(now_s)):
                        connection.ping(now_s)
            self._check(connections, now_s)

    def _check(self, connections: list[Connection], now_s: float) -> None:
        for connection in connections:
            if connection.spare:
                # Its silence counts from when it is used again.
                connection.asked_s = min(connection.asked_s, connection.heard_s)
            # Counted from the question: an answer may wait behind a second of data on a slow line.
            if connection.unanswered_s(now_s) > self.config.silence_s - self.config.ping_s / 2:
                connection.silent = True
                connection.fail(f"silent for {now_s - connection.heard_s:.1f} s")
        for peer in self._all_peers():
            with peer.lock:
                if peer.outbox.waiting:
                    peer.nudge()  # a connection with room may be held up below us
                peer.settle_receipts(now_s)
                still = peer.stir(now_s)
                down_since_s, reason, silent = peer.down_since_s, peer.down_reason, peer.down_silent
                patience_s = max(self.config.reconnect_s, 6 * peer.last_rtt_s)
                self._grow(peer, now_s)
            if still is not None:
                log.warning("peer.still", peer=peer.name, **still)
            if down_since_s is not None and (silent or now_s - down_since_s > patience_s):
                self._lose(peer, reason)

    def _grow(self, peer: Peer, now_s: float) -> None:
        """More connections to a peer that we dialled, once those it has are full; its lock is held."""
        lanes, rtt_s = self._dialled.get(peer.name), peer.rtt_s
        if lanes is None or rtt_s is None:
            return
        numbers = lanes.lacking(now_s, peer.under_way, peer.received_bytes, rtt_s)
        if numbers:
            lanes.growing = True
            deadline_s = now_s + self.config.handshake_s
            self._spawn(self._open_lanes, f"peer-grow-{peer.name}", peer.name, lanes, numbers, deadline_s)

    def _spawn(self, target: Callable[..., None], name: str, *arguments: object) -> threading.Thread:
        def run() -> None:
            try:
                target(*arguments)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:  # whoever finds it there may join it
            self._threads.add(thread)
            thread.start()
        return thread
