"""Splices and accepting for them: nothing is left open, whenever they end."""

from __future__ import annotations

import asyncio
import gc
import socket

import pytest

from hostos.net.splice import accept, splice


@pytest.mark.parametrize("turns", range(5))
def test_a_wait_that_is_cancelled_just_as_a_connection_comes_leaves_none_open(
    turns: int, recwarn: pytest.WarningsRecorder
) -> None:
    """A turn of the loop earlier or later it has come, or not."""

    async def cancelled(listener: socket.socket) -> None:
        waiting = asyncio.ensure_future(accept(listener))
        await asyncio.sleep(0)
        with socket.create_connection(listener.getsockname()):
            for _ in range(turns):
                await asyncio.sleep(0)
            if not waiting.cancel():
                waiting.result()[0].close()
            await asyncio.gather(waiting, return_exceptions=True)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        asyncio.run(cancelled(listener))
        gc.collect()
    assert [str(warned.message) for warned in recwarn if warned.category is ResourceWarning] == []


def test_connections_come_in_turn_and_do_not_block() -> None:
    async def two(listener: socket.socket) -> list[bytes]:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        found = []
        for number, client in enumerate(clients):
            connection, address = await accept(listener)
            assert address == client.getsockname()
            assert not connection.getblocking()
            client.sendall(bytes([number]))
            found.append(await asyncio.get_running_loop().sock_recv(connection, 1))
            connection.close()
            client.close()
        return found

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        assert asyncio.run(two(listener)) == [b"\0", b"\1"]


@pytest.mark.parametrize("turns", range(5))
def test_a_splice_that_is_cancelled_while_it_ends_closes_both(turns: int) -> None:
    """Of the stream that ends, and of whoever closes down at that moment."""

    async def cancelled(one: socket.socket, other: socket.socket) -> None:
        spliced = asyncio.ensure_future(splice(one, other))
        await asyncio.sleep(0)
        spliced.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        spliced.cancel()
        await asyncio.gather(spliced, return_exceptions=True)

    pairs = [socket.socketpair() for _ in range(2)]
    for ends in pairs:
        for end in ends:
            end.setblocking(False)
    one, other = pairs[0][0], pairs[1][0]
    asyncio.run(cancelled(one, other))
    assert (one.fileno(), other.fileno()) == (-1, -1)
    for ends in pairs:
        ends[1].close()
