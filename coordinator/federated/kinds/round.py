"""A round whose clients answer for themselves, and what every kind of round does.

What a round changes in the job's state is returned; who calls it goes on: deals what waits, and closes the
round once nobody is left (``rounds.go_on``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from coordinator.federated.metrics import measured, outcomes
from coordinator.federated.secure import books as secure
from coordinator.federated.sites import gathering as sites
from coordinator.federated.state import (
    Client,
    FederationState,
    Flight,
    Forget,
    Let,
    Say,
    Todo,
    Without,
)
from coordinator.messages.events import SecureAnswer, UpdateReady
from coordinator.messages.instructions import AggregateRound, RoundTaken, SecureOrder, TrainRound
from coordinator.messages.jobs import Dropped
from strategies.selection import Outcome as Seen

MAX_FIGURE = 1e100  # a loss or metric; times the most samples, summed over all clients, it stays finite
MAX_STRIKES = 3  # rounds in a row in which a client failed or sent what cannot be counted

Outcome = tuple[FederationState, list[Todo]]
Told = dict[str, dict[str, Any]]


class Round:
    """Each chosen worker answers for itself. ``name``: of an update; ``covers_late``: the round's verdict
    covers an answer that comes late; ``flows``: no round waits for anybody."""

    covers_late = False
    flows = False

    def size(self, state: FederationState) -> int:
        """Clients that the job knows, here or not."""
        return len(state.clients)

    def drawn(self, state: FederationState) -> int:
        """Clients of the round."""
        return len(state.chosen)

    def left(self, state: FederationState) -> int:
        """Clients that nobody has answered for yet."""
        return len(state.chosen) - len(state.updates) - len(state.dropped)

    def out(self, state: FederationState) -> int:
        """Clients that are not counted."""
        return len(state.dropped)

    def arrived(self, state: FederationState) -> int:
        """Clients in updates."""
        return len(state.updates)

    def sender(self, state: FederationState, name: str) -> str:
        """The worker that sent an update."""
        return name

    def blob(self, state: FederationState, name: str) -> str:
        """The blob of an update that is summed; "" of one that is not."""
        return state.updates[name].update if name in state.updates else ""

    def flight(self, state: FederationState, worker: str) -> Flight:
        """What a worker was given."""
        assert state.model is not None  # noqa: S101 - the aggregator wrote it
        begun_s = state.due_s if state.begun_s is None else state.begun_s
        return Flight(state.round, state.model, begun_s, state.due_s)

    def verdict(self, state: FederationState, worker: str) -> RoundTaken | None:
        """The word on the last update of a worker, to be sent again."""
        if worker not in state.verdicts:
            return None
        why = state.verdicts[worker]
        return RoundTaken(state.job, state.round - 1, not why, why, state.counted.get(worker, ()))

    def awaits(self, state: FederationState, worker: str) -> bool:
        """Whether an answer of this worker is awaited."""
        return worker in state.chosen and worker not in state.updates and worker not in state.dropped

    def answers(self, state: FederationState, worker: str, update: UpdateReady) -> bool:
        """Whether an update is the awaited answer to what a worker was given."""
        return self.awaits(state, worker) and update.round == state.round

    def words(self, state: FederationState) -> str:
        """What the round waits for, for people."""
        return f"{self.left(state)} of {self.drawn(state)} clients train"

    # Stages, of a round that has more than one.

    def opened(self, state: FederationState, now_s: float) -> FederationState:
        """The state in which the participants, who are fixed now, are asked for what comes first."""
        rule = state.federated.rule
        if rule.gateways:
            return sites.opened(state)
        if rule.secure is None:
            return state
        secret = f"{state.secret}/{state.attempt}/{now_s}"
        held = secure.opened(state.job, state.round, rule.secure, state.chosen, secret)
        return replace(state, secure=held, due_s=now_s + min(secure.EXCHANGE_S, rule.deadline_s))

    def order(self, state: FederationState, worker: str) -> SecureOrder | None:
        """What a participant is asked for now; None: to train."""
        return None

    def staged(self, state: FederationState, now_s: float) -> tuple[FederationState, str] | None:
        """The state at the next stage, or with the reason why the round is to be repeated; None: everything
        is here, and to be summed."""
        return None

    def heard(self, state: FederationState, worker: str, answer: SecureAnswer) -> Outcome:
        """Take an answer that is no update."""
        return state, [Dropped(f"{answer.stage} of {worker}, though nothing is masked here")]

    def waits(self, state: FederationState) -> bool:
        """Whether a client is to be given to a worker yet."""
        return False

    def dealt(self, state: FederationState, now_s: float) -> tuple[FederationState, tuple[str, ...]]:
        """Deal who waits; the workers that have something new to train."""
        return state, ()

    def message(self, state: FederationState, worker: str, message: TrainRound) -> TrainRound:
        """A worker's message, as this kind of round completes it."""
        return message

    def taken(self, state: FederationState, worker: str, update: UpdateReady, now_s: float) -> Outcome:
        """Take a worker's answer."""
        client = state.clients[worker]
        if (wrong := impossible(client, update)) is not None:
            struck, let = strike(state, worker, wrong)
            less, said = drop(struck, worker, wrong)
            refused = Say(worker, RoundTaken(state.job, state.round, False, wrong))
            return less, [*let, *said, refused, Forget((update.update,))]
        took_s = now_s - (now_s if state.begun_s is None else state.begun_s)
        heard = with_client(state, holding(measured(client, update, took_s), state))
        return replace(heard, updates={**state.updates, worker: update}), []

    def without(self, state: FederationState, worker: str, reason: str) -> Outcome:
        """Go on without a worker; the same state where nothing of it is awaited."""
        return drop(state, worker, reason) if self.awaits(state, worker) else (state, [])

    def refused(self, state: FederationState, name: str, why: str) -> Outcome:
        """Go on without an update that cannot be counted."""
        less, said = drop(state, name, why)
        updates = {other: update for other, update in state.updates.items() if other != name}
        return replace(less, updates=updates), said

    def expired(self, state: FederationState, now_s: float) -> Outcome:
        """Go on without all that is late."""
        why = f"late: no update within {state.federated.rule.deadline_s:g} s"
        todo: list[Todo] = []
        for name in [name for name in state.chosen if self.awaits(state, name)]:
            state, said = drop(state, name, why)
            todo += said
        return state, todo

    def good(self, state: FederationState) -> Mapping[str, UpdateReady]:
        """The updates that are summed."""
        return state.updates

    def summed(self, state: FederationState, attempt: int, n_clients: int, least: int) -> AggregateRound:
        """What the aggregator is to sum."""
        good = self.good(state)
        codecs = {name: state.ratios[name] for name in good}
        registered = {name: state.clients[name].n_samples for name in good}
        return AggregateRound(state.job, state.round, attempt, good, codecs, registered, n_clients, least)

    def learnt(
        self, state: FederationState, good: Mapping[str, UpdateReady], told: Told
    ) -> tuple[FederationState, Mapping[str, Seen], Told, Mapping[str, str]]:
        """The state with what a closed round showed, observations for selectors, and participants and dropped
        clients as RoundClosed has them; ``told``: entries of good updates."""
        return replace(state, counted={}), outcomes(good, state.clients), told, state.dropped


# ---------------------------------------------------------------- what all kinds do


def strike(state: FederationState, worker: str, reason: str) -> Outcome:
    """Count against a client that it failed or sent what cannot be counted.

    Not of a private job: whether a client is barred follows from its data, and all can see it.
    """
    if state.private:
        return state, []
    client = state.clients[worker]
    strikes = client.strikes + 1
    if strikes < MAX_STRIKES:
        return with_client(state, replace(client, strikes=strikes)), []
    out = f"quarantined after {strikes} rounds in a row without a usable update, the last: {reason}"
    barred = replace(client, strikes=strikes, out=out, barred=True)
    return with_client(state, barred), [Let(worker, out)]


def drop(state: FederationState, worker: str, reason: str) -> Outcome:
    """The round in flight goes on without this client."""
    client = replace(state.clients[worker], dropped=reason)
    less = replace(with_client(state, client), dropped={**state.dropped, worker: reason})
    return less, [Without(state.round, worker, reason)]


def with_client(state: FederationState, client: Client) -> FederationState:
    """The state with this client's newer figures."""
    return replace(state, clients={**state.clients, client.worker: client})


def holding(client: Client, state: FederationState) -> Client:
    """The client, which holds the round's model now."""
    assert state.model is not None  # noqa: S101 - a round is in flight
    return replace(client, model=state.model.full.hash)


def forgotten(state: FederationState, update: UpdateReady) -> list[Todo]:
    """Forget the blob of a refused update; a replayed one may name what somebody's good one names too."""
    kept = {"", *(other.update for other in state.updates.values())}
    return [] if update.update in kept else [Forget((update.update,))]


def impossible(client: Client, update: UpdateReady) -> str | None:
    """What shows without a look at the update; the rest the aggregator judges."""
    if not 1 <= update.n_samples <= client.n_samples:
        return f"trained on {update.n_samples} samples, it registered {client.n_samples}"
    if update.steps < 1:
        return f"{update.steps} local steps; at least one"
    if not all(map(math.isfinite, update.scalars.values())):
        return "a figure that is not finite"
    if not 0.0 <= update.square_loss <= MAX_FIGURE:
        return f"a squared loss of {update.square_loss}"
    return large_metric(update.metrics)


def large_metric(metrics: Mapping[str, float]) -> str | None:
    """Name a finite metric that a mean over samples could not hold."""
    found = [name for name, value in metrics.items() if math.isfinite(value) and large(value)]
    if found:
        return f"metric {found[0][:64]!r} is {metrics[found[0]]:g}; at most {MAX_FIGURE:g}"
    return None


def large(value: float) -> bool:
    """Whether a figure is none that a mean over samples could still hold, or is not finite."""
    return not abs(value) <= MAX_FIGURE
