"""Connections of one address to the coordinator's ports, bounded, though gRPC for Python does not show them.

They are this process's own sockets, so they are looked at where the system lists them: now and then those of
each address are counted, and of an address that has too many the newest are shut down, which gRPC takes for
the other side's end. A copy of the descriptor keeps another connection from taking its number meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from protos.telemetry import Event
from protos.text_limits import Budget

LOOK_EVERY_S = 1.0
PAUSE = 50.0  # times what a look takes, at the least
NOTES, NOTES_PER_S = 20, 0.1
LISTED_IN = (Path("/proc/self/fd"), Path("/dev/fd"))  # Linux, macOS

log = structlog.get_logger()

_Ends = tuple[int, str, int]  # own port, the other side's address and port


class ConnectionBound:
    """At most so many connections an address to each port; ``most`` by port. IPv6 counts by /64."""

    def __init__(
        self, most: Mapping[int, int], clock: Callable[[], float], *, nearby_too: bool = False
    ) -> None:
        """``nearby_too``: bound what comes from this machine as well."""
        self._most, self._nearby_too, self._clock = dict(most), nearby_too, clock
        self._seen: dict[_Ends, int] = {}  # in the order in which they were first seen
        self._looks = 0
        self._notes = Budget(NOTES, NOTES_PER_S)

    async def keep(self) -> None:
        """Look now and then, for ever; with thousands of connections less often, as a look takes longer."""
        while True:
            begun_s = time.perf_counter()
            await asyncio.to_thread(self.look)
            await asyncio.sleep(max(LOOK_EVERY_S, PAUSE * (time.perf_counter() - begun_s)))

    def look(self) -> int:
        """Shut down what is too many; returns how many that were."""
        self._looks += 1
        open_now = {ends: number for number, ends in self._connections()}
        self._seen = {ends: since for ends, since in self._seen.items() if ends in open_now}
        for ends in open_now:
            self._seen.setdefault(ends, self._looks)
        places = defaultdict(list)
        for ends in self._seen:
            if place := self._place(ends[1]):
                places[ends[0], place].append(ends)
        ended = 0
        for (port, place), found in places.items():
            if excess := found[self._most[port] :]:
                ended += sum(_shut_down(open_now[ends], ends) for ends in excess)
                self._note(port, place, len(found))
        return ended

    def _connections(self) -> Iterator[tuple[int, _Ends]]:
        """Open connections to the bounded ports, by the number of their descriptor."""
        listed = next((path for path in LISTED_IN if path.is_dir()), None)
        for name in os.listdir(listed) if listed is not None else ():
            with suppress(OSError), _copy(int(name)) as found:
                if (ends := _ends(found)) is not None and ends[0] in self._most:
                    yield int(name), ends

    def _place(self, host: str) -> str:
        """What a connection is counted by, "" where it is not."""
        address = ipaddress.ip_address(host.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address):
            mapped = address.ipv4_mapped
            if mapped is None and not address.is_loopback:
                return str(ipaddress.ip_network((address, 64), strict=False))
            address = mapped or address
        return str(address) if self._nearby_too or not address.is_loopback else ""

    def _note(self, port: int, place: str, found: int) -> None:
        if self._notes.take(self._clock()):
            more = {"left_out_before": left_out} if (left_out := self._notes.refused()) else {}
            log.warning(
                Event.CONNECTIONS_ENDED.value,
                peer=place,
                port=port,
                found=found,
                most=self._most[port],
                **more,
            )


def _shut_down(number: int, ends: _Ends) -> bool:
    with suppress(OSError), _copy(number) as found:
        if _ends(found) == ends:  # else its number has gone to another one
            found.shutdown(socket.SHUT_RDWR)
            return True
    return False


@contextmanager
def _copy(number: int) -> Iterator[socket.socket]:
    """A copy of the descriptor as a socket. Raises OSError where it is none.

    A file's is never copied: closing the copy would drop every lock of this process on that file, such as
    SQLite's on the journal.
    """
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    copied = os.dup(number)
    try:
        found = socket.socket(fileno=copied)
    except BaseException:
        os.close(copied)
        raise
    with found:
        yield found


def _ends(found: socket.socket) -> _Ends | None:
    """The connection's ends; None for a socket of another kind. OSError where it is not connected."""
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
        return None
    host, port = found.getpeername()[:2]
    return found.getsockname()[1], str(host), port
