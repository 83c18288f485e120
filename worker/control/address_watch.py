"""Noticing that this machine has another address: everything that is open then falls silent at both ends,
and nobody says so."""

from __future__ import annotations

import socket
from collections.abc import Callable

import structlog

from worker.machine.device import own_address

log = structlog.get_logger()

LOOK_EVERY_S = 0.2


def watch_address(
    host: str,
    port: int,
    moved: Callable[[], None],
    stopped: Callable[[float], bool],
    look: Callable[[str, int], str | None] = own_address,
) -> None:
    """Thread: look at this machine's address on the way to ``host``; call ``moved`` where there is another.
    ``stopped(seconds)`` waits, and returns True at the end."""
    toward = _numeric(host, port)
    known = look(toward, port)
    while not stopped(LOOK_EVERY_S):
        found = look(toward, port)
        if found is None or found == known:  # none: there is no way out at all for now
            continue
        if known is not None:
            log.warning("worker.moved", before=known, now=found)
            moved()
        known, toward = found, _numeric(host, port)


def _numeric(host: str, port: int) -> str:
    """An address of ``host``, looked up once: name servers are not asked five times a second."""
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError:
        return host
