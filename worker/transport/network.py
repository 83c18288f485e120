"""PeerNetwork: long-lived streams between workers, either side may dial, all on one event loop.

Mutual TLS names both ends: a server accepts only peers that it expects, under the name in
their certificate, and a client refuses a server with another name. A message is sent once and
delivered once: what a broken connection carried goes over the next one, and the receiver drops
what it already has. A peer whose connections stay broken, or that falls silent, is lost, once,
with the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from atoll.errors import AccessDenied, AtollError, BadFrame
from atoll.messages.from_worker import Goodput
from atoll.spare import LEAST_PIECE_BYTES, piece_bytes
from hostos.budget import REFUSALS, REFUSALS_PER_S, Budget
from protos import PROTOCOL_VERSION
from protos.credentials import CurrentIdentity
from protos.devices import machine_of
from worker.transport import TUNED
from worker.transport.contract import (
    Paths,
    Receiver,
    RelayOffer,
    TransportConfig,
    Way,
)
from worker.transport.frames import MAX_META_BYTES, Hello, MessageKey, encode
from worker.transport.loop import SHARED, run
from worker.transport.measure import burst, round_trip
from worker.transport.peers.connection import Connection
from worker.transport.peers.courtesy import Courtesy
from worker.transport.peers.peer import Peer, Peers
from worker.transport.pipes import AcceptedPipe, Pipe, PipeServer
from worker.transport.ways.dialling import Dialler, greeting
from worker.transport.ways.meeting import Meetings
from worker.transport.ways.relaying import RelayTunnel
from worker.transport.ways.tunnels import LocalEnds, Tunnel

if TYPE_CHECKING:
    from protos.credentials import Identity
    from worker.manners.traffic import Traffic

log = structlog.get_logger()

MAX_STREAMS = 32
"""Open connections of one peer, with those that broke unnoticed."""
MAX_EXPECTED = 16_384  # peers that the coordinator has named


class Shaping(Protocol):
    """Slows down what this process sends: how the lab makes distant peers of processes on loopback."""

    label: str  # our name to the peers' shapings

    def shaped(self, pipe: Pipe, *names: str) -> Pipe:
        """Return a pipe that sends on ``pipe`` in its own time; the peer is known under ``names``."""


class PeerNetwork:
    """All peer links of one worker. Methods may be called from any thread but the loop's, ``send`` and what
    returns at once from any."""

    shaping: Shaping | None = None

    def __init__(
        self,
        identity: Identity | None,
        listen: tuple[str, int] | None,
        lost: Callable[[str, str], None] | None = None,
        config: TransportConfig | None = None,
        *,
        name: str = "",
        traffic: Traffic | None = None,
        joined: Callable[[str, Way | None, str], None] = lambda peer, way, relay: None,
        tunnel: Callable[[RelayOffer], Tunnel] | None = None,
    ) -> None:
        """``identity`` None: no TLS, for loopback experiments; then ``name`` is believed. ``name``: of one of
        the certified machine's devices; empty: the machine itself. ``traffic``: what this machine may send
        and receive; None: anything.

        ``lost(peer, reason)`` is called before the jobs' receivers hear of it, ``joined(peer, way, relay)``
        on the loop whenever a peer is joined another way, or none; ``tunnel`` makes one of an offer. Raises
        ConnectionFailed when the port cannot be opened.
        """
        self.config = config or TransportConfig()
        self.name = name or (identity.name if identity else "")
        self._identity = CurrentIdentity(identity) if identity is not None else None
        self._lost = lost
        self._courtesy = Courtesy(self._urgent_over)
        self._peers = Peers(
            lambda name, session: Peer(
                name, session, self.config, self._receivers, self._loop, traffic, self._courtesy
            )
        )
        self._expected: dict[str, None] = {}  # the one named longest ago first
        self._receivers: dict[str, Receiver] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ends: LocalEnds | None = None
        with suppress(OSError, AttributeError):  # a system without Unix sockets has no tunnels
            self._ends = LocalEnds()
        self._dialler = Dialler(self, self._identity, self._ends)
        self.meetings = Meetings(self._dialler, self._ends, tunnel or self._relay_tunnel, joined)
        self.closed = False
        self._refusals = Budget(REFUSALS, REFUSALS_PER_S)
        self._server: PipeServer | None = None
        self._loop = SHARED.acquire()
        try:
            self.port = run(self._loop, self._start(listen))
        except BaseException:
            SHARED.release()
            raise

    async def _start(self, listen: tuple[str, int] | None) -> int:
        config = self.config
        self._server = PipeServer(self._identity, self._accept, config.max_connections, config.handshake_s)
        try:
            port = await self._server.start(listen, self._ends.accepting if self._ends else None)
        except BaseException:
            await self._server.close()
            if self._ends is not None:
                await self._ends.close()
            raise
        self.spawn(self._watch())
        if port:
            self.spawn(self._server.keep_bounds(port))
        return port

    def _relay_tunnel(self, offer: RelayOffer) -> Tunnel:
        return RelayTunnel(offer, self.config.coordinator, use_proxy=self.config.use_proxy)

    # ---------------------------------------------------------------- connecting

    def renew(self, identity: Identity) -> None:
        """Show new connections ``identity``; those that are open stay."""
        if self._identity is not None:
            self._identity.replace(identity)

    def moved(self) -> None:
        """This machine has another address: what is open has fallen silent, so begin anew with every peer."""
        self._loop.call_soon_threadsafe(self._move)

    def _move(self) -> None:
        for peer in self._peers.all():
            peer.wait_for_moved()
            for connection in list(peer.connections):
                connection.fail("this machine's address has changed")

    def admit(self, peer: str) -> None:
        """Accept connections of this peer from now on; of too many those go that were named longest ago and
        are not connected."""
        self._expected.pop(peer, None)
        self._expected[peer] = None
        if len(self._expected) > MAX_EXPECTED:
            gone = next((name for name in list(self._expected) if self._peers.find(name) is None), None)
            self._expected.pop(gone or "", None)

    def bar(self, peer: str, reason: str) -> None:
        """End this peer's connections and accept none, until it is admitted again."""
        self._expected.pop(peer, None)
        if (known := self.known(peer)) is not None:
            self._loop.call_soon_threadsafe(self._lose, known, reason)

    def meet(self, peer: str, paths: Paths, timeout_s: float) -> None:
        """Be connected with ``peer``, whichever end can dial the other. Raises ConnectionFailed after
        ``timeout_s``, ProtocolMismatch at once."""
        self.admit(peer)
        try:
            run(self._loop, self.meetings.meet(peer, paths, timeout_s))
        except AtollError:
            self._peers.forget_unmet(peer)
            raise

    def expect(self, peer: str, paths: Paths, timeout_s: float) -> None:
        """Begin to ``meet`` a peer, and return at once; failing is logged."""
        self.admit(peer)

        async def meet() -> None:
            try:
                await self.meetings.meet(peer, paths, timeout_s)
            except AtollError as error:
                self._peers.forget_unmet(peer)
                log.info("peer.unreachable", peer=peer, reason=str(error))

        asyncio.run_coroutine_threadsafe(self._begin(meet()), self._loop)

    async def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self.spawn(work)

    def connected(self, peer: str) -> bool:
        return self.connections(peer) > 0

    def known(self, peer: str) -> Peer | None:
        """Return the peer's state, None where it was never met or is lost."""
        return self._peers.find(peer)

    def reported(self) -> list[tuple[str, Way, str]]:
        """What ``joined`` was called with for the peers there are."""
        return self.meetings.reported()

    def connections(self, peer: str) -> int:
        """How many streams to this peer are open."""
        return self._peers.connections(peer)

    def attach(
        self, pipe: Pipe, peer: Peer, remote: Hello, way: Way, *, outbound: bool, host: str = ""
    ) -> Connection:
        if self.shaping is not None:
            pipe = self.shaping.shaped(pipe, remote.label, remote.name, host)
        connection = Connection(pipe, peer, outbound=outbound, summed=self._identity is None, way=way)
        with self._peers.changed:
            self._peers.changed.notify_all()
        self.meetings.attached(peer)
        return connection

    async def serve(self, connection: Connection) -> None:
        """A connection's life, and what follows from its end."""
        try:
            await connection.run()
        finally:
            peer = connection.peer
            with self._peers.changed:
                self._peers.changed.notify_all()
            if not self.closed:
                self.meetings.detached(peer, connection)
            if connection.leaving and not peer.connections and not self.closed:
                self._lose(peer, connection.reason)

    # ---------------------------------------------------------------- accepting

    async def _accept(self, pipe: AcceptedPipe) -> None:
        """Raises what the caller is refused with."""
        try:
            async with asyncio.timeout(self.config.handshake_s):
                hello = greeting(await pipe.receive(), self.name)
            if self._identity is not None and machine_of(hello.name) != (pipe.certified or ""):
                raise AccessDenied(f"{pipe.certified} calls itself {hello.name!r}")
            network = self._addressed(hello.target)
            remote = network.checked(hello)
            pipe.admit()
        except (AccessDenied, BadFrame) as error:
            if self._refusals.take(time.monotonic()):
                left_out = self._refusals.refused() or None
                log.warning("peer.refused", peer=pipe.certified, reason=str(error), left_out_before=left_out)
            raise
        await network._serve_accepted(pipe, remote)

    def _addressed(self, name: str) -> PeerNetwork:
        """The network that a caller of ``name`` means, of those behind this port."""
        return self

    async def _serve_accepted(self, pipe: AcceptedPipe, remote: Hello) -> None:
        peer = self.peer(remote.name, remote.session)
        await pipe.send(encode(self.hello(peer, remote.stream)))
        if not peer.gone and not self.closed:
            way, outbound = Way.RELAYED if pipe.tunnelled else Way.REVERSED, remote.stream % 2 == 1
            await self.serve(self.attach(pipe, peer, remote, way, outbound=outbound))

    def checked(self, frame: Hello) -> Hello:
        """A HELLO that this network accepts. Raises AccessDenied."""
        if frame.target != self.name:
            raise AccessDenied(f"this is {self.name}, not {frame.target!r}")
        if frame.name not in self._expected:
            raise AccessDenied(f"{self.name} does not expect {frame.name!r}")
        if (count := self.connections(frame.name)) >= MAX_STREAMS:
            raise AccessDenied(f"{frame.name!r} has {count} connections to {self.name} already")
        return frame

    def hello(self, peer: Peer, stream: int) -> Hello:
        label = self.shaping.label if self.shaping else ""
        return Hello(PROTOCOL_VERSION, peer.session, self.name, peer.name, label, stream)

    # ---------------------------------------------------------------- messages

    def register(self, job: str, receiver: Receiver) -> None:
        """Messages of ``job`` go to ``receiver``."""
        self._receivers[job] = receiver

    def unregister(self, job: str, receiver: Receiver) -> None:
        """Messages of ``job`` are refused from now on, unless another receiver has taken over."""
        with self._peers.changed:
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
        background: bool = False,
    ) -> None:
        """Queue a message; it must not change until it is confirmed. Waits while the queue is full.

        ``more``: another message to this peer follows at once, and this one need not leave before it.
        ``background``: everything else that this worker sends, to whomever, goes first.
        Raises PeerLost, or TimeoutError after ``timeout_s``.
        """
        view = memoryview(payload).cast("B")
        if len(view) > self.config.max_message_bytes:
            raise ValueError(f"message of {len(view)} bytes; at most {self.config.max_message_bytes}")
        if len(header) > MAX_META_BYTES:
            raise ValueError(f"message header of {len(header)} bytes; at most {MAX_META_BYTES}")
        self._submit(peer, key, header, view, timeout_s, more=more, background=background)

    def _submit(
        self,
        peer: str,
        key: MessageKey,
        header: bytes,
        view: memoryview,
        timeout_s: float | None,
        *,
        more: bool,
        background: bool,
    ) -> None:
        self._peers.known(peer).submit(key, header, view, timeout_s, more=more, background=background)

    def spare(self, peer: str) -> tuple[int, float]:
        """Return how long a piece of a copy for ``peer`` is to be, in bytes, and the seconds until it may
        leave; at 0.0 it counts as sent now."""
        known = self._peers.find(peer)
        if known is None:
            return LEAST_PIECE_BYTES, 0.0  # who is not joined is sent nothing
        n_bytes = piece_bytes(known.window.likely_rate)
        return n_bytes, self._courtesy.copy(n_bytes / known.window.likely_rate)

    def flush(self, peer: str, timeout_s: float) -> bool:
        """Wait until everything sent to ``peer`` is confirmed; False when it is not in time."""
        return self._peers.known(peer).flush(timeout_s)

    def forget(self, job: str, plan_version: int | None = None) -> None:
        """Drop what is queued or half received of a job, up to ``plan_version`` if given; then background
        messages stay queued: who repeats steps repeats those of older versions."""
        for peer in self._peers.all():
            peer.forget(
                lambda key: key.job == job and (plan_version is None or key.plan_version <= plan_version),
                background=plan_version is None,
            )

    def _urgent_over(self) -> None:
        """Any thread: background messages may leave."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake_background)

    def _wake_background(self) -> None:
        """On the loop."""
        for peer in self._peers.all():
            with peer.lock:
                if peer.outbox.background_held:
                    peer.wake_one()

    # ---------------------------------------------------------------- figures

    def rtt(self, peer: str) -> float:
        """Median round trip of echoes, seconds. Raises PeerLost, ConnectionFailed."""
        return round_trip(self._peers.known(peer), TUNED.echoes)

    def bandwidth(self, peer: str, seconds: float, max_bytes: int) -> float:
        """Payload bits per second to ``peer``, as its own clock saw a burst arrive.

        Sends at most ``max_bytes`` for at most about ``seconds``, after all other traffic. The
        first half, in which the window still grows, does not count. Raises PeerLost, ConnectionFailed.
        """
        return burst(self._peers.known(peer), seconds, max_bytes)

    def goodput(self) -> list[Goodput]:
        """What was acknowledged of training's boundary tensors since the last call, for every peer."""
        return [found for peer in self._peers.all() if (found := peer.goodput()).n_bytes]

    def progress(self, peers: Collection[str]) -> int:
        """Chunks of steps sent to these, acknowledged and received so far; stands still when nothing moves.

        Of neighbours alone: a send log is read by standbys, however long the computation has hung.
        """
        return sum(peer.progress for peer in self._peers.all() if peer.name in peers)

    # ---------------------------------------------------------------- peers

    def peer(self, name: str, remote_session: int | None = None, session: int | None = None) -> Peer:
        """The peer's state; anew when its session shows that it has forgotten the old one.

        ``session``: the number under which the peer has just met us, if it has.
        """
        found, before = self._peers.met(name, remote_session, session)
        if before is not None:
            self._lose(before, "restarted")
        return found

    def _lose(self, peer: Peer, reason: str) -> None:
        """On the loop."""
        if not peer.lose(reason):
            return
        with self._peers.changed:
            self._peers.remove(peer)
            receivers = list(self._receivers.values())
            self._peers.changed.notify_all()
        for connection in list(peer.connections):
            connection.fail(reason)
        if self.closed:
            return
        if self._lost is not None:
            self._lost(peer.name, reason)
        for receiver in receivers:
            receiver.lost(peer.name, reason)

    async def _watch(self) -> None:
        """Pings, silence and the deadlines of reconnecting."""
        tick_s = self.config.tick_s
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(tick_s)
            now_s = time.monotonic()
            asleep = now_s - last_s - tick_s > self.config.ping_s  # we were stopped, not they
            last_s = now_s
            for peer in self._peers.watched(now_s, asleep=asleep):
                self._lose(peer, peer.down_reason)

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """Say goodbye, wait briefly for the last frames, end everything."""
        if self.closed:
            return
        self.closed = True
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(TUNED.close_within_s)
        for peer in self._peers.all():
            peer.lose("closed")
        SHARED.release()

    async def _close(self) -> None:
        connections = [connection for peer in self._peers.all() for connection in peer.connections]
        for connection in connections:
            connection.close("worker is leaving", leaving=True)
        deadline_s = time.monotonic() + self.config.close_s
        while any(peer.connections for peer in self._peers.all()) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.005)
        for connection in connections:
            connection.fail("closed")
        if self._server is not None:
            await self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._ends is not None:
            await self._ends.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
