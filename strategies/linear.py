"""Strategies whose aggregate is a weighted sum: ``contribute`` on each update, ``finish`` on the total.

``finish(state, total(contribute(u) for u in updates))`` is the whole server half, so the sum may be
taken anywhere and in any grouping: in floats (``strategies.sums``), or in whole numbers, which add up to the
same bits in every grouping (``strategies.fixed``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from atoll.errors import UsageError
from strategies.base import Strategy, advance
from strategies.fixed import Grid
from strategies.layout import Role
from strategies.sums import Contribution, Sums, Term, divided, total

if TYPE_CHECKING:
    from strategies.fixed import FixedSums
    from strategies.layout import Arrays, Layout, SlotMetas, Slots
    from strategies.values import ClientUpdate, ServerState

    Source = Callable[[int], bytes]

TRAINED, AVERAGED = "trained", "averaged"
SAMPLES, WEIGHT = "samples", "weight"


@dataclass(frozen=True)
class Linear(Strategy):
    """The mean of the deltas, weighted by ``_weight``, then ``_step`` on the trained tensors.

    Averaged buffers (BatchNorm's statistics) get the mean by samples whatever the strategy: a momentum or
    an adaptive rate on a running variance makes it negative.
    """

    BY_SAMPLES: ClassVar[bool] = True  # else every client weighs 1

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

    def term_metas(self, layout: Layout) -> SlotMetas:
        """Arrays in each term of a contribution; their sums have the same names and shapes."""
        return {TRAINED: layout.metas_of(Role.TRAINED), AVERAGED: layout.metas_of(Role.AVERAGED)}

    def grid(self, clients: int, samples: int) -> Grid:
        """Bounds of the sums over ``clients`` that have registered ``samples`` together, from public numbers.

        UsageError where there is none: what clients weigh follows from what they measured.
        """
        if not self.facts.bounded:
            raise UsageError(
                f"{self.name} weighs clients by what they measured, without a bound that is known before; "
                "its sums are taken in floats, over individual updates"
            )
        weight = float(samples if self.BY_SAMPLES else clients)
        return Grid({TRAINED: weight, AVERAGED: samples}, {SAMPLES: samples, WEIGHT: weight})

    @property
    def whole(self) -> bool:
        """Whether sums are always taken in whole numbers."""
        return False

    def round_grid(self, clients: int, samples: int) -> Grid:
        """Bounds of a whole round's sums; raises as ``grid``."""
        return self.grid(clients, samples)

    def during(self, extra: Slots) -> Linear:
        """The strategy as a round's broadcast sets it: ``extra``, its slots or the server state's."""
        return self

    def released(self, sums: FixedSums, layout: Layout) -> FixedSums:
        """Return what the rest of the server may know of a round's sums."""
        return sums

    def hidden(self, sums: FixedSums, quorum: int, source: Source) -> FixedSums:
        """Return what a member of a secure round masks, of whose members at least ``quorum`` are summed.
        ``source``: of random bytes that nobody else knows."""
        return sums

    def finish(self, state: ServerState, sums: Sums) -> ServerState:
        """The next state from the sums over all participants."""
        mean = divided(sums.arrays[TRAINED], sums.scalars[WEIGHT])
        weights, slots = self._step(state, mean, sums)
        return advance(state, {**weights, **averaged(state, sums)}, slots)

    def _aggregate(self, state: ServerState, updates: Sequence[ClientUpdate]) -> ServerState:
        return self.finish(state, total(self.contribute(state.layout, update) for update in updates))

    def _weight(self, update: ClientUpdate) -> float:
        return float(update.n_samples) if self.BY_SAMPLES else 1.0

    def _step(self, state: ServerState, mean: Arrays, sums: Sums) -> tuple[Arrays, Slots]:
        """(new trained tensors, new slots) from the mean delta."""
        return {name: state.weights[name] + delta for name, delta in mean.items()}, state.slots


def averaged(state: ServerState, sums: Sums) -> Arrays:
    """The averaged buffers after a round."""
    mean = divided(sums.arrays[AVERAGED], sums.scalars[SAMPLES])
    return {name: state.weights[name] + delta for name, delta in mean.items()}


def _of(delta: Arrays, layout: Layout, role: Role) -> Arrays:
    return {name: delta[name] for name in layout.names(role)}
