"""Joins two sockets: what one receives the other sends, both ways, until both have ended.

One buffer a direction is all the memory; a receiver that is slow stops the sender through TCP itself.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

CHUNK_BYTES = 128 << 10
KEEPALIVE_S, KEEPALIVE_PROBES = 10, 3

Allow = Callable[[int], Awaitable[None]]
"""Called with the bytes that were received, before they are sent: may wait, or raise to end the splice."""


class Idle(Exception):
    """No byte passed either way for too long."""


async def splice(
    one: socket.socket, other: socket.socket, allow: Allow | None = None, idle_s: float | None = None
) -> None:
    """Copy until both directions have ended, then close both sockets, which do not block.

    Raises Idle after ``idle_s`` without a byte, what ``allow`` raises, and OSError where one breaks.
    """
    passed = [0]
    tasks = [
        asyncio.ensure_future(work)
        for work in (_copy(one, other, allow, passed), _copy(other, one, allow, passed))
    ]
    watch = [] if idle_s is None else [asyncio.ensure_future(_watch(passed, idle_s))]
    pending: set[asyncio.Future[None]] = {*tasks, *watch}
    try:
        while not all(task.done() for task in tasks):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in (*tasks, *watch):
            task.cancel()
        try:
            await asyncio.gather(*tasks, *watch, return_exceptions=True)
        finally:  # also where we are cancelled once more meanwhile; none of them runs any more
            one.close()
            other.close()


async def accept(listener: socket.socket) -> tuple[socket.socket, Any]:
    """Return the next connection, which does not block, and its address. Raises OSError.

    A wait for ``loop.sock_accept`` that is cancelled just as a connection comes loses it, open.
    """
    while True:
        await _readable(listener)
        with suppress(BlockingIOError):
            connection, address = listener.accept()
            connection.setblocking(False)
            return connection, address


async def _readable(one: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(one, ready)
    try:
        await readable
    finally:
        loop.remove_reader(one)


async def _copy(source: socket.socket, target: socket.socket, allow: Allow | None, passed: list[int]) -> None:
    loop, buffer = asyncio.get_running_loop(), memoryview(bytearray(CHUNK_BYTES))
    while n_bytes := await loop.sock_recv_into(source, buffer):
        if allow is not None:
            await allow(n_bytes)
        await loop.sock_sendall(target, buffer[:n_bytes])
        passed[0] += n_bytes
        # Neither call gives way while the sockets are ready; others have a turn after every chunk.
        await asyncio.sleep(0)
    target.shutdown(socket.SHUT_WR)


async def _watch(passed: list[int], idle_s: float) -> None:
    while True:
        before = passed[0]
        await asyncio.sleep(idle_s)
        if passed[0] == before:
            raise Idle(f"no byte either way for {idle_s:g} s")


def tuned(connection: socket.socket) -> socket.socket:
    """The TCP connection, not blocking, without Nagle's delay, and asking by itself whether the other end is
    still there."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


async def received(connection: socket.socket, n_bytes: int) -> bytes:
    """Exactly so many bytes; fewer where the other end closed before."""
    loop, found = asyncio.get_running_loop(), b""
    while len(found) < n_bytes and (more := await loop.sock_recv(connection, n_bytes - len(found))):
        found += more
    return found
