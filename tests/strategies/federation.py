"""A federation in one process: real rules, hand-written local training on numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.base import Strategy
from strategies.layout import Layout, Role
from strategies.values import Broadcast, ClientState, ClientUpdate, Done, Phase, ServerState

Arrays = Mapping[str, NDArray[Any]]
Gradient = Callable[[Arrays], Arrays]


@dataclass(frozen=True)
class Client:
    """Local SGD on a given gradient."""

    gradient: Gradient
    steps: int = 5
    n_samples: int = 1
    lr: float = 0.05
    momentum: float = 0.0

    def train(self, layout: Layout, phase: Phase) -> Done:
        weights = {name: array.copy() for name, array in phase.start.items()}
        velocity = {name: np.zeros_like(weights[name]) for name in layout.names(Role.TRAINED)}
        for _ in range(self.steps):
            found = self.gradient(weights)
            for name in velocity:
                g = phase.correction.gradient(name, found[name], weights[name])
                velocity[name] = self.momentum * velocity[name] + g
                weights[name] = weights[name] - self.lr * velocity[name]
        return Done(weights, self.n_samples, self.steps, self.lr, self.momentum, start_loss=1.0)

    def answer(
        self, rule: Strategy, layout: Layout, broadcast: Broadcast, state: ClientState, name: str
    ) -> tuple[ClientUpdate, ClientState]:
        done = [self.train(layout, phase) for phase in rule.begin(layout, broadcast, state)]
        update, state = rule.end(layout, broadcast, done, state)
        return replace(update, client=name), state


def run(
    rule: Strategy, layout: Layout, weights: Arrays, clients: Sequence[Client], rounds: int
) -> ServerState:
    """``rounds`` rounds with every client in each."""
    state = rule.init(layout, weights, len(clients))
    mine = [rule.client_init(state.layout) for _ in clients]
    for _ in range(rounds):
        broadcast, updates = rule.configure(state), []
        for at, client in enumerate(clients):
            update, mine[at] = client.answer(rule, state.layout, broadcast, mine[at], f"c{at}")
            updates.append(update)
        state = rule.aggregate(state, updates)
    return state


def scalar(value: float = 0.0) -> tuple[Layout, Arrays]:
    """A model of one number, x."""
    arrays = {"x": np.array([value])}
    return Layout.of(arrays, {"x"}), arrays


def quadratic(a: float, e: float, **options: Any) -> Client:
    """A client whose loss is a/2 (x - e)^2."""
    return Client(lambda w: {"x": a * (w["x"] - e)}, **options)
