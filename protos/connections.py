"""Connections to this process's ports, bounded, though gRPC for Python does not show them.

They are this process's own sockets, so they are looked at where the system lists them. Now and then those of
each address are counted, and of an address that has too many the newest are shut down, which gRPC takes for
the other side's end. So are those of all addresses together whose callers have not shown yet that they may
call, beyond a bound and after a while. A copy of the descriptor keeps another connection from taking its
number meanwhile.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from hostos.budget import Budget
from hostos.descriptors import numbers_in_use
from hostos.net.networks import customer, unmapped
from protos.telemetry import Event

LOOK_EVERY_S, LOOK_SOON_S = 1.0, 0.05  # soon: while connections have to be ended
PAUSE, SHORT_PAUSE = 50.0, 3.0  # times what a look takes, at the least
NOTES, NOTES_PER_S = 20, 0.1

log = structlog.get_logger()

_Ends = tuple[int, str, int]  # own port, the other side's address and port


class Known:
    """Callers of one port that have shown that they may call, by their connection."""

    def __init__(self) -> None:
        self._ends: set[tuple[str, int]] = set()

    def add(self, peer: str) -> None:
        """Note the connection of a call; ``peer``: as gRPC names it, such as ``ipv4:198.51.100.7:4711``."""
        if (ends := ends_in(peer)) is not None:
            self._ends.add(ends)

    def __contains__(self, ends: tuple[str, int]) -> bool:
        return ends in self._ends

    def noted(self) -> frozenset[tuple[str, int]]:
        """All of them now."""
        return frozenset(self._ends.copy())

    def forget(self, ends: frozenset[tuple[str, int]]) -> None:
        """These have gone."""
        self._ends -= ends


@dataclass(frozen=True, slots=True)
class PortBound:
    """Connections that a port may hold."""

    of_an_address: int  # IPv6 counts by /64
    unknown: int  # of all addresses, whose callers have not shown yet that they may call
    unknown_s: float  # and so long each
    known: Known = field(default_factory=Known)


class ConnectionBound:
    """Holds the ports of this process to their bounds."""

    def __init__(
        self, ports: Mapping[int, PortBound], clock: Callable[[], float], *, nearby_too: bool = False
    ) -> None:
        """``nearby_too``: bound what comes from one address of this machine as well; strangers' connections
        are bounded wherever they come from."""
        self._ports, self._nearby_too, self._clock = dict(ports), nearby_too, clock
        self._seen: dict[_Ends, float] = {}  # since when, in the order in which they were first seen
        self._ending: set[_Ends] = set()  # shut down, and not closed yet
        self._notes = Budget(NOTES, NOTES_PER_S)

    async def keep(self) -> None:
        """Look now and then, for ever; with thousands of connections less often, as a look takes longer."""
        while True:
            begun_s, ended = time.perf_counter(), 0
            # Without a descriptor to spare the next look may have one; nothing here may end the process.
            with suppress(OSError):
                ended = await asyncio.to_thread(self.look)
            every_s, pause = (LOOK_SOON_S, SHORT_PAUSE) if ended else (LOOK_EVERY_S, PAUSE)
            await asyncio.sleep(max(every_s, pause * (time.perf_counter() - begun_s)))

    def look(self) -> int:
        """Shut down what is too many or too old; returns how many that were."""
        now_s = self._clock()
        before = {port: bound.known.noted() for port, bound in self._ports.items()}
        open_now = {ends: number for number, ends in self._connections()}
        self._seen = {
            ends: since_s
            for ends, since_s in self._seen.items()
            if ends in open_now and ends not in self._ending
        }
        self._ending &= open_now.keys()
        for ends in open_now:
            if ends not in self._ending:
                self._seen.setdefault(ends, now_s)
        for port, noted in before.items():
            gone = frozenset(ends for ends in noted if (port, *ends) not in open_now)
            self._ports[port].known.forget(gone)
        ended = 0
        for port in self._ports:
            for reason, found in (
                *(("too many of one address", few) for few in self._beyond_of_an_address(port)),
                ("no right to call was shown in time", self._strangers_beyond(port, now_s)),
            ):
                if shut := [ends for ends in found if _shut_down(open_now[ends], ends)]:
                    self._note(port, reason, shut)
                    ended += len(shut)
                    self._ending.update(shut)
        return ended

    def _beyond_of_an_address(self, port: int) -> Iterator[list[_Ends]]:
        places = defaultdict[str, list[_Ends]](list)
        for ends in self._seen:
            if ends[0] == port and (place := self._place(ends[1])):
                places[place].append(ends)
        for found in places.values():
            yield found[self._ports[port].of_an_address :]

    def _strangers_beyond(self, port: int, now_s: float) -> list[_Ends]:
        """The too old, and of the address with the most the oldest: who means it calls within moments."""
        bound = self._ports[port]
        strangers = {
            ends: since_s
            for ends, since_s in self._seen.items()
            if ends[0] == port and ends[1:] not in bound.known
        }
        found = [ends for ends, since_s in strangers.items() if now_s - since_s > bound.unknown_s]
        places = defaultdict[str, deque[_Ends]](deque)  # the oldest first
        for ends, since_s in strangers.items():
            if now_s - since_s <= bound.unknown_s:
                places[customer(ends[1])].append(ends)
        excess = len(strangers) - len(found) - bound.unknown
        while excess > 0:
            most, next_most = ([*sorted(map(len, places.values()), reverse=True), 0])[:2]
            for place in [place for place, ends in places.items() if len(ends) == most]:
                for _ in range(min(excess, max(1, most - next_most))):
                    found.append(places[place].popleft())
                    excess -= 1
        return found

    def _connections(self) -> Iterator[tuple[int, _Ends]]:
        """Open connections to the bounded ports, by the number of their descriptor."""
        for number in numbers_in_use():
            with suppress(OSError):
                if (ends := _ends(number)) is not None and ends[0] in self._ports:
                    yield number, ends

    def _place(self, host: str) -> str:
        """What the connections of an address are counted by, "" where they are not."""
        near = ipaddress.ip_address(host.partition("%")[0]).is_loopback
        return "" if near and not self._nearby_too else customer(host)

    def _note(self, port: int, reason: str, ended: list[_Ends]) -> None:
        if self._notes.take(self._clock()):
            more = {"left_out_before": left_out} if (left_out := self._notes.refused()) else {}
            log.warning(
                Event.CONNECTIONS_ENDED.value,
                peer=customer(ended[0][1]),
                port=port,
                ended=len(ended),
                reason=reason,
                **more,
            )


def ends_in(peer: str) -> tuple[str, int] | None:
    """Address and port of a caller as gRPC names it; None where it has none."""
    kind, _, rest = peer.partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return unmapped(host.replace("%5B", "").replace("%5D", "").replace("%25", "%").strip("[]")), int(port)


def _shut_down(number: int, ends: _Ends) -> bool:
    with suppress(OSError):
        if _ends(number) != ends:
            return False
        copied = os.dup(number)
        try:
            if _ends(copied) == ends:  # else its number has just gone to another one
                with socket.socket(fileno=copied) as found:
                    copied = -1
                    found.shutdown(socket.SHUT_RDWR)
                    return True
        finally:
            if copied >= 0:
                os.close(copied)
    return False


def _ends(number: int) -> _Ends | None:
    """The ends of the connection behind a descriptor; None for a socket of another kind. OSError where it is
    no socket, or not connected. Takes no descriptor, and closes none: closing one of a file would drop every
    lock of this process on it, such as SQLite's on the journal."""
    found = socket.socket(fileno=number)
    try:
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
            return None
        host, port = found.getpeername()[:2]
        return found.getsockname()[1], unmapped(str(host)), port
    finally:
        found.detach()
