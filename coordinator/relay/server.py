"""The relay: a listener that joins two connections with matching tickets and copies their bytes.

It never decrypts: through the splice run the links' own mutual TLS sessions, of which it has no key.
Whoever shows no ticket within seconds is cut off, and so are those that are too many.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from atoll.errors import AccessDenied, AtollError, BadFrame, UsageError
from coordinator.relay.book import Book, RelayLimits
from hostos.budget import REFUSALS, REFUSALS_PER_S, Budget
from hostos.net.networks import customer, open_listener
from hostos.net.splice import Idle, accept, received, splice, tuned
from protos.relay_tickets import (
    ANSWER_BYTES,
    CONFIRMED,
    JOINED,
    NONCE_BYTES,
    Ticket,
    admitted,
    greeting,
    refusal,
)

log = structlog.get_logger()
BACKLOG = 128
ACCEPT_AGAIN_S = 0.2  # after an accept that failed, as when descriptors have run out


@dataclass(eq=False, slots=True)
class _Guest:
    """A connection with a ticket. Of two that are joined the one that waited copies for both."""

    connection: socket.socket
    ticket: Ticket
    met: asyncio.Future[_Guest | None]  # the end that came; None: a newer connection takes this one's place
    over: asyncio.Future[bool]  # of the one that came: the copying has ended; False: it never began


class Relay:
    """One relay inside a running event loop: ``start``, then ``stop``."""

    def __init__(
        self, key: bytes, limits: RelayLimits | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """``clock``: Unix time, by which tickets end."""
        self.limits = limits or RelayLimits()
        self.book: Book[_Guest] = Book(self.limits)
        self._key, self._clock = key, clock
        self._strangers: dict[socket.socket, tuple[str, asyncio.Task[None]]] = {}  # the oldest first
        self._notes = Budget(REFUSALS, REFUSALS_PER_S)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. UsageError when it cannot be had."""
        try:
            self._listener = open_listener(host, port, BACKLOG)
        except OSError as error:
            raise UsageError(
                f"cannot relay on {host}:{port}: {error.strerror}; choose another port"
            ) from None
        self._listener.setblocking(False)
        self._spawn(self._accept(self._listener))
        return int(self._listener.getsockname()[1])

    async def stop(self) -> None:
        """Break every connection off, and stop listening."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = await accept(listener)
            except OSError as error:
                self._note("relay.accept_failed", reason=str(error))
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            host = customer(str(address[0]))
            if not self._room_for(host):
                self.book.refused["strangers"] += 1
                connection.close()
                continue
            task = self._spawn(self._serve(connection, host))
            self._strangers[connection] = host, task
            # A task that is cancelled before its first step closes nothing itself.
            task.add_done_callback(partial(self._over, connection))

    def _room_for(self, host: str) -> bool:
        """Room for one more without a ticket; where all are here already, the oldest of the address with the
        most of them makes it: who has a ticket shows it within a round trip."""
        of_each = Counter(other for other, _ in self._strangers.values())
        if of_each[host] >= self.limits.strangers_per_address:
            return False
        if len(self._strangers) < self.limits.strangers:
            return True
        crowded = max(of_each, key=lambda other: of_each[other])
        oldest = next(one for one, (other, _) in self._strangers.items() if other == crowded)
        self._strangers.pop(oldest)[1].cancel()
        self.book.refused["strangers"] += 1
        return True

    def _over(self, connection: socket.socket, _: object) -> None:
        self._strangers.pop(connection, None)
        connection.close()

    def _note(self, event: str, **fields: str) -> None:
        if self._notes.take(self._clock()):
            log.warning(event, **fields, left_out_before=self._notes.refused() or None)

    async def _serve(self, connection: socket.socket, host: str) -> None:
        """A connection's life; never raises."""
        try:
            tuned(connection)
            async with asyncio.timeout(self.limits.greet_within_s):
                ticket = await self._admit(connection)
            self._strangers.pop(connection, None)
            self.book.enter(ticket, self._clock())
            try:
                await self._join(connection, ticket)
            finally:
                self.book.leave(ticket)
        except AtollError as error:
            self._note("relay.refused", host=host, reason=str(error))
            with suppress(OSError):  # closed already, where its bytes were used up while it was joined
                connection.send(refusal(str(error)))
        except (OSError, TimeoutError):
            pass  # it left, or said nothing
        finally:
            connection.close()

    async def _admit(self, connection: socket.socket) -> Ticket:
        nonce = secrets.token_bytes(NONCE_BYTES)
        await asyncio.get_running_loop().sock_sendall(connection, greeting(nonce))
        try:
            said = await received(connection, ANSWER_BYTES)
            if len(said) < ANSWER_BYTES:
                raise OSError("closed before it showed a ticket")
            return admitted(self._key, said, nonce, self._clock())
        except (AccessDenied, BadFrame):
            self.book.refused["ticket"] += 1
            raise

    async def _join(self, connection: socket.socket, ticket: Ticket) -> None:
        """Join the end that waits, or wait for it; who dials has another try where that was dead."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + (self.limits.dialler_waits_s if ticket.dials else math.inf)
        over = False
        while not over:
            guest = _Guest(connection, ticket, loop.create_future(), loop.create_future())
            partner, late = self.book.meet(guest, ticket)
            for one in late:
                one.met.set_result(None)
            if partner is None:
                over = await self._wait(guest, until_s - loop.time())
            else:
                partner.met.set_result(guest)
                over = await guest.over
            over = over or not ticket.dials

    async def _wait(self, guest: _Guest, within_s: float) -> bool:
        """Until the other end comes, then copy until both have ended; False: the end that waits was dead."""
        within_s = min(within_s, max(0.0, guest.ticket.expires_s - self._clock()))
        # Who waits has nothing to say: its next byte is its end, or a breach.
        early = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(guest.connection, 1))
        either: set[asyncio.Future[Any]] = {early, guest.met}
        try:
            await asyncio.wait(either, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.book.give_up(guest, guest.ticket)
            early.cancel()
            await asyncio.gather(early, return_exceptions=True)
        if not guest.met.done():
            if early.cancelled():
                raise AccessDenied("the other end did not come in time")
            raise OSError("closed while it waited")
        came = guest.met.result()
        if came is None:
            raise AccessDenied("a newer connection of the same end has taken this one's place")
        joined = False
        try:
            if early.cancelled() and await self._confirmed(came if guest.ticket.dials else guest):
                joined = True
                await self._splice(guest, came)
        finally:
            came.over.set_result(joined)
        return joined

    async def _confirmed(self, waits: _Guest) -> bool:
        """Ask the end that waited whether it is still there: its address may have changed meanwhile."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.limits.confirm_within_s):
                await loop.sock_sendall(waits.connection, JOINED)
                return await loop.sock_recv(waits.connection, 1) == CONFIRMED
        except (OSError, TimeoutError):
            return False

    async def _splice(self, one: _Guest, other: _Guest) -> None:
        loop, tickets = asyncio.get_running_loop(), (one.ticket, other.ticket)
        self.book.joined_pairs += 1

        async def allow(n_bytes: int) -> None:
            wait_s = self.book.charge(tickets, n_bytes, self._clock())
            if wait_s > 0.0:
                await asyncio.sleep(wait_s)

        dials = one if one.ticket.dials else other
        await loop.sock_sendall(dials.connection, JOINED)
        with suppress(Idle):
            await splice(one.connection, other.connection, allow, self.limits.idle_s)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
