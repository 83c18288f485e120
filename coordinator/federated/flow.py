"""Asynchronous rounds: who trains next, what waits to be summed, and what an old update weighs. Pure.

A client is given the newest model as soon as there is a place, and its update waits in the store until as
many as the buffer takes are there. Their sum is the next model, and nobody waits for anybody (FedBuff, Nguyen
2022, Alg. 1). An update that began t models ago counts (1 + t) ** -staleness. It is taken once the journal
has it, so a restart counts each of them once.

A host of a population is given several clients and one model in an order, and answers with their sum in whole
numbers. Places and the buffer count clients, each of which has at most one update in a sum. Which host had
which client changes no bit: what began with one model is added exactly (``strategies.aged.VersionSums``).
"""

from __future__ import annotations

from dataclasses import replace
from heapq import nlargest
from math import isfinite
from typing import TYPE_CHECKING, Any

from atoll.sampling import held_out_of, local_steps
from coordinator.federated.makespan import HostTimes, rates
from coordinator.federated.population import is_population, waits_for
from coordinator.federated.selection import coding, even_coding, next_ones, places
from coordinator.federated.state import FederationState, Flight
from coordinator.messages.facts import UpdateTaken
from coordinator.messages.instructions import HostSums, RoundTaken
from strategies.privacy.private import strategy_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from coordinator.messages.events import UpdateReady


def idle(state: FederationState) -> tuple[str, ...]:
    """Workers that could begin now: who do nothing for the job, and speak for a client whose last update is
    summed.

    Who has failed or was late since the newest model waits for the next, unless nobody else could make one.
    """
    busy = _busy(state)
    here = [name for name in state.ready if name not in state.flights and name not in state.asked]
    able = tuple(name for name in here if any(c not in busy for c in state.clients[name].members))
    fresh = tuple(name for name in able if name not in state.dropped)
    fresh = tuple(name for name in fresh if any(_free(state, busy, c) for c in state.clients[name].members))
    needed = not fresh and not state.flights and waiting_clients(state) < state.federated.rule.min_clients
    return able if needed else fresh


def waiting_clients(state: FederationState) -> int:
    """How many clients' updates wait to be summed, or are being summed."""
    return sum(len(fact.members) for fact in state.taken.values())


def training_clients(state: FederationState) -> int:
    """How many clients train."""
    return sum(len(flight.clients) or 1 for flight in state.flights.values())


def begun(state: FederationState, now_s: float) -> tuple[FederationState, tuple[str, ...]]:
    """Fill every free place; the workers that have something new to train."""
    free, waits = places(state) - training_clients(state), idle(state)
    if free < 1 or not waits or state.model is None or state.round >= state.rounds:
        return state, ()
    flight = Flight(state.round, state.model, now_s, now_s + state.federated.rule.deadline_s)
    if is_population(state):
        if waiting_clients(state) >= state.federated.rule.buffer:  # an order is long: it takes the next model
            return state, ()
        return _ordered(state, waits, free, flight, now_s)
    names, selector = next_ones(state, waits, free)
    how = coding(state, names).by_client
    return _flying(replace(state, selector=selector), dict.fromkeys(names, flight), how), names


def _flying(
    state: FederationState, flights: Mapping[str, Flight], how: Mapping[str, tuple[str, float]]
) -> FederationState:
    """The state in which these workers train."""
    told = {
        name: replace(state.clients[name], codec=how[name][0], ratio=how[name][1], dropped="")
        for name in flights
    }
    again = {client for name, flight in flights.items() for client in (name, *flight.clients)}
    return replace(
        state,
        flights={**state.flights, **flights},
        ratios={**state.ratios, **how},
        clients={**state.clients, **told},
        dropped={name: why for name, why in state.dropped.items() if name not in again},
        orders_given=state.orders_given + 1,
    )


# ---------------------------------------------------------------- orders of hosts


def _ordered(
    state: FederationState, hosts: Collection[str], free: int, flight: Flight, now_s: float
) -> tuple[FederationState, tuple[str, ...]]:
    """Draw clients of idle hosts, and give each to one that can train it and has most room left."""
    busy, share = _busy(state), shares(state)
    able = {host: _able(state, host, busy, now_s) for host in hosts}
    room = {host: min(share[host], len(clients)) for host, clients in able.items()}
    everybody = frozenset[str]().union(*able.values())
    if not everybody:  # their states lie on hosts that may come back
        return state, ()
    names, selector = next_ones(state, everybody, min(free, sum(room.values())))
    given: dict[str, list[str]] = {}
    for name in names:
        found = [host for host in hosts if room[host] and name in able[host]]
        if found:
            host = max(found, key=lambda host: room[host])
            room[host] -= 1
            given.setdefault(host, []).append(name)
    most, members, grid = state.federated.rule.max_samples, state.members, grid_of(state)
    flights = {
        host: replace(flight, clients={name: min(members[name], most) for name in clients}, grid=grid)
        for host, clients in given.items()
    }
    how = dict.fromkeys(flights, even_coding(state.federated.rule))
    return _flying(replace(state, selector=selector), flights, how), tuple(sorted(flights))


def _able(state: FederationState, host: str, busy: Collection[str], now_s: float) -> frozenset[str]:
    """Clients that a host could train now; of those whose state lies on another host only where that is gone
    for good. One that a host has refused waits for the next model, unless nobody else is left."""
    found = set()
    for client in state.clients[host].members.keys() - busy:
        home = state.homes.get(client, host)
        if home == host or not waits_for(state, home, now_s):
            found.add(client)
    return frozenset(found - state.dropped.keys()) or frozenset(found)


def shares(state: FederationState) -> dict[str, int]:
    """How many clients an order of each host takes at most: of all places as many as its speed is of that of
    all hosts, so that orders take alike and their updates are equally old. One at least, and no more than the
    buffer takes."""
    rule, members = state.federated.rule, state.members
    mean = max(1, sum(members.values()) // len(members))
    steps = local_steps(
        mean - held_out_of(mean, rule.held_out), state.spec.data.batch, rule.local_epochs, rule.local_steps
    )
    known = rates({host: state.times.get(host, HostTimes()) for host in state.ready})
    speeds = {host: 1.0 / max(rate.seconds(max(1, steps)), 1e-9) for host, rate in known.items()}
    each = places(state) / sum(speeds.values())
    return {host: max(1, min(rule.buffer, round(each * speed))) for host, speed in speeds.items()}


def grid_of(state: FederationState) -> tuple[int, int]:
    """Most clients that a sum can have, and what they may have registered: they fix the grid of an order.

    Both are rounded up to powers of two, which changes no unit: so hosts that join or leave seldom change the
    grid, and sums of one model lie on one.
    """
    most, members = state.federated.rule.max_samples, state.members
    count = min(2 * state.federated.rule.buffer - 1, len(members))  # the last order may exceed the buffer
    samples = sum(nlargest(count, (min(samples, most) for samples in members.values())))
    return 1 << (count - 1).bit_length(), 1 << (samples - 1).bit_length()


def _busy(state: FederationState) -> set[str]:
    """Clients that train, or whose updates wait to be summed."""
    found = {client for fact in state.taken.values() for client in fact.members}
    for name, flight in state.flights.items():
        found |= {*(flight.clients or (name,))}
    return found


def _free(state: FederationState, busy: Collection[str], client: str) -> bool:
    return client not in busy and client not in state.dropped


# ---------------------------------------------------------------- what waits to be summed


def taken(
    state: FederationState, worker: str, update: UpdateReady, clients: Mapping[str, int] | None = None
) -> tuple[UpdateTaken, FederationState]:
    """The fact that an update waits to be summed, and the state with it. ``clients``: in a host's sum, with
    what each of them may count."""
    flight, client = state.flights[worker], state.clients[worker]
    known = {name: value for name, value in update.metrics.items() if isfinite(value)}
    fact = UpdateTaken(
        state.job,
        worker,
        replace(update, metrics=known),
        client.n_samples,
        *state.ratios[worker],
        flight.model.full.hash,
        clients or {},
        flight.grid,
    )
    less = {name: other for name, other in state.flights.items() if name != worker}
    return fact, waiting(replace(state, flights=less), [fact])


def waiting(state: FederationState, taken: Iterable[UpdateTaken]) -> FederationState:
    """The state in which these updates wait to be summed."""
    facts = {fact.name: fact for fact in taken}
    homes = dict(state.homes)
    for fact in facts.values():
        if fact.update.host is not None and fact.update.host.stateful:
            homes |= dict.fromkeys(fact.clients, fact.worker)
    return replace(
        state,
        updates={**state.updates, **{name: fact.update for name, fact in facts.items()}},
        taken={**state.taken, **facts},
        ratios={**state.ratios, **{fact.worker: (fact.codec, fact.ratio) for fact in facts.values()}},
        answered={**state.answered, **{fact.worker: word_of(fact) for fact in facts.values()}},
        homes=homes,
    )


def word_of(fact: UpdateTaken) -> RoundTaken:
    """What a worker hears of an update that was taken."""
    update = fact.update
    order = update.order if fact.clients else ""
    return RoundTaken(fact.job, update.round, True, clients=tuple(sorted(fact.clients)), order=order)


def due(state: FederationState) -> tuple[str, ...]:
    """The updates that make the next model: in the order in which they came as many as fill the buffer."""
    found, clients = list[str](), 0
    for name in state.updates:
        if clients >= state.federated.rule.buffer:
            break
        found.append(name)
        clients += len(state.taken[name].members)
    return tuple(found)


def ages(state: FederationState, good: Mapping[str, UpdateReady]) -> dict[str, Any]:
    """What Aggregate says of updates that began with an older model."""
    rule = state.federated.rule
    old = {name: state.round - update.round for name, update in good.items() if update.round < state.round}
    return {
        "weights": {name: rule.weight(models) for name, models in old.items()},
        "bases": {name: state.taken[name].model for name in old} if _needs_base(state) else {},
    }


def sums(state: FederationState, good: Mapping[str, UpdateReady]) -> dict[str, HostSums]:
    """Hosts' sums among these updates, as Aggregate names them."""
    found = {}
    for name, update in good.items():
        fact, host, age = state.taken[name], update.host, state.round - update.round
        if host is not None:
            samples = {client: row.n_samples for client, row in host.rows.items()}
            base = fact.model if age and _needs_base(state) else ""
            found[name] = HostSums(update.update, samples, host.loads, host.sums, fact.grid, age, base)
    return found


def _needs_base(state: FederationState) -> bool:
    return strategy_of(state.federated.rule).facts.needs_base


def without(state: FederationState, names: Collection[str]) -> FederationState:
    """The state without updates that were summed or refused: the next ones are on their way."""
    return replace(
        state,
        updates={name: update for name, update in state.updates.items() if name not in names},
        taken={name: fact for name, fact in state.taken.items() if name not in names},
    )


def blobs(state: FederationState) -> set[str]:
    """Broadcasts that clients train, or that updates began with."""
    return {flight.model.full.hash for flight in state.flights.values()} | {
        fact.model for fact in state.taken.values()
    }
