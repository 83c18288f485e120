"""Names that workers state as their address, looked up once: what they mean later cannot change it."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from coordinator.membership.addresses import ANYWHERE, literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.messages.instructions import Addresses

MAX_NAMES = 4  # of one worker
MAX_ADDRESSES = 4  # of one name
WITHIN_S = 5.0
# Not the loop's own threads: whoever states names that nobody answers for must not hold those up.
_threads = ThreadPoolExecutor(2, "resolve")


def look_up(name: str) -> Sequence[str]:
    """The addresses of a name, IPv4 first, since fewer machines reach the others; none when it has none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return [str(info[4][0]) for info in sorted(found, key=lambda info: info[0] != socket.AF_INET)]


async def resolved(stated: Addresses, look_up: Callable[[str], Sequence[str]] = look_up) -> Addresses:
    """``stated`` with every name replaced by its addresses; names without any are left out."""
    names = [host for host, _ in stated if host not in ANYWHERE and literal(host) is None]
    wanted = list(dict.fromkeys(names))[:MAX_NAMES]
    loop = asyncio.get_running_loop()
    pending = {name: loop.run_in_executor(_threads, look_up, name) for name in wanted}
    if pending:
        await asyncio.wait(pending.values(), timeout=WITHIN_S)
    found: list[tuple[str, int]] = []
    for host, port in stated:
        if host not in names:
            found.append((host, port))
        elif host in pending and pending[host].done():
            found += [(address, port) for address in pending[host].result()[:MAX_ADDRESSES]]
    for name in pending.values():
        name.cancel()
    return tuple(found)
