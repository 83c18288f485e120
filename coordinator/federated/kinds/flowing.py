"""A round of an asynchronous job: the updates of so many clients as its buffer takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coordinator.federated import flow, population
from coordinator.federated.kinds.round import (
    MAX_FIGURE,
    Outcome,
    Round,
    Told,
    drop,
    forgotten,
    impossible,
    strike,
    with_client,
)
from coordinator.federated.metrics import measured
from coordinator.federated.state import FederationState, Flight, Say, Todo, Without
from coordinator.messages.events import HostRows, UpdateReady
from coordinator.messages.instructions import AggregateRound, RoundTaken, TrainRound
from coordinator.messages.jobs import Record
from strategies.selection import Outcome as Seen


class Flow(Round):
    """Workers train each at its own pace, for themselves or for clients of a population; the updates of so
    many clients as the buffer takes are one round. A client has at most one update in a sum, however fast it
    or its host is."""

    flows = True

    def size(self, state: FederationState) -> int:
        return population.size(state) if population.is_population(state) else super().size(state)

    def drawn(self, state: FederationState) -> int:
        return self.arrived(state) if state.chosen else state.federated.rule.buffer

    def left(self, state: FederationState) -> int:
        """Updates that are to come; those that are here suffice where nobody could send another."""
        came, rule = flow.waiting_clients(state), state.federated.rule
        busy = bool(state.flights or state.asked or flow.idle(state))
        enough = came >= rule.buffer or (came >= rule.min_clients and not busy)
        return 0 if enough else max(1, rule.buffer - came)

    def words(self, state: FederationState) -> str:
        came, train = flow.waiting_clients(state), flow.training_clients(state)
        return f"{came} of {self.drawn(state)} updates, {train} clients train"

    def arrived(self, state: FederationState) -> int:
        names = self.good(state) if state.chosen else state.updates
        return sum(len(state.taken[name].members) for name in names)

    def sender(self, state: FederationState, name: str) -> str:
        return state.taken[name].worker

    def awaits(self, state: FederationState, worker: str) -> bool:
        return worker in state.flights

    def answers(self, state: FederationState, worker: str, update: UpdateReady) -> bool:
        flight = state.flights.get(worker)
        return flight is not None and (update.round, update.order) == (flight.round, flight.key)

    def flight(self, state: FederationState, worker: str) -> Flight:
        return state.flights.get(worker) or super().flight(state, worker)

    def verdict(self, state: FederationState, worker: str) -> RoundTaken | None:
        return state.answered.get(worker)

    def dealt(self, state: FederationState, now_s: float) -> tuple[FederationState, tuple[str, ...]]:
        return flow.begun(state, now_s)

    def message(self, state: FederationState, worker: str, message: TrainRound) -> TrainRound:
        flight = state.flights[worker]
        count, samples = flight.grid
        clients = tuple(flight.clients)
        return replace(message, order=flight.key, clients=clients, drawn=count, drawn_samples=samples)

    def taken(self, state: FederationState, worker: str, update: UpdateReady, now_s: float) -> Outcome:
        client, flight, host = state.clients[worker], state.flights[worker], update.host
        age, most = state.round - flight.round, state.federated.rule.oldest
        none = host is not None and not host.rows
        wrong = None if none else impossible(client, update)
        if host is not None:
            wrong = wrong or _strange(flight, host) or population.impossible(client, host, MAX_FIGURE)
        why = f"its model is {age} models old, at most {most} may be" if age > most else wrong
        if why:
            struck, let = strike(state, worker, why) if wrong else (state, [])
            less, said = self.without(struck, worker, why)
            refused = Say(worker, _refusal(state, worker, why))
            return less, [*let, *said, refused, *forgotten(less, update)]
        state, said = _left_out(state, flight, host)
        if none:
            flights = {name: other for name, other in state.flights.items() if name != worker}
            word = _refusal(state, worker, "none of its clients is counted")
            return replace(state, flights=flights), [*said, Say(worker, word)]
        heard = replace(measured(client, update, now_s - flight.begun_s), model=flight.model.full.hash)
        clients = {} if host is None else {name: flight.clients[name] for name in host.rows}
        fact, after = flow.taken(with_client(state, heard), worker, update, clients)
        return after, [*said, Record(fact), Say(worker, flow.word_of(fact))]

    def without(self, state: FederationState, worker: str, reason: str) -> Outcome:
        if worker in state.asked:
            state = replace(state, asked=state.asked - {worker})
        if worker not in state.flights:
            return state, []
        flights = {name: flight for name, flight in state.flights.items() if name != worker}
        return drop(replace(state, flights=flights), worker, reason)

    def refused(self, state: FederationState, name: str, why: str) -> Outcome:
        less, said = drop(state, self.sender(state, name), why)
        chosen = tuple(other for other in state.chosen if other != name)
        return flow.without(replace(less, chosen=chosen), (name,)), said

    def expired(self, state: FederationState, now_s: float) -> Outcome:
        why = f"late: no update within {state.federated.rule.deadline_s:g} s"
        late, todo = [name for name, flight in state.flights.items() if now_s >= flight.due_s], list[Todo]()
        for name in sorted(late):
            word = _refusal(state, name, why)  # ends what it trains
            state, said = self.without(state, name, why)
            todo += [*said, Say(name, word)]
        return state, todo

    def good(self, state: FederationState) -> Mapping[str, UpdateReady]:
        return {name: state.updates[name] for name in state.chosen}

    def summed(self, state: FederationState, attempt: int, n_clients: int, least: int) -> AggregateRound:
        good = self.good(state)
        sums = flow.sums(state, good)
        apart = tuple(name for name in good if name not in sums)
        plain = super().summed(replace(state, chosen=apart), attempt, n_clients, least)
        plain = replace(plain, **flow.ages(state, plain.updates))
        if not sums:
            return plain
        drawn = {name: most for part in good for name, most in state.taken[part].members.items()}
        return replace(plain, sums=sums, drawn=drawn)

    def learnt(
        self, state: FederationState, good: Mapping[str, UpdateReady], told: Told
    ) -> tuple[FederationState, Mapping[str, Seen], Told, Mapping[str, str]]:
        aged = {name: {**entry, "staleness": state.round - good[name].round} for name, entry in told.items()}
        hosted = {name: update for name, update in good.items() if update.host is not None}
        own = {name: update for name, update in good.items() if update.host is None}
        state, seen, shown, dropped = super().learnt(state, own, {name: aged[name] for name in own})
        if hosted:
            hosts = {name: self.sender(state, name) for name in hosted}
            state = population.measured(state, hosted, hosts)
            seen = {**seen, **population.outcomes(state, hosted)}
            parts = population.participants(hosted, {name: aged[name] for name in hosted}, hosts)
            shown = {**shown, **parts}
        return state, seen, shown, dropped


def _refusal(state: FederationState, worker: str, why: str) -> RoundTaken:
    """The word on an order that is over without an update of it."""
    flight = state.flights[worker]
    return RoundTaken(state.job, flight.round, False, why, order=flight.key)


def _strange(flight: Flight, host: HostRows) -> str | None:
    """Say who is in an answer and was not ordered."""
    if strange := {*host.rows, *host.refused} - flight.clients.keys():
        return f"an answer for client {min(strange)!r}, whom it was not to train"
    if both := host.rows.keys() & host.refused.keys():
        return f"client {min(both)!r} is both in the sum and refused"
    return None


def _left_out(state: FederationState, flight: Flight, host: HostRows | None) -> Outcome:
    """Have the clients of an order that are not in its sum wait for the next model."""
    rows, refused = ({}, {}) if host is None else (host.rows, host.refused)
    out = {
        name: refused.get(name, "its host did not answer for it")
        for name in flight.clients
        if name not in rows
    }
    said: list[Todo] = [Without(state.round, name, why) for name, why in sorted(out.items())]
    return replace(state, dropped={**state.dropped, **out}), said
