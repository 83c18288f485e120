"""A round of a population: hosts train the clients that were drawn, and answer with sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from atoll.transitions import first
from coordinator.federated import cohorts, population
from coordinator.federated.kinds.round import (
    MAX_FIGURE,
    Outcome,
    Round,
    Told,
    forgotten,
    holding,
    impossible,
    strike,
    with_client,
)
from coordinator.federated.metrics import measured
from coordinator.federated.population import books
from coordinator.federated.state import FederationState, Todo, Without
from coordinator.messages.events import UpdateReady
from coordinator.messages.instructions import AggregateRound, TrainRound
from coordinator.messages.jobs import Dropped
from strategies.selection import Outcome as Seen


class PopulationRound(Round):
    """Hosts train the clients that were drawn, and answer with sums."""

    covers_late = True

    def size(self, state: FederationState) -> int:
        return population.size(state)

    def drawn(self, state: FederationState) -> int:
        return len(books(state).drawn)

    def left(self, state: FederationState) -> int:
        return len(books(state).waiting) + len(books(state).at)

    def out(self, state: FederationState) -> int:
        return len(books(state).out)

    def arrived(self, state: FederationState) -> int:
        return sum(len(answer.sums.samples) for answer in books(state).taken.values())

    def sender(self, state: FederationState, name: str) -> str:
        return books(state).taken[name].host

    def awaits(self, state: FederationState, worker: str) -> bool:
        return worker in state.orders

    def waits(self, state: FederationState) -> bool:
        return bool(books(state).waiting)

    def dealt(self, state: FederationState, now_s: float) -> tuple[FederationState, tuple[str, ...]]:
        return population.dealt(state, now_s)

    def message(self, state: FederationState, worker: str, message: TrainRound) -> TrainRound:
        order, drawn = state.orders[worker], books(state).drawn
        count, n_samples = len(drawn), sum(drawn.values())
        if state.private:  # who hosts some of the clients shall not know how many others train
            count = n_samples = state.federated.rule.clients
        return replace(message, order=order.key, clients=order.clients, drawn=count, drawn_samples=n_samples)

    def taken(self, state: FederationState, worker: str, update: UpdateReady, now_s: float) -> Outcome:
        order, answer, forget = state.orders.get(worker), update.host, forgotten(state, update)
        heard, why = population.answered(state, worker, update)
        if why or order is None or answer is None:
            return state, [Dropped(f"sum of {worker}: {why}"), *forget]
        client = state.clients[worker]
        if answer.rows:
            wrong = impossible(client, update) or population.impossible(client, answer, MAX_FIGURE)
            if wrong is not None:
                struck, let = strike(state, worker, wrong)
                return first([*let, *forget], self.without(struck, worker, wrong))
            client = measured(client, update, now_s - order.begun_s)
        return with_client(heard, holding(client, state)), []

    def without(self, state: FederationState, worker: str, reason: str) -> Outcome:
        said: list[Todo] = [Without(state.round, worker, reason)] if worker in state.orders else []
        return population.without(state, worker), said

    def refused(self, state: FederationState, name: str, why: str) -> Outcome:
        said: list[Todo] = [Without(state.round, self.sender(state, name), why)]
        return population.refused(state, name, why), said

    def expired(self, state: FederationState, now_s: float) -> Outcome:
        why = f"late: not trained within {state.federated.rule.deadline_s:g} s"
        return replace(state, cohort=cohorts.expired(books(state), why), orders={}), []

    def summed(self, state: FederationState, attempt: int, n_clients: int, least: int) -> AggregateRound:
        found = books(state)
        return AggregateRound(
            state.job, state.round, attempt, {}, {}, {}, n_clients, least, found.sums, found.drawn
        )

    def learnt(
        self, state: FederationState, good: Mapping[str, UpdateReady], told: Told
    ) -> tuple[FederationState, Mapping[str, Seen], Told, Mapping[str, str]]:
        state = population.learnt(state, good)
        told = population.participants(state.updates, told, population.senders(state))
        return state, population.outcomes(state, good), told, books(state).out
