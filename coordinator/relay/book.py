"""Who waits at a relay, who may be joined, and what is left of every bound. Pure: times come in as arguments.

Of both ends of a pair the one that dials is joined with the newest connection that waits for it: where the
other end's address has changed, its older ones are dead without anybody having noticed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import inf
from typing import Generic, TypeVar

from atoll.errors import AccessDenied
from hostos.units import DAY_S
from protos.relay_tickets import Ticket

T = TypeVar("T")
CAUSES = ("ticket", "strangers", "full", "connections", "bytes", "day")
"""Why a relay refuses somebody."""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Bounds of one relay."""

    connections: int = 2048  # with a ticket, waiting or joined
    strangers: int = 256  # that have not shown a ticket yet
    strangers_per_address: int = 32
    waiting: int = 16  # of one end of one pair; a newer one replaces the oldest
    tickets: int = 65_536  # known at once
    greet_within_s: float = 5.0  # from a connection to its ticket
    dialler_waits_s: float = 10.0  # for the other end
    confirm_within_s: float = 1.5  # from word that the other end is there to the answer
    idle_s: float = 60.0  # without a byte either way; workers ping every 15 s
    rate_bytes_per_s: float = inf
    burst_s: float = 0.25  # of that rate, at once
    day_bytes: float = inf  # in any 24 hours from the first byte on

    def within(self, descriptors: int) -> RelayLimits:
        """These where all connections together may be so many; a quarter of them without a ticket."""
        strangers = max(1, min(self.strangers, descriptors // 4))
        return replace(
            self,
            connections=max(1, min(self.connections, descriptors - strangers)),
            strangers=strangers,
            strangers_per_address=max(1, min(self.strangers_per_address, strangers // 2)),
        )


@dataclass(slots=True)
class _Account:
    """What one ticket has used."""

    expires_s: float
    n_bytes: int = 0
    connections: int = 0


@dataclass
class Book(Generic[T]):
    """Accounts of tickets, and connections (of type T) that wait for the other end."""

    limits: RelayLimits
    joined_bytes: int = 0  # of all time
    joined_pairs: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by cause
    connections: int = 0
    _accounts: dict[bytes, _Account] = field(default_factory=dict)
    _waiting: dict[tuple[bytes, bool], list[T]] = field(default_factory=dict)
    _day_from_s: float = -inf
    _day_bytes: int = 0
    _ready_s: float = -inf  # when the rate has room for the next byte

    def enter(self, ticket: Ticket, now_s: float) -> None:
        """A connection has shown its ticket. AccessDenied when a bound is reached."""
        self._forget(now_s)
        account = self._accounts.get(ticket.serial)
        if self.connections >= self.limits.connections:
            self._refuse("full", f"this relay has its {self.limits.connections} connections")
        if account is None and len(self._accounts) >= self.limits.tickets:
            self._refuse("full", f"this relay knows its {self.limits.tickets} tickets")
        if account is not None and account.connections >= ticket.max_connections:
            self._refuse("connections", f"this ticket has its {ticket.max_connections} connections")
        if account is not None and account.n_bytes >= ticket.max_bytes:
            self._refuse("bytes", f"this ticket's {ticket.max_bytes} bytes are used up")
        self._check_day(now_s)
        account = self._accounts.setdefault(ticket.serial, _Account(ticket.expires_s))
        account.connections += 1
        self.connections += 1

    def leave(self, ticket: Ticket) -> None:
        """One of those has ended."""
        account = self._accounts.get(ticket.serial)
        self.connections -= 1
        if account is not None:
            account.connections -= 1

    def meet(self, who: T, ticket: Ticket) -> tuple[T | None, list[T]]:
        """The waiting connection to join with this one, which else waits; and those that are to go for it."""
        others = self._waiting.get((ticket.pair, not ticket.dials), [])
        if others:
            found = others.pop(-1 if ticket.dials else 0)
            self._tidy(ticket.pair, not ticket.dials)
            return found, []
        mine = self._waiting.setdefault((ticket.pair, ticket.dials), [])
        mine.append(who)
        late, mine[:] = mine[: -self.limits.waiting], mine[-self.limits.waiting :]
        return None, late

    def give_up(self, who: T, ticket: Ticket) -> None:
        """This one waits no longer, if it still did."""
        mine = self._waiting.get((ticket.pair, ticket.dials), [])
        mine[:] = [other for other in mine if other is not who]
        self._tidy(ticket.pair, ticket.dials)

    @property
    def waiting(self) -> int:
        """Connections that wait for the other end."""
        return sum(map(len, self._waiting.values()))

    def charge(self, tickets: tuple[Ticket, Ticket], n_bytes: int, now_s: float) -> float:
        """Count bytes that are to pass between the holders of two tickets; returns the seconds to wait first.

        AccessDenied, with nothing counted, when they are more than either ticket or the day has left.
        """
        self._check_day(now_s, n_bytes)
        accounts = []
        for ticket in tickets:
            # One that ended while its connection was joined still has its bound.
            account = self._accounts.setdefault(ticket.serial, _Account(ticket.expires_s, 0, 1))
            if account.n_bytes + n_bytes > ticket.max_bytes:
                self._refuse("bytes", f"this ticket's {ticket.max_bytes} bytes are used up")
            accounts.append(account)
        for account in accounts:
            account.n_bytes += n_bytes
        self._day_bytes += n_bytes
        self.joined_bytes += n_bytes
        self._ready_s = max(self._ready_s, now_s - self.limits.burst_s)
        self._ready_s += n_bytes / self.limits.rate_bytes_per_s
        return max(0.0, self._ready_s - now_s)

    def _check_day(self, now_s: float, n_bytes: int = 1) -> None:
        if now_s - self._day_from_s >= DAY_S:
            self._day_from_s, self._day_bytes = now_s, 0
        if self._day_bytes + n_bytes > self.limits.day_bytes:
            self._refuse("day", f"this relay's {self.limits.day_bytes:.0f} bytes of a day are used up")

    def _refuse(self, cause: str, reason: str) -> None:
        self.refused[cause] += 1
        raise AccessDenied(reason)

    def _forget(self, now_s: float) -> None:
        """Accounts of tickets that ended and are not in use; looked for where they have become many."""
        if len(self._accounts) >= min(1024, self.limits.tickets):
            for serial in [s for s, a in self._accounts.items() if a.expires_s < now_s and not a.connections]:
                del self._accounts[serial]

    def _tidy(self, pair: bytes, dials: bool) -> None:
        if not self._waiting.get((pair, dials)):
            self._waiting.pop((pair, dials), None)
