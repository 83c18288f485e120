"""The relay over loopback: what it joins, what it refuses, and what hostile connections cost it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from random import Random

import pytest

from coordinator.relay.book import RelayLimits
from coordinator.relay.server import Relay
from hostos.net.splice import received
from protos import relay_tickets as tickets
from protos.relay_tickets import CONFIRMED, JOINED, REFUSED, Ticket
from tests.patience import HUNG_S

OPENED: list[socket.socket] = []
KEY = tickets.new_key()
DIALS = Ticket(b"p" * 16, b"dials..1", True, int(time.time()) + 3600, 1 << 40, 32)
WAITS = replace(DIALS, serial=b"waits..1", dials=False)


@asynccontextmanager
async def relayed(limits: RelayLimits | None = None) -> AsyncIterator[tuple[Relay, int]]:
    relay = Relay(KEY, limits)
    port = await relay.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(HUNG_S):
            yield relay, port
    finally:
        await relay.stop()
        while OPENED:
            OPENED.pop().close()


async def come(port: int, source: str = "") -> socket.socket:
    connection = socket.socket()
    if source:
        connection.bind((source, 0))
    OPENED.append(connection)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return connection


async def enter(port: int, ticket: Ticket, key: bytes = KEY) -> socket.socket:
    connection = await come(port)
    nonce = tickets.nonce_of(await received(connection, tickets.GREETING_BYTES))
    sealed = tickets.seal(key, ticket)
    await say(connection, tickets.answer(sealed, tickets.ticket_key(key, sealed), nonce))
    return connection


async def say(connection: socket.socket, content: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, content)


async def last_word(connection: socket.socket) -> bytes:
    """All that comes until the relay closes; b"" where it resets the connection."""
    try:
        return await received(connection, 1 << 16)
    except OSError:
        return b""


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


async def joined(port: int) -> tuple[socket.socket, socket.socket]:
    waits = await enter(port, WAITS)
    dials = await enter(port, DIALS)
    await meet(dials, waits)
    return dials, waits


async def meet(dials: socket.socket, waits: socket.socket) -> None:
    """Do what both ends do once the relay has them."""
    assert await received(waits, 1) == JOINED
    await say(waits, CONFIRMED)
    assert await received(dials, 1) == JOINED


@pytest.mark.parametrize("first", [DIALS, WAITS], ids=["dialler first", "dialler last"])
async def test_two_ends_are_joined_whoever_comes_first_and_every_byte_passes(first: Ticket) -> None:
    async with relayed() as (relay, port):
        one = await enter(port, first)
        await until(lambda: relay.book.waiting == 1)
        other = await enter(port, WAITS if first is DIALS else DIALS)
        await (meet(one, other) if first is DIALS else meet(other, one))
        rng = Random(4711)
        there, back = rng.randbytes(3 << 20), rng.randbytes(2 << 20)
        _, _, got, got_back = await asyncio.gather(
            say(one, there), say(other, back), received(other, len(there)), received(one, len(back))
        )
        assert (got, got_back) == (there, back)
        one.shutdown(socket.SHUT_WR)
        assert await received(other, 1) == b""
        await say(other, b"still")  # the other direction goes on
        assert await received(one, 5) == b"still"
        other.close()
        assert await received(one, 1) == b""
        await until(lambda: relay.book.connections == 0)
        assert relay.book.joined_bytes == len(there) + len(back) + 5


async def test_a_wrong_and_an_ended_ticket_are_refused_with_the_reason() -> None:
    async with relayed() as (relay, port):
        for ticket, key, why in (
            (DIALS, bytes(32), b"forged"),
            (replace(DIALS, expires_s=1), KEY, b"ended"),
        ):
            word = await last_word(await enter(port, ticket, key))
            assert word.startswith(REFUSED)
            assert why in word
        assert relay.book.refused["ticket"] == 2
        assert relay.book.connections == 0


async def test_an_answer_replayed_on_another_connection_is_refused() -> None:
    async with relayed() as (relay, port):
        first = await come(port)
        nonce = tickets.nonce_of(await received(first, tickets.GREETING_BYTES))
        sealed = tickets.seal(KEY, DIALS)
        overheard = tickets.answer(sealed, tickets.ticket_key(KEY, sealed), nonce)
        await say(first, overheard)
        await until(lambda: relay.book.waiting == 1)
        thief = await come(port)
        await received(thief, tickets.GREETING_BYTES)
        await say(thief, overheard)
        assert b"somebody else's" in await last_word(thief)
        assert relay.book.waiting == 1


async def test_who_sends_before_it_is_joined_is_cut_off_and_disturbs_nobody() -> None:
    async with relayed() as (relay, port):
        hasty = await enter(port, WAITS)
        await say(hasty, b"too early")
        assert await last_word(hasty) == b""
        await until(lambda: relay.book.waiting == 0)
        await joined(port)


async def test_one_that_left_while_it_waited_is_not_joined_to() -> None:
    async with relayed() as (relay, port):
        gone = await enter(port, WAITS)
        await until(lambda: relay.book.waiting == 1)
        gone.close()
        await until(lambda: relay.book.waiting == 0)
        await joined(port)


async def test_one_that_waits_and_is_dead_without_a_word_costs_its_dialler_a_moment_alone() -> None:
    async with relayed(RelayLimits(confirm_within_s=0.1)) as (relay, port):
        alive = await enter(port, WAITS)
        await until(lambda: relay.book.waiting == 1)
        dead = await enter(port, WAITS)  # its address has changed: it answers nothing any more
        await until(lambda: relay.book.waiting == 2)
        dials = await enter(port, DIALS)
        await meet(dials, alive)
        assert await received(dead, 1) == JOINED
        assert await last_word(dead) == b""
        await until(lambda: relay.book.connections == 2)


async def test_a_dialler_waits_so_long_and_no_longer() -> None:
    async with relayed(RelayLimits(dialler_waits_s=0.1)) as (relay, port):
        assert b"did not come" in await last_word(await enter(port, DIALS))
        await until(lambda: relay.book.connections == 0)


async def test_a_byte_at_a_time_wins_no_more_time_than_silence() -> None:
    async def drip_into(connection: socket.socket) -> None:
        while True:
            await say(connection, b"x")
            await asyncio.sleep(0.02)

    async with relayed(RelayLimits(greet_within_s=0.3)) as (relay, port):
        silent, slow = await come(port), await come(port)
        drip = asyncio.ensure_future(drip_into(slow))
        for connection in (silent, slow):
            assert len(await last_word(connection)) <= tickets.GREETING_BYTES
        drip.cancel()
        assert not relay._strangers


async def test_a_flood_of_strangers_is_bounded_and_those_with_tickets_pass() -> None:
    async with relayed(RelayLimits(strangers_per_address=8)) as (relay, port):
        flood = [await come(port) for _ in range(200)]
        await until(lambda: relay.book.refused["strangers"] == 192)
        assert len(relay._strangers) == 8
        assert len(relay._tasks) <= 9
        for connection in flood:
            connection.close()
        await until(lambda: not relay._strangers)
        await joined(port)


async def test_strangers_of_many_addresses_who_hold_every_place_keep_nobody_with_a_ticket_out() -> None:
    async with relayed(RelayLimits(strangers=8, strangers_per_address=4, greet_within_s=HUNG_S)) as (
        relay,
        port,
    ):
        silent = [await come(port, f"127.0.0.{2 + number % 3}") for number in range(9)]
        await until(lambda: len(relay._strangers) == 8)
        await joined(port)
        assert len(relay._strangers) == 7
        assert all(connection.fileno() >= 0 for connection in silent)


def test_a_relay_takes_no_more_connections_than_its_process_may_hold() -> None:
    limits = RelayLimits().within(40)
    assert (limits.connections, limits.strangers, limits.strangers_per_address) == (30, 10, 5)
    assert RelayLimits().within(10_000) == RelayLimits()
    assert RelayLimits().within(0).strangers == 1


async def test_a_ticket_is_cut_off_at_its_bytes_and_no_byte_more_passes() -> None:
    small = {"max_bytes": 1 << 20}

    async with relayed() as (relay, port):
        waits = await enter(port, replace(WAITS, **small))
        dials = await enter(port, replace(DIALS, **small))
        await meet(dials, waits)

        async def push() -> None:
            while True:
                await say(dials, bytes(1 << 16))

        pushing = asyncio.ensure_future(push())
        got = 0
        with suppress(OSError):
            while more := await asyncio.get_running_loop().sock_recv(waits, 1 << 20):
                got += len(more)
        assert 0 < got <= 1 << 20
        assert relay.book.joined_bytes <= 1 << 20
        with suppress(OSError):
            await pushing
        again = await enter(port, replace(DIALS, **small))
        if relay.book.joined_bytes == 1 << 20:
            assert b"used up" in await last_word(again)


async def test_a_receiver_that_reads_nothing_stops_its_sender_and_is_cut_off_when_idle() -> None:
    async with relayed(RelayLimits(idle_s=0.3)) as (relay, port):
        dials, _ = await joined(port)
        with suppress(OSError):
            while True:
                await say(dials, bytes(1 << 20))
        assert relay.book.joined_bytes < 100 << 20  # what the kernel's buffers took
        await until(lambda: relay.book.connections == 0)


async def test_a_rate_is_held() -> None:
    async with relayed(RelayLimits(rate_bytes_per_s=2 << 20, burst_s=0.05)) as (_, port):
        dials, waits = await joined(port)
        begun_s = time.monotonic()
        await asyncio.gather(say(dials, bytes(1 << 20)), received(waits, 1 << 20))
        # The bound is the relay's own clock, so that a slow machine cannot break it.
        assert time.monotonic() - begun_s >= 0.4


async def test_stopping_breaks_every_connection_and_frees_the_port() -> None:
    async with relayed() as (relay, port):
        dials, _ = await joined(port)
        waits = await enter(port, replace(WAITS, pair=b"q" * 16))
        await relay.stop()
        assert await last_word(dials) == b""
        assert await last_word(waits) == b""
        assert not relay._tasks
        again = Relay(KEY)
        assert await again.start("127.0.0.1", port) == port
        await again.stop()
