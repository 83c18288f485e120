"""Strategies whose aggregate is a weighted sum: ``contribute`` on each update, ``finish`` on the total.

``finish(state, total(contribute(u) for u in updates))`` is the whole server half, so the sum may be
taken anywhere and in any grouping (``strategies.sums``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strategies.base import Strategy, advance
from strategies.layout import Role
from strategies.sums import Contribution, Sums, Term, divided, total

if TYPE_CHECKING:
    from strategies.layout import Arrays, Layout, Slots
    from strategies.values import ClientUpdate, ServerState

TRAINED, AVERAGED = "trained", "averaged"
SAMPLES, WEIGHT = "samples", "weight"


@dataclass(frozen=True)
class Linear(Strategy):
    """The mean of the deltas, weighted by ``_weight``, then ``_step`` on the trained tensors.

    Averaged buffers (BatchNorm's statistics) get the mean by samples whatever the strategy: a momentum or
    an adaptive rate on a running variance makes it negative.
    """

    def contribute(self, layout: Layout, update: ClientUpdate) -> Contribution:
        """Return the contribution of ``update`` to the round's sums."""
        weight = self._weight(update)
        return Contribution(
            {
                TRAINED: Term(weight, _of(update.delta, layout, Role.TRAINED)),
                AVERAGED: Term(float(update.n_samples), _of(update.delta, layout, Role.AVERAGED)),
            },
            {SAMPLES: float(update.n_samples), WEIGHT: weight},
        )

    def finish(self, state: ServerState, sums: Sums) -> ServerState:
        """The next state from the sums over all participants."""
        mean = divided(sums.arrays[TRAINED], sums.scalars[WEIGHT])
        weights, slots = self._step(state, mean, sums)
        return advance(state, {**weights, **averaged(state, sums)}, slots)

    def _aggregate(self, state: ServerState, updates: Sequence[ClientUpdate]) -> ServerState:
        return self.finish(state, total(self.contribute(state.layout, update) for update in updates))

    def _weight(self, update: ClientUpdate) -> float:
        return float(update.n_samples)

    def _step(self, state: ServerState, mean: Arrays, sums: Sums) -> tuple[Arrays, Slots]:
        """(new trained tensors, new slots) from the mean delta."""
        return {name: state.weights[name] + delta for name, delta in mean.items()}, state.slots


def averaged(state: ServerState, sums: Sums) -> Arrays:
    """The averaged buffers after a round."""
    mean = divided(sums.arrays[AVERAGED], sums.scalars[SAMPLES])
    return {name: state.weights[name] + delta for name, delta in mean.items()}


def _of(delta: Arrays, layout: Layout, role: Role) -> Arrays:
    return {name: delta[name] for name in layout.names(role)}
