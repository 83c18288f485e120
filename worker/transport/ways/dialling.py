"""The way out: connections that this end opens to a peer, and replaces for as long as the peer is not lost.

All of it runs on the network's loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from atoll.backoff import Backoff
from atoll.errors import AccessDenied, AtollError, BadFrame, ConnectionFailed, ProtocolMismatch
from hostos.net.addresses import join_address
from protos import PROTOCOL_VERSION
from protos.devices import machine_of
from worker.transport import TUNED
from worker.transport.contract import Way
from worker.transport.frames import Hello, decode, encode
from worker.transport.measure import round_trip
from worker.transport.pipes import DialledPipe, Pipe
from worker.transport.ways.meeting import Road

if TYPE_CHECKING:
    from protos.credentials import CurrentIdentity
    from worker.transport.network import PeerNetwork
    from worker.transport.peers.connection import Connection
    from worker.transport.peers.peer import Peer
    from worker.transport.ways.tunnels import LocalEnds


class Dialler:
    """Dials for one network."""

    def __init__(
        self, network: PeerNetwork, identity: CurrentIdentity | None, ends: LocalEnds | None
    ) -> None:
        """``identity`` None: no TLS. ``ends`` None: this system has no tunnels."""
        self._network, self._identity, self._ends = network, identity, ends
        self.config = network.config
        self.known, self.spawn = network.known, network.spawn

    async def first(self, peer: str, roads: Sequence[Road], timeout_s: float) -> tuple[Connection, Road]:
        """Return the first connection, of which the peer answers as itself, and what it goes by; on the loop.

        Raises ConnectionFailed after ``timeout_s``, AccessDenied or ProtocolMismatch when trying again cannot
        help.
        """
        deadline_s = time.monotonic() + timeout_s
        backoff = Backoff(TUNED.first_backoff_s, TUNED.max_backoff_s)
        reasons: dict[Road, AtollError] = {}
        while True:
            for road in roads:
                try:
                    return await self._connect(peer, road, 0, deadline_s), road
                except AtollError as error:
                    # What the deadline cut short says less than an answer that came before.
                    if road not in reasons or time.monotonic() < deadline_s:
                        reasons[road] = error
            if reasons and all(isinstance(why, AccessDenied | ProtocolMismatch) for why in reasons.values()):
                raise next(iter(reasons.values()))
            pause_s = backoff.next_s()
            if time.monotonic() + pause_s >= deadline_s or self._network.closed:
                tried = "; ".join(f"{_shown(road)}: {why}" for road, why in reasons.items())
                tried = tried or "no address known"
                raise ConnectionFailed(f"cannot reach {peer} within {timeout_s:g} s ({tried})")
            await asyncio.sleep(pause_s)

    async def add_streams(self, connection: Connection, road: Road, deadline_s: float) -> None:
        """The other connections to a peer whose first works; the link works without them, too. On the
        loop."""
        peer, streams = connection.peer, self.config.streams
        self.keep(connection, road)
        if not streams:
            with suppress(ConnectionFailed):
                far = await asyncio.to_thread(round_trip, peer, 3) > TUNED.far_rtt_s
                streams = TUNED.far_streams if far else 1

        async def add(number: int) -> None:
            connection = None
            with suppress(AtollError):
                connection = await self._connect(peer.name, road, number, deadline_s)
            self.spawn(self._keep(connection, peer, road, number))

        await asyncio.gather(*(add(number) for number in range(1, streams)))

    def keep(self, connection: Connection, road: Road) -> None:
        """Serve a connection that was dialled, and replace it when it breaks; on the loop."""
        self.spawn(self._keep(connection, connection.peer, road, 0))

    async def _dialled(self, name: str, road: Road, left_s: float) -> Pipe:
        """A pipe that nothing was sent on. Raises ConnectionFailed."""
        identity = self._identity.now if self._identity is not None else None
        if isinstance(road, tuple):
            target = join_address(*road)
            return DialledPipe(identity, machine_of(name), target, use_proxy=self.config.use_proxy)
        if self._ends is None:
            raise ConnectionFailed("this system has no local sockets for tunnels")
        try:
            async with asyncio.timeout(left_s):
                stream = await road.open()
        except TimeoutError:
            raise ConnectionFailed(f"{road.name}: the other end did not come") from None
        return DialledPipe(identity, machine_of(name), self._ends.dialled(stream), use_proxy=False)

    async def _connect(self, name: str, road: Road, stream: int, deadline_s: float) -> Connection:
        """Dial and greet. Raises AccessDenied, ProtocolMismatch, ConnectionFailed."""
        left_s = max(0.0, min(self.config.handshake_s, deadline_s - time.monotonic()))
        pipe = await self._dialled(name, road, left_s)
        hello = self._network.hello(self._network.peer(name), stream)
        try:
            async with asyncio.timeout(left_s):
                await pipe.send(encode(hello))
                answer = await pipe.receive()
            remote = greeting(answer, self._network.name)
            if remote.name != name:
                raise AccessDenied(f"{name} calls itself {remote.name!r}")
            self._network.checked(remote)
            # A peer that forgot us has just met us anew, under the number we gave: a fresh number would
            # make it forget us again, and the two would take turns at that for ever.
            peer = self._network.peer(remote.name, remote.session, hello.session)
            if peer.session != hello.session:
                raise ConnectionFailed("the peer has restarted")
        except BaseException as error:
            await pipe.close()
            if isinstance(error, TimeoutError):
                raise ConnectionFailed(f"no answer within {left_s:.1f} s") from None
            if isinstance(error, BadFrame):
                raise ConnectionFailed(str(error)) from None
            raise
        way, host = (Way.DIRECT, road[0]) if isinstance(road, tuple) else (Way.RELAYED, "")
        return self._network.attach(pipe, peer, remote, way, outbound=stream % 2 == 0, host=host)

    async def _keep(self, connection: Connection | None, peer: Peer, road: Road, stream: int) -> None:
        """Serve a dialled connection, and replace it when it breaks, until the peer is lost; one through a
        tunnel, until the peer is joined without."""
        backoff = Backoff(TUNED.first_backoff_s, TUNED.max_backoff_s)
        while not peer.gone and not self._network.closed:
            if connection is not None:
                await self._network.serve(connection)
                if connection.leaving or peer.gone:
                    return
                backoff.reset()
            await asyncio.sleep(backoff.next_s())
            connection = None
            road = self._network.meetings.newest(peer.name, road)
            if not isinstance(road, tuple) and peer.way not in (None, Way.RELAYED):
                return
            if self.known(peer.name) is peer:
                with suppress(AtollError):
                    deadline_s = time.monotonic() + self.config.handshake_s
                    connection = await self._connect(peer.name, road, stream, deadline_s)
        if connection is not None:
            connection.fail("closed")
            await self._network.serve(connection)


def greeting(first: bytes | None, name: str) -> Hello:
    """The HELLO of who greets ``name``. Raises BadFrame, ProtocolMismatch."""
    if first is None:
        raise BadFrame("connection closed by the peer")
    frame = decode(first)[0]
    if not isinstance(frame, Hello):
        raise BadFrame("the first frame must be HELLO")
    if frame.protocol != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"peer speaks protocol {frame.protocol}, {name} speaks {PROTOCOL_VERSION}; update one"
        )
    return frame


def _shown(road: Road) -> str:
    return f"{road[0]}:{road[1]}" if isinstance(road, tuple) else road.name
