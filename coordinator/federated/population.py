"""A population's round inside a federated job's machine: dealt to hosts, answered by sums, dealt again. Pure.

Hosts are the machine's clients; whom each of them speaks for is its roster. Hosts whose rosters have one hash
hold the same data and may train each other's clients. A host has one order at a time: clients that are
dealt to it meanwhile wait for its answer, and go as the next one. ``coordinator.federated.cohorts`` keeps the
books.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from atoll.errors import UsageError
from atoll.sampling import held_out_of, local_steps
from coordinator.federated import cohorts
from coordinator.federated.cohorts import Cohort, Roster
from coordinator.federated.makespan import HostTimes, Timed, explained, rates
from coordinator.federated.makespan import learnt as times_learnt
from coordinator.federated.selection import even_coding
from coordinator.federated.state import Client, FederationState, Order
from coordinator.messages.instructions import HostSums
from strategies.linear import Linear
from strategies.privacy.private import strategy_of
from strategies.selection import Outcome, smoothed

if TYPE_CHECKING:
    from coordinator.messages.events import HostRows, UpdateReady

STATES_WAIT_S = 60.0
"""At most, and half a deadline, for a host that is gone with its clients' states: other clients go on, these
would begin anew."""


def is_population(state: FederationState) -> bool:
    """Return whether some host that is ready speaks for several clients, or for one of another name."""
    return any(state.clients[name].roster for name in state.ready)


def size(state: FederationState) -> int:
    """How many clients the job knows. Whom a host speaks for shows once it has loaded."""
    known = (client for client in state.clients.values() if client.roster or client.loaded)
    return len({name for client in known for name in client.members})


def misfit(state: FederationState, host: Client) -> str | None:
    """Why the clients that a host speaks for cannot take part, None when they can."""
    rule = state.federated.rule
    if rule.gateways:
        return "a population's host sends one sum already; leave out gateways="
    if rule.secure is not None:
        return "secure aggregation takes no population's host; register its data set whole, as one client"
    core = strategy_of(rule).core
    if not isinstance(core, Linear):
        return f"{core.name} needs individual updates; its clients cannot be a population"
    try:
        core.grid(1, 1)
    except UsageError as error:
        return str(error)
    if sum(host.roster.values()) > host.n_samples:
        return f"clients with {sum(host.roster.values())} samples of the {host.n_samples} registered"
    for other in state.clients.values():
        if other.worker == host.worker or not other.present or other.out or not other.loaded:
            continue
        if other.population != host.population and (both := host.roster.keys() & other.members.keys()):
            return (
                f"client {min(both)!r} is on {other.worker} with other data; part the data alike, or name "
                "the clients apart"
            )
    return None


def opened(state: FederationState, names: Collection[str]) -> FederationState:
    """Open a round of these clients; nobody trains yet."""
    most = state.federated.rule.max_samples
    drawn = {name: min(samples, most) for name, samples in state.members.items() if name in set(names)}
    return replace(
        state,
        cohort=cohorts.opened(state.round, drawn),
        orders={},
        chosen=(),
        ratios=dict.fromkeys(state.clients, even_coding(state.federated.rule)),
        pace="",
        spread=None,
    )


def dealt(state: FederationState, now_s: float) -> tuple[FederationState, tuple[str, ...]]:
    """Deal waiting clients to the hosts that have their data; the hosts that have a new order.

    A client whose state is on a host that is gone waits a while for it, then begins anew elsewhere.
    """
    cohort = books(state)
    groups: dict[str, list[str]] = {}
    for name in state.ready:
        groups.setdefault(state.clients[name].population or name, []).append(name)
    elapsed = {host: now_s - order.begun_s for host, order in state.orders.items()}
    homes, words = dict(state.homes), []
    for hosts in groups.values():
        mine = set()
        for client in cohort.waiting & state.clients[hosts[0]].members.keys():
            home = homes.get(client)
            if home is not None and home not in hosts:
                if waits_for(state, home, now_s):
                    continue
                del homes[client]
            mine.add(client)
        if not mine:
            continue
        roster = Roster(steps_of(state, mine | cohort.at.keys()), homes, state.times, math.inf)
        found, assignment = cohorts.deal(roster, replace(cohort, waiting=frozenset(mine)), hosts, elapsed)
        cohort = replace(found, waiting=cohort.waiting - mine)
        words.append(
            explained(assignment, rates({host: state.times.get(host, HostTimes()) for host in hosts}))
        )
    orders, given = dict(state.orders), []
    for host in state.ready:
        clients = tuple(client for client, at in cohort.at.items() if at == host)
        if clients and host not in orders:
            orders[host] = Order(clients, now_s)
            given.append(host)
    after = replace(
        state,
        cohort=cohort,
        homes=homes,
        orders=orders,
        chosen=tuple(sorted({*state.chosen, *given})),
        ratios={**dict.fromkeys(given, even_coding(state.federated.rule)), **state.ratios},
        assignment="; ".join(words) or state.assignment,
    )
    return after, tuple(given)


def waits_for(state: FederationState, host: str, now_s: float) -> bool:
    """Return whether clients shall wait for a host that has their states."""
    known = state.clients.get(host)
    if known is None or known.out:
        return False
    return known.present or now_s < known.gone_s + min(STATES_WAIT_S, state.federated.rule.deadline_s / 2)


def answered(state: FederationState, host: str, update: UpdateReady) -> tuple[FederationState, str]:
    """Take a host's answer to its order, or return the reason why not."""
    order, answer, cohort = state.orders.get(host), update.host, books(state)
    if order is None or answer is None or not {*answer.rows, *answer.refused} <= {*order.clients}:
        return state, "an answer for clients that it does not train now"
    silent = dict.fromkeys(order.clients, "its host did not answer for it")
    refused = {who: answer.refused.get(who, why) for who, why in silent.items() if who not in answer.rows}
    sums = None
    if answer.rows:
        samples = {who: row.n_samples for who, row in answer.rows.items()}
        sums = HostSums(update.update, samples, answer.loads, answer.sums)
    taken, why = cohorts.answered(cohort, host, sums, refused)
    if why:
        return state, why
    new = dict.fromkeys(taken.taken.keys() - cohort.taken.keys(), update)
    orders = {name: held for name, held in state.orders.items() if name != host}
    return replace(state, cohort=taken, orders=orders, updates={**state.updates, **new}), ""


def impossible(host: Client, answer: HostRows, most: float) -> str | None:
    """Return what is wrong with the rows of an answer, as far as that shows without a look at the sum."""
    for who, row in answer.rows.items():
        registered = host.members.get(who, 0)
        if not 1 <= row.n_samples <= registered:
            return f"client {who!r} trained on {row.n_samples} samples, {registered} are registered"
        if row.steps < 1 or not abs(row.loss) <= most or not 0.0 <= row.square_loss <= most:
            return f"client {who!r}: {row.steps} steps, a loss of {row.loss}, squared {row.square_loss}"
    return None


def without(state: FederationState, host: str) -> FederationState:
    """Let what a host was training be dealt again."""
    orders = {name: order for name, order in state.orders.items() if name != host}
    return replace(state, cohort=cohorts.lost(books(state), host), orders=orders)


def refused(state: FederationState, name: str, why: str) -> FederationState:
    """Go on without the clients of a sum that cannot be added."""
    left = cohorts.expired(cohorts.dropped(books(state), (name,)), why)
    updates = {other: update for other, update in state.updates.items() if other != name}
    return replace(state, cohort=left, updates=updates)


def steps_of(state: FederationState, names: Collection[str]) -> dict[str, int]:
    """Local steps by client, from what it registered."""
    rule, batch, drawn = state.federated.rule, state.spec.data.batch, books(state).drawn
    return {
        name: local_steps(
            drawn[name] - held_out_of(drawn[name], rule.held_out), batch, rule.local_epochs, rule.local_steps
        )
        for name in names
    }


def books(state: FederationState) -> Cohort:
    """The round's books. LookupError outside of a population's round."""
    if state.cohort is None:
        raise LookupError(f"{state.job}: round {state.round} is not a population's")
    return state.cohort


# ---------------------------------------------------------------- evaluation


def assess(state: FederationState, wanted: Collection[str] | None = None) -> dict[str, tuple[str, ...]]:
    """Hosts that evaluate, and which clients of a population each; ``wanted`` None: all clients but those
    whose last update was refused: what they say of the model is not counted either.

    Each client is evaluated where its state is, and by turns where it has none.
    """
    ready = [name for name in state.ready if wanted is not None or not state.clients[name].strikes]
    if not is_population(state):
        return {name: () for name in ready if wanted is None or name in wanted}
    groups: dict[str, list[str]] = {}
    for name in ready:
        groups.setdefault(state.clients[name].population or name, []).append(name)
    found: dict[str, list[str]] = {}
    for hosts in groups.values():
        for at, client in enumerate(state.clients[hosts[0]].members):
            if wanted is None or client in wanted:
                home = state.homes.get(client, "")
                found.setdefault(home if home in hosts else hosts[at % len(hosts)], []).append(client)
    return {host: tuple(clients) for host, clients in found.items()}


def losses(state: FederationState) -> dict[str, float]:
    """Losses that evaluations showed, by client."""
    return {
        who: loss
        for worker, report in state.told.items()
        for who, loss in (
            {name: row.loss for name, row in report.rows.items()} or {worker: report.loss}
        ).items()
    }


# ---------------------------------------------------------------- a closed round


def rows_of(good: Mapping[str, UpdateReady]) -> dict[str, Any]:
    """Rows of all hosts' sums, by client."""
    return {who: row for update in good.values() if update.host for who, row in update.host.rows.items()}


def outcomes(state: FederationState, good: Mapping[str, UpdateReady]) -> dict[str, Outcome]:
    """Observations of the clients of a round, for selectors."""
    return {
        who: Outcome(row.square_loss, row.n_samples, state.client_s.get(who) or row.seconds or 1e-6)
        for who, row in rows_of(good).items()
    }


def learnt(state: FederationState, good: Mapping[str, UpdateReady]) -> FederationState:
    """The state with what the round showed of hosts and clients, and who is counted from whom."""
    cohort, hosts = books(state), senders(state)
    counted: dict[str, tuple[str, ...]] = {}
    for name, update in good.items():
        if update.host is not None:
            counted[hosts[name]] = (*counted.get(hosts[name], ()), *update.host.rows)
    stateful = any(update.host is not None and update.host.stateful for update in good.values())
    homes = cohorts.homes(state.homes, cohort) if stateful else state.homes
    return replace(measured(state, good, hosts), homes=homes, counted=counted)


def measured(
    state: FederationState, good: Mapping[str, UpdateReady], hosts: Mapping[str, str]
) -> FederationState:
    """The state with the times that sums showed of clients and hosts; ``hosts``: who sent each."""
    found: dict[str, list[Timed]] = {}
    seconds = dict(state.client_s)
    for name, update in good.items():
        for who, row in ({} if update.host is None else update.host.rows).items():
            found.setdefault(hosts[name], []).append(Timed(row.steps, row.seconds))
            seconds[who] = smoothed(seconds.get(who, 0.0), row.seconds)
    times = {
        host: times_learnt(state.times.get(host, HostTimes()), found.get(host, ()))
        for host in {**state.times, **found}
    }
    return replace(state, times=times, client_s=seconds)


def senders(state: FederationState) -> dict[str, str]:
    """Host of each sum of a round."""
    return {name: answer.host for name, answer in books(state).taken.items()}


def participants(
    updates: Mapping[str, UpdateReady], shown: Mapping[str, Mapping[str, Any]], hosts: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Entries of RoundClosed by host, from those of its sums, with ``clients``: for each of them [samples,
    steps, loss, seconds]. ``hosts``: who sent each."""
    found: dict[str, dict[str, Any]] = {}
    for name, entry in shown.items():
        host, answer = hosts[name], updates[name].host
        rows = {} if answer is None else answer.rows
        clients = {
            who: [row.n_samples, row.steps, row.loss if isfinite(row.loss) else 0.0, round(row.seconds, 4)]
            for who, row in rows.items()
        }
        before = found.get(host)
        if before is None:
            found[host] = {**entry, "clients": clients}
            continue
        weights = before["n_samples"], entry["n_samples"]
        both = before["metrics"].keys() & entry["metrics"].keys()
        for key in ("n_samples", "steps", "train_s", "upload_s", "download_s", "bytes_up", "bytes_down"):
            before[key] += entry[key]
        before["metrics"] = {
            key: (before["metrics"][key] * weights[0] + entry["metrics"][key] * weights[1]) / sum(weights)
            for key in both
        }
        before["took_s"] = entry["took_s"]
        if "staleness" in entry:
            before["staleness"] = max(before["staleness"], entry["staleness"])
        before["clients"] |= clients
    return found


def homes_by_host(state: FederationState) -> dict[str, tuple[str, ...]]:
    """By host, the clients whose state lies there: as RoundClosed keeps it."""
    found: dict[str, list[str]] = {}
    for client, host in state.homes.items():
        found.setdefault(host, []).append(client)
    return {host: tuple(sorted(clients)) for host, clients in sorted(found.items())}
