"""Updates that began with an older model than the one that they change (``Federated(buffer=...)``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strategies.fixed import Accumulator, FixedSums, real
from strategies.layout import pieces
from strategies.linear import AVERAGED, SAMPLES, TRAINED, WEIGHT
from strategies.sums import Sums

if TYPE_CHECKING:
    from collections.abc import Callable

    from strategies.fixed import Grid
    from strategies.layout import Array, Arrays, Layout
    from strategies.sums import Contribution
    from strategies.values import ClientUpdate

    Behind = Callable[[], Arrays]

CHANGES = {TRAINED: WEIGHT, AVERAGED: SAMPLES}
"""Terms whose arrays are changes of a model, and the scalar that they weigh together."""


def aged(
    update: ClientUpdate, weight: float, base: Arrays | None = None, now: Arrays | None = None
) -> ClientUpdate:
    """An update whose change counts ``weight`` times, in the dtypes that it has.

    ``base`` and ``now``: broadcast that it began with and the newest one, for strategies that average models.
    Their clients' models count, seen from the newest, else what the clients have changed.
    """
    delta = update.delta
    if base is not None and now is not None:
        delta = {name: base[name] + change - now[name] for name, change in delta.items()}
    if weight != 1.0:
        delta = {name: change * np.asarray(weight, change.dtype) for name, change in delta.items()}
    return replace(update, delta=delta)


class VersionSums:
    """Whole-number sums of updates that began with several models: exact by model, whoever hosted the
    clients, and weighed where models are joined.

        S = sum over ages t of s_t (T_t + W_t (b_t - w)),   the oldest first

    T_t: total of the updates that began t models ago, W_t their weight, s_t that of their age. b_t - w, the
    model that they began with less the newest, is for strategies that average models. Of one model there are
    several totals where its updates lie on several grids.
    """

    def __init__(self, grid: Grid, layout: Layout, weight: Callable[[int], float]) -> None:
        """``grid``: of sums that name none. ``weight``: share that an update counts with, by age."""
        self.grid, self.clients = grid, 0
        self._layout, self._weight = layout, weight
        self._age, self._behind = 0, None  # type: tuple[int, Behind | None]
        self._held = Accumulator(grid)
        self._arrays: dict[str, dict[str, Array]] = {}
        self._scalars: dict[str, float] = {}

    def add(
        self,
        part: Contribution | FixedSums,
        age: int = 0,
        grid: Grid | None = None,
        behind: Behind | None = None,
    ) -> None:
        """Add one, those of one age and grid in a row. ``behind``: returns b_t - w. Raises as
        ``Accumulator.add``."""
        grid = grid or self.grid
        if (age, grid) != (self._age, self._held.grid):
            self._fold()
            self._age, self._held = age, Accumulator(grid)
        self._behind = behind
        self._held.add(part)
        self.clients += part.clients if isinstance(part, FixedSums) else 1

    def total(self, released: Callable[[FixedSums], FixedSums]) -> Sums:
        """The sums as a strategy finishes them; where all are of the newest model, of what is
        ``released``."""
        if not self._arrays and not self._age:
            return real(released(self._held.sums()), self._layout)
        self._fold()
        arrays = {
            term: {name: array.astype(self._kind(name)) for name, array in held.items()}
            for term, held in self._arrays.items()
        }
        return Sums(arrays, self._scalars, self.clients)

    def _fold(self) -> None:
        """Weigh what one model's updates add up to."""
        found = self._held.sums()
        if not found.clients:
            return
        grid, weight = found.grid, self._weight(self._age)
        scalars = {name: value * grid.scalar_unit(name) for name, value in found.scalars.items()}
        behind = {} if self._behind is None else self._behind()
        for term, arrays in found.arrays.items():
            own = weight if term in CHANGES else 1.0
            into = self._arrays.setdefault(term, {})
            for name, array in arrays.items():
                kept = into.setdefault(name, np.zeros(array.shape)).reshape(-1)
                source = array.reshape(-1)
                for here in pieces(source.size):
                    kept[here] += np.multiply(source[here], own * grid.unit(term), dtype=np.float64)
                if term in CHANGES and name in behind:
                    kept += own * scalars[CHANGES[term]] * behind[name].reshape(-1)
        self._scalars = {name: self._scalars.get(name, 0.0) + value for name, value in scalars.items()}

    def _kind(self, name: str) -> Any:
        return np.result_type(self._layout.metas[name].dtype, np.float32)
