"""A round of a population: who was drawn, which host trains whom, and whose sums are in. Pure.

                 deal              answered
    waiting  ---------->  at a host  ------>  in a sum that was taken
       ^                    |    |
       +---- host lost -----+    +-- refused by its host, or the deadline --> out, with the reason

A client is at one host at a time, and a sum is taken only while the host has all of its clients. What a host
that was thought lost sends late is refused as a whole, since others train its clients by then. So nobody is
counted twice, whatever is repeated, reordered or late. Hosts are few and events are theirs: a round of m
clients costs O(m) an event, never O(m) a client.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from coordinator.federated.makespan import Assignment, HostTimes, Task, assign, rates

if TYPE_CHECKING:
    from coordinator.messages.instructions import HostSums


@dataclass(frozen=True, slots=True)
class Roster:
    """What is known of a population and its hosts from round to round."""

    steps: Mapping[str, int]  # local steps by client
    homes: Mapping[str, str] = field(default_factory=dict)  # host of each client's state
    times: Mapping[str, HostTimes] = field(default_factory=dict)
    move_s: float = 0.0  # seconds to fetch a client's state from another host


@dataclass(frozen=True, slots=True)
class Answer:
    """Sums that were taken from a host."""

    host: str
    sums: HostSums


@dataclass(frozen=True, slots=True)
class Cohort:
    """Clients of one round. ``drawn``: registered samples; ``at``: host of each client in training;
    ``taken``: sums by a name of their own; ``out``: why a client is not counted."""

    round: int
    drawn: Mapping[str, int]
    waiting: frozenset[str]
    at: Mapping[str, str] = field(default_factory=dict)
    taken: Mapping[str, Answer] = field(default_factory=dict)
    out: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Return whether everybody is in a sum or out."""
        return not self.waiting and not self.at

    @property
    def sums(self) -> dict[str, HostSums]:
        """Everything to be added."""
        return {name: answer.sums for name, answer in self.taken.items()}

    def counted(self, host: str) -> set[str]:
        """The clients in sums of ``host``: its verdict."""
        return {client for a in self.taken.values() if a.host == host for client in a.sums.samples}


def opened(at_round: int, drawn: Mapping[str, int]) -> Cohort:
    """Open a round; ``drawn``: registered samples by client."""
    return Cohort(at_round, drawn, frozenset(drawn))


def deal(
    roster: Roster, cohort: Cohort, hosts: Collection[str], elapsed_s: Mapping[str, float] | None = None
) -> tuple[Cohort, Assignment]:
    """Give waiting clients to ``hosts``. ``elapsed_s``: since a host at work began.

    UsageError without a host.
    """
    known = rates({host: roster.times.get(host, HostTimes()) for host in hosts})
    busy: dict[str, float] = {}
    for client, host in cohort.at.items():
        if host in known:
            busy[host] = busy.get(host, 0.0) + known[host].seconds(roster.steps[client])
    elapsed = elapsed_s or {}
    busy = {host: max(0.0, seconds - elapsed.get(host, 0.0)) for host, seconds in busy.items()}
    tasks = [
        Task(c, roster.steps[c], roster.homes[c], roster.move_s)
        if c in roster.homes
        else Task(c, roster.steps[c])
        for c in sorted(cohort.waiting)
    ]
    found = assign(tasks, known, busy)
    at = {client: host for host, clients in found.clients.items() for client in clients}
    return replace(cohort, waiting=frozenset(), at={**cohort.at, **at}), found


def answered(
    cohort: Cohort, host: str, sums: HostSums | None, refused: Mapping[str, str]
) -> tuple[Cohort, str]:
    """Take a host's answer: ``sums``, None where all were refused, and why others are not in them.

    Returns the reason instead where it cannot be taken; an answer that was taken before changes nothing.
    """
    samples = {} if sums is None else sums.samples
    if any(a.host == host and a.sums == sums for a in cohort.taken.values()):
        return cohort, ""
    clients = [*samples, *refused]
    if both := samples.keys() & refused.keys():
        return cohort, f"client {min(both)!r} is both in the sum and refused"
    if strange := [client for client in clients if cohort.at.get(client) != host]:
        where = cohort.at.get(strange[0])
        now = f"host {where!r} trains it" if where else "it is not in training"
        return cohort, f"host {host!r} answers for client {strange[0]!r} and {len(strange) - 1} more; {now}"
    taken = dict(cohort.taken)
    if sums is not None:
        taken[_name(host, cohort)] = Answer(host, sums)
    at = {
        client: other
        for client, other in cohort.at.items()
        if client not in samples and client not in refused
    }
    return replace(cohort, at=at, taken=taken, out={**cohort.out, **refused}), ""


def lost(cohort: Cohort, host: str) -> Cohort:
    """Let the clients that a lost host was training wait; sums that were taken from it stay."""
    back = {client for client, other in cohort.at.items() if other == host}
    at = {client: other for client, other in cohort.at.items() if other != host}
    return replace(cohort, waiting=cohort.waiting | back, at=at)


def dropped(cohort: Cohort, names: Collection[str]) -> Cohort:
    """Let the clients of sums that could not be added wait again; their hosts should get none of them."""
    back = {client for name in names for client in cohort.taken[name].sums.samples}
    taken = {name: answer for name, answer in cohort.taken.items() if name not in names}
    return replace(cohort, waiting=cohort.waiting | back, taken=taken)


def expired(cohort: Cohort, why: str) -> Cohort:
    """End the round as it is: who is in no sum is out."""
    late = dict.fromkeys((*cohort.waiting, *cohort.at), why)
    return replace(cohort, waiting=frozenset(), at={}, out={**cohort.out, **late})


def homes(before: Mapping[str, str], cohort: Cohort) -> dict[str, str]:
    """Host of each client's state after a round was closed: where it was counted."""
    return {**before, **{client: a.host for a in cohort.taken.values() for client in a.sums.samples}}


def _name(host: str, cohort: Cohort) -> str:
    """Return a name for the next sums of ``host``: it sends several where it was given clients later."""
    if host not in cohort.taken:
        return host
    return next(name for part in count(2) if (name := f"{host}, part {part}") not in cohort.taken)
