"""A round of an asynchronous job: so many updates as its buffer takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coordinator.federated import flow
from coordinator.federated.kinds.round import (
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
from coordinator.federated.state import FederationState, Flight, Say, Todo
from coordinator.messages.events import UpdateReady
from coordinator.messages.instructions import AggregateRound, RoundTaken
from coordinator.messages.jobs import Record
from strategies.selection import Outcome as Seen


class Flow(Round):
    """Clients train each at its own pace; so many updates as the buffer takes are one round. A client has at
    most one update in a sum, however fast it is."""

    flows = True

    def drawn(self, state: FederationState) -> int:
        return len(state.chosen) or state.federated.rule.buffer

    def left(self, state: FederationState) -> int:
        """Updates that are to come; those that are here suffice where nobody could send another."""
        came, rule = len(state.updates), state.federated.rule
        busy = bool(state.flights or state.asked or flow.idle(state))
        enough = came >= rule.buffer or (came >= rule.min_clients and not busy)
        return 0 if enough else max(1, rule.buffer - came)

    def words(self, state: FederationState) -> str:
        return f"{len(state.updates)} of {self.drawn(state)} updates, {len(state.flights)} clients train"

    def arrived(self, state: FederationState) -> int:
        return len(self.good(state) if state.chosen else state.updates)

    def awaits(self, state: FederationState, worker: str) -> bool:
        return worker in state.flights

    def flight(self, state: FederationState, worker: str) -> Flight:
        return state.flights.get(worker) or super().flight(state, worker)

    def verdict(self, state: FederationState, worker: str) -> RoundTaken | None:
        at_round = state.answered.get(worker)
        return None if at_round is None else RoundTaken(state.job, at_round, True)

    def dealt(self, state: FederationState, now_s: float) -> tuple[FederationState, tuple[str, ...]]:
        return flow.begun(state, now_s)

    def taken(self, state: FederationState, worker: str, update: UpdateReady, now_s: float) -> Outcome:
        client, flight = state.clients[worker], state.flights[worker]
        age, most = state.round - flight.round, state.federated.rule.oldest
        wrong = impossible(client, update)
        why = f"its model is {age} models old, at most {most} may be" if age > most else wrong
        if why:
            struck, let = strike(state, worker, why) if wrong else (state, [])
            less, said = self.without(struck, worker, why)
            refused = Say(worker, RoundTaken(state.job, flight.round, False, why))
            return less, [*let, *said, refused, *forgotten(less, update)]
        heard = replace(measured(client, update, now_s - flight.begun_s), model=flight.model.full.hash)
        fact, after = flow.taken(with_client(state, heard), worker, update)
        return after, [Record(fact), Say(worker, RoundTaken(state.job, flight.round, True))]

    def without(self, state: FederationState, worker: str, reason: str) -> Outcome:
        if worker in state.asked:
            state = replace(state, asked=state.asked - {worker})
        if worker not in state.flights:
            return state, []
        flights = {name: flight for name, flight in state.flights.items() if name != worker}
        return drop(replace(state, flights=flights), worker, reason)

    def refused(self, state: FederationState, name: str, why: str) -> Outcome:
        chosen = tuple(other for other in state.chosen if other != name)
        return super().refused(replace(state, chosen=chosen), name, why)

    def expired(self, state: FederationState, now_s: float) -> Outcome:
        why = f"late: no update within {state.federated.rule.deadline_s:g} s"
        late, todo = [name for name, flight in state.flights.items() if now_s >= flight.due_s], list[Todo]()
        for name in sorted(late):
            word = RoundTaken(state.job, state.flights[name].round, False, why)  # ends what it trains
            state, said = self.without(state, name, why)
            todo += [*said, Say(name, word)]
        return state, todo

    def good(self, state: FederationState) -> Mapping[str, UpdateReady]:
        return {name: state.updates[name] for name in state.chosen}

    def summed(self, state: FederationState, attempt: int, n_clients: int, least: int) -> AggregateRound:
        plain = super().summed(state, attempt, n_clients, least)
        return replace(plain, **flow.ages(state, plain.updates))

    def learnt(
        self, state: FederationState, good: Mapping[str, UpdateReady], told: Told
    ) -> tuple[FederationState, Mapping[str, Seen], Told, Mapping[str, str]]:
        aged = {name: {**entry, "staleness": state.round - good[name].round} for name, entry in told.items()}
        return super().learnt(state, good, aged)
