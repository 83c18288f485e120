"""Conformance of an owner's strategy, for its own tests:

    from strategies.own.conformance import check_own

    def test_my_strategy():
        check_own(MyStrategy(mu=0.1))

Captures it and runs rounds of a small model with made-up local training. Needs torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import AtollError, UsageError
from strategies.checking import check_broadcast
from strategies.fixed import Accumulator, real
from strategies.layout import Layout, Role
from strategies.own.captured import captured
from strategies.own.declared import Declared
from strategies.sums import total
from strategies.values import ClientState, Done

if TYPE_CHECKING:
    from strategies.layout import Arrays
    from strategies.own.base import OwnStrategy
    from strategies.values import ClientUpdate, ServerState

CLIENTS, ROUNDS, STEPS = 5, 3, 3
RATE, MOMENTUM = 0.05, 0.5
SHAPES = {"weight": (4, 3), "bias": (4,), "scale": ()}
CLOSE = 1e-4


def check_own(strategy: OwnStrategy) -> None:
    """Raise UsageError that says what of ``strategy`` does not hold.

    Its formulas can be captured. Three rounds repeat to the bit and stay finite. A client that comes back
    without its arrays is served. Sums in parts, or in whole numbers as hosts of populations take them, lead
    to the same model.
    """
    rule = Declared(strategy.name, captured(strategy))
    for dtype in ("float32", "float64"):
        try:
            one, updates = _rounds(rule, dtype)
            two, _ = _rounds(rule, dtype)
        except AtollError as error:
            raise UsageError(f"{strategy.name}, model in {dtype}: {error}") from None
        if not _same(one.weights, two.weights):
            raise UsageError(f"{strategy.name}: repeating the same rounds gives a different model")
        _check_parts(rule, one, updates)
        _answer(rule, one, ClientState(), 0, dtype)


def _rounds(rule: Declared, dtype: str) -> tuple[ServerState, list[ClientUpdate]]:
    """The state before the last round, and that round's updates."""
    draw = np.random.default_rng(0)
    arrays = {name: np.asarray(draw.normal(size=shape), dtype) for name, shape in SHAPES.items()}
    layout = Layout.of({**arrays, "mean": np.zeros(4, dtype)}, set(arrays), {"mean"})
    rule.fit(layout)
    state = rule.init(layout, {**arrays, "mean": np.zeros(4, dtype)}, 2 * CLIENTS)
    clients = {at: rule.client_init(layout) for at in range(CLIENTS)}
    before = state
    updates: list[ClientUpdate] = []
    for _ in range(ROUNDS):
        updates = []
        for at in clients:
            update, clients[at] = _answer(rule, state, clients[at], at, dtype)
            updates.append(update)
        before, state = state, rule.aggregate(state, updates)
    return before, updates


def _answer(
    rule: Declared, state: ServerState, mine: ClientState, client: int, dtype: str
) -> tuple[ClientUpdate, ClientState]:
    layout, broadcast = state.layout, rule.configure(state)
    check_broadcast(rule, layout, broadcast)
    (phase,) = rule.begin(layout, broadcast, mine)
    weights: dict[str, Any] = {name: np.array(array) for name, array in phase.start.items()}
    velocity: dict[str, Any] = {name: np.zeros_like(weights[name]) for name in layout.names(Role.TRAINED)}
    draw = np.random.default_rng([client, state.round])
    for _ in range(STEPS + client):
        for name in velocity:
            gradient = np.asarray(weights[name] - draw.normal(size=weights[name].shape), dtype)
            velocity[name] = MOMENTUM * velocity[name] + phase.correction.gradient(
                name, gradient, weights[name]
            )
        for name, speed in velocity.items():
            weights[name] = np.asarray(weights[name] - RATE * speed, dtype)
    done = Done(weights, 10 + client, STEPS + client, RATE, MOMENTUM)
    update, after = rule.end(layout, broadcast, [done], mine)
    return replace(update, client=f"c{client}"), after


def _check_parts(rule: Declared, state: ServerState, updates: list[ClientUpdate]) -> None:
    layout, wanted = state.layout, rule.aggregate(state, updates)
    contributions = [rule.contribute(layout, update) for update in updates]
    parted = total([total(contributions[:2]), total(contributions[2:])])
    whole = Accumulator(rule.grid(len(updates), sum(update.n_samples for update in updates)))
    for each in contributions:
        whole.add(each)
    for how, sums in (("in parts", parted), ("in whole numbers", real(whole.sums(), layout))):
        found = rule.finish(state, sums)
        for name, array in wanted.weights.items():
            if not np.allclose(found.weights[name], array, rtol=CLOSE, atol=CLOSE):
                raise UsageError(f"{rule.title}: sums taken {how} lead to another {name!r}")


def _same(one: Arrays, two: Arrays) -> bool:
    return all(np.array_equal(array, two[name]) for name, array in one.items())
