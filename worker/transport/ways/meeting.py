"""How peers come to be connected, and stay so by the best way there is; on the loop.

Each way has its time: the end that is to dial first, then the other one, then the tunnel. A peer that is
joined through a tunnel is dialled now and then; what broke is mended from this end, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from atoll.backoff import Backoff
from atoll.errors import AtollError, ConnectionFailed, ProtocolMismatch
from worker.transport import TUNED
from worker.transport.contract import Paths, Way
from worker.transport.ways.tunnels import Tunnel

if TYPE_CHECKING:
    from worker.transport.contract import RelayOffer
    from worker.transport.peers.connection import Connection
    from worker.transport.peers.peer import Peer
    from worker.transport.ways.dialling import Dialler
    from worker.transport.ways.tunnels import LocalEnds

log = structlog.get_logger()

Road = tuple[str, int] | Tunnel
"""What leads to a peer: its address, or something that both reach."""
Found = tuple["Connection", Road]


class Meetings:
    """Ways to every peer, and what is being done about them."""

    def __init__(
        self,
        dialler: Dialler,
        ends: LocalEnds | None,
        tunnel: Callable[[RelayOffer], Tunnel],
        joined: Callable[[str, Way | None, str], None],
    ) -> None:
        """``ends`` None: this system has no tunnels. ``joined``: as of ``PeerNetwork``."""
        self._dialler, self._ends, self._make_tunnel, self._joined = dialler, ends, tunnel, joined
        self._met: dict[str, asyncio.Event] = {}  # set once the peer is connected
        self._tunnels: dict[str, Tunnel] = {}  # the newest to each peer
        self._addresses: dict[str, tuple[tuple[str, int], ...]] = {}  # the newest of each
        self._duties: dict[tuple[str, str], asyncio.Task[None]] = {}  # by (what for, peer)
        self._reported: dict[str, tuple[Way, str]] = {}

    def reported(self) -> list[tuple[str, Way, str]]:
        """How the connected peers are joined, as ``joined`` has it; any thread."""
        return [(peer, way, relay) for peer, (way, relay) in list(self._reported.items())]

    def newest(self, peer: str, road: Road) -> Road:
        """A tunnel with a newer ticket, an address where the peer is now."""
        if not isinstance(road, tuple):
            return self._tunnels.get(peer, road)
        addresses = self._addresses.get(peer) or (road,)
        return road if road in addresses else addresses[0]

    # ---------------------------------------------------------------- being joined

    async def meet(self, peer: str, paths: Paths, timeout_s: float) -> None:
        """Try every way until the peer is connected. Raises ConnectionFailed, ProtocolMismatch at once."""
        if paths.relay is not None and self._ends is not None:
            self._tunnels[peer] = self._make_tunnel(paths.relay)
        before, self._addresses[peer] = self._addresses.get(peer, paths.addresses), paths.addresses
        known = self._dialler.known(peer)
        if known is not None and before != paths.addresses:
            known.wait_for_moved()
        deadline_s = time.monotonic() + timeout_s
        while not self._connected(peer):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0.0:
                raise ConnectionFailed(f"{peer} connected within {timeout_s:g} s, but did not stay so")
            await self._try_all(peer, paths, left_s)
        known = self._dialler.known(peer)
        if known is not None and known.relayed and paths.addresses:
            self._do("upgrade", peer, self._upgrade(known))

    async def _try_all(self, peer: str, paths: Paths, timeout_s: float) -> None:
        """Try every way until a connection comes. Where both ends dial, one may forget the other: then it is
        gone at once. Raises ConnectionFailed where none comes, ProtocolMismatch at once."""
        deadline_s = time.monotonic() + timeout_s
        met = self._met.setdefault(peer, asyncio.Event())
        met.clear()
        tasks = [asyncio.create_task(way) for way in self._ways(peer, paths, timeout_s)]
        arrival = asyncio.create_task(met.wait())
        pending: set[asyncio.Task[Any]] = {arrival, *tasks}
        reasons: list[str] = []
        try:
            while time.monotonic() < deadline_s and arrival in pending:
                done, pending = await asyncio.wait(
                    pending, timeout=deadline_s - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
                )
                for task in done - {arrival}:
                    error = task.exception()
                    if error is None:
                        tasks.remove(task)
                        connection, road = task.result()
                        await self._dialler.add_streams(connection, road, deadline_s)
                        return
                    if isinstance(error, ProtocolMismatch):
                        raise error
                    reasons.append(str(error))
        finally:
            for task in (arrival, *tasks):
                task.cancel()
            await asyncio.gather(arrival, *tasks, return_exceptions=True)
            for task in tasks:
                if not task.cancelled() and task.exception() is None:
                    self._dialler.keep(*task.result())  # two ways at once: both serve
        if arrival in pending and not self._connected(peer):
            nobody = f"{peer} did not connect within {timeout_s:.3g} s; is its port reachable?"
            raise ConnectionFailed("; ".join([nobody, *reasons]))

    def _ways(self, peer: str, paths: Paths, timeout_s: float) -> list[Coroutine[Any, Any, Found]]:
        """What this end does, each in its time."""
        found, tunnel = [], self._tunnels.get(peer)
        if paths.addresses:
            after_s = 0.0 if paths.dial else TUNED.reversed_after_s
            found.append(self._later(after_s, peer, paths.addresses, timeout_s))
        if tunnel is not None and tunnel.dials:
            found.append(self._later(tunnel.after_s, peer, (tunnel,), timeout_s))
        elif tunnel is not None:
            self._answer_anew(peer, tunnel.after_s)
        return found

    async def _later(self, after_s: float, peer: str, roads: Sequence[Road], timeout_s: float) -> Found:
        await asyncio.sleep(after_s)
        return await self._dialler.first(peer, roads, timeout_s - after_s)

    def _answer_anew(self, peer: str, after_s: float) -> None:
        """Wait at the relay with the newest ticket: what waits there is perhaps as dead as what broke, and an
        older offer's time may be far."""
        waiting = self._duties.pop(("answer", peer), None)
        if waiting is not None:
            waiting.cancel()
        self._do("answer", peer, self._answer(peer, after_s))

    async def _answer(self, peer: str, after_s: float) -> None:
        """Accept what the peer dials through the tunnel, until it is joined without."""
        backoff = Backoff(TUNED.first_backoff_s, TUNED.max_backoff_s)
        await asyncio.sleep(after_s)
        while self._ends is not None:
            known, tunnel = self._dialler.known(peer), self._tunnels[peer]
            if tunnel.over or (known is not None and known.way not in (None, Way.RELAYED)):
                return
            try:
                self._ends.accepted(await tunnel.open())
                backoff.reset()
            except ConnectionFailed as error:
                log.debug("tunnel.failed", peer=peer, reason=str(error))
                await asyncio.sleep(backoff.next_s())

    # ---------------------------------------------------------------- staying joined

    def attached(self, peer: Peer) -> None:
        """The peer has one more connection."""
        if peer.name in self._met:
            self._met[peer.name].set()
        self._report(peer)

    def detached(self, peer: Peer, last: Connection) -> None:
        """It has one less. Our address may have changed: where none is left, the way is looked for anew."""
        self._report(peer)
        if peer.connections or last.leaving or peer.gone:
            return
        if time.monotonic() < peer.moving_until_s:
            self._do("find", peer.name, self._find(peer))
        if last.way is Way.REVERSED and self._addresses.get(peer.name):
            self._do("dial back", peer.name, self._dial_back(peer))
        if peer.relayed and ("answer", peer.name) in self._duties:
            self._answer_anew(peer.name, 0.0)

    async def _find(self, peer: Peer) -> None:
        """Try every way between ends of which one has moved, where none comes about by itself."""
        await asyncio.sleep(TUNED.reversed_after_s)
        if not peer.connections and not peer.gone:
            paths = Paths(self._addresses.get(peer.name, ()), dial=True)
            with suppress(AtollError):
                await self._try_all(peer.name, paths, self._dialler.config.move_s)

    async def _dial_back(self, peer: Peer) -> None:
        within_s = self._dialler.config.handshake_s
        deadline_s = time.monotonic() + within_s
        await asyncio.sleep(TUNED.dial_back_after_s)
        if not peer.connections and not peer.gone:
            with suppress(AtollError):
                found, road = await self._dialler.first(peer.name, self._addresses[peer.name], within_s)
                await self._dialler.add_streams(found, road, deadline_s)

    async def _upgrade(self, peer: Peer) -> None:
        """Dial a relayed peer now and then, until it is joined without the relay."""
        config = self._dialler.config
        pause_s = config.upgrade_s
        while True:
            await asyncio.sleep(pause_s)
            if peer.gone or self._dialler.known(peer.name) is not peer or not peer.relayed:
                return
            deadline_s = time.monotonic() + config.handshake_s
            with suppress(AtollError):
                addresses = self._addresses[peer.name]
                found, road = await self._dialler.first(peer.name, addresses, config.handshake_s)
                await self._dialler.add_streams(found, road, deadline_s)
                self._leave_relay(peer)
                return
            pause_s = min(2 * pause_s, config.upgrade_most_s)

    def _leave_relay(self, peer: Peer) -> None:
        """Close the connections through the tunnel; what they carried leaves over the others."""
        log.info("peer.direct_now", peer=peer.name)
        for connection in list(peer.connections):
            if connection.way is Way.RELAYED:
                connection.close("joined without the relay now", leaving=False)

    # ---------------------------------------------------------------- all the same

    def _connected(self, peer: str) -> bool:
        known = self._dialler.known(peer)
        return known is not None and bool(known.connections)

    def _do(self, what: str, peer: str, work: Coroutine[Any, Any, None]) -> None:
        """Do this for a peer, unless it is being done."""
        known = self._duties.get((what, peer))
        if known is not None and not known.done():
            work.close()
            return
        self._duties[what, peer] = self._dialler.spawn(work)

    def _report(self, peer: Peer) -> None:
        """Report how a peer is joined, where that has changed."""
        tunnel, way = self._tunnels.get(peer.name), peer.way
        relay = tunnel.name if way is Way.RELAYED and tunnel is not None else ""
        before = self._reported.pop(peer.name, None)
        if way is not None:
            self._reported[peer.name] = (way, relay)
        if before != self._reported.get(peer.name):
            self._joined(peer.name, way, relay)
