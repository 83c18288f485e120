"""FedOpt: the mean delta as the gradient of an adaptive optimizer on the server.

    D = mean delta;  m <- b1 m + (1 - b1) D;  v <- by the strategy;  w <- w + eta m / (sqrt(v) + tau)

m starts at 0 and v at tau^2, the least the paper allows. Averaged buffers get their plain mean. Flower
pairs arrays by position, so replies that list them in another order corrupt m and v; here they are
paired by name. Source: Reddi 2021, Alg. 2; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strategies.layout import Role, zeros
from strategies.linear import Linear
from strategies.options import bounded

if TYPE_CHECKING:
    from strategies.layout import Array, Arrays, Layout, Slots
    from strategies.sums import Sums
    from strategies.values import ServerState

FIRST, SECOND = "first_moment", "second_moment"


@dataclass(frozen=True)
class FedOpt(Linear):
    """``server_lr`` in (0, 100], ``tau`` in (0, 1]."""

    server_lr: float = bounded(0.1, 0.0, 100.0, open_low=True)
    tau: float = bounded(1e-3, 0.0, 1.0, open_low=True)

    def _slots(self, layout: Layout, weights: Arrays) -> Slots:
        first = zeros(layout, Role.TRAINED)
        return {FIRST: first, SECOND: {name: array + self.tau**2 for name, array in first.items()}}

    def _step(self, state: ServerState, mean: Arrays, sums: Sums) -> tuple[Arrays, Slots]:
        weights, firsts, seconds = {}, {}, {}
        for name, delta in mean.items():
            first = self._first(state.slots[FIRST][name], delta)
            second = self._second(state.slots[SECOND][name], delta)
            up, down = self._unbiased(state.round)
            step = (first * up) / (np.sqrt(second * down) + self.tau)
            weights[name] = state.weights[name] + self.server_lr * step
            firsts[name], seconds[name] = first, second
        return weights, {FIRST: firsts, SECOND: seconds}

    def _first(self, moment: Array, delta: Array) -> Array:
        return delta

    def _second(self, moment: Array, delta: Array) -> Array:
        raise TypeError(f"{type(self).__name__} does not say how it scales")

    def _unbiased(self, at_round: int) -> tuple[float, float]:
        """Factors of both moments."""
        return 1.0, 1.0
