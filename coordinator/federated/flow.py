"""Asynchronous rounds: who trains next, what waits to be summed, and what an old update weighs. Pure.

A client is given the newest model as soon as there is a place, and its update waits in the store until as
many as the buffer takes are there. Their sum is the next model, and nobody waits for anybody (FedBuff, Nguyen
2022, Alg. 1). An update that began t models ago counts (1 + t) ** -staleness. It is taken once the journal
has it, so a restart counts each of them once.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from coordinator.federated.selection import coding, next_ones, places
from coordinator.federated.state import FederationState, Flight
from coordinator.messages.facts import UpdateTaken
from strategies.privacy.private import strategy_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from coordinator.messages.events import UpdateReady


def idle(state: FederationState) -> tuple[str, ...]:
    """Clients that could begin now: whose last update is summed, and who do nothing for the job.

    Who has failed or was late since the newest model waits for the next, unless nobody else could make one.
    """
    busy = {*state.flights, *state.updates, *state.asked}
    able = tuple(name for name in state.ready if name not in busy)
    fresh = tuple(name for name in able if name not in state.dropped)
    needed = not fresh and not state.flights and len(state.updates) < state.federated.rule.min_clients
    return able if needed else fresh


def begun(state: FederationState, now_s: float) -> tuple[FederationState, tuple[str, ...]]:
    """Fill every free place; the clients that have something new to train."""
    free, waits = places(state) - len(state.flights), idle(state)
    if free < 1 or not waits or state.model is None or state.round >= state.rounds:
        return state, ()
    names, selector = next_ones(state, waits, free)
    how = coding(state, names).by_client
    flight = Flight(state.round, state.model, now_s, now_s + state.federated.rule.deadline_s)
    told = {
        name: replace(state.clients[name], codec=how[name][0], ratio=how[name][1], dropped="")
        for name in names
    }
    return replace(
        state,
        selector=selector,
        flights={**state.flights, **dict.fromkeys(names, flight)},
        ratios={**state.ratios, **how},
        clients={**state.clients, **told},
        dropped={name: why for name, why in state.dropped.items() if name not in told},
        orders_given=state.orders_given + 1,
    ), names


def taken(state: FederationState, worker: str, update: UpdateReady) -> tuple[UpdateTaken, FederationState]:
    """The fact that an update waits to be summed, and the state with it."""
    flight, client = state.flights[worker], state.clients[worker]
    known = {name: value for name, value in update.metrics.items() if isfinite(value)}
    fact = UpdateTaken(
        state.job,
        worker,
        replace(update, metrics=known),
        client.n_samples,
        *state.ratios[worker],
        flight.model.full.hash,
    )
    less = {name: other for name, other in state.flights.items() if name != worker}
    return fact, waiting(replace(state, flights=less), [fact])


def waiting(state: FederationState, taken: Iterable[UpdateTaken]) -> FederationState:
    """The state in which these updates wait to be summed."""
    facts = {fact.worker: fact for fact in taken}
    return replace(
        state,
        updates={**state.updates, **{name: fact.update for name, fact in facts.items()}},
        bases={**state.bases, **{name: fact.model for name, fact in facts.items()}},
        ratios={**state.ratios, **{name: (fact.codec, fact.ratio) for name, fact in facts.items()}},
        answered={**state.answered, **{name: fact.update.round for name, fact in facts.items()}},
    )


def ages(state: FederationState, good: Mapping[str, UpdateReady]) -> dict[str, Any]:
    """What Aggregate says of updates that began with an older model."""
    rule = state.federated.rule
    old = {name: state.round - update.round for name, update in good.items() if update.round < state.round}
    needed = strategy_of(rule).facts.needs_base
    return {
        "weights": {name: rule.weight(models) for name, models in old.items()},
        "bases": {name: state.bases[name] for name in old} if needed else {},
    }


def summed(state: FederationState) -> FederationState:
    """The state without the updates that were summed or refused: the next ones are on their way."""
    left = {name: update for name, update in state.updates.items() if name not in state.chosen}
    bases = {name: blob for name, blob in state.bases.items() if name in left}
    return replace(state, updates=left, bases=bases)


def blobs(state: FederationState) -> set[str]:
    """Broadcasts that clients train, or that updates began with."""
    return {flight.model.full.hash for flight in state.flights.values()} | set(state.bases.values())
