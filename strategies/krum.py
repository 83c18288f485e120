"""Krum and Multi-Krum: the updates that lie closest to their neighbours.

    score_i = sum of |d_i - d_j|^2 over the n - f - 2 nearest j;   w <- w + mean of the m lowest

n participants of which f may be faulty; it takes n >= 2f + 3. Distances are over the trained tensors
in float64, ties go to the first client by name. m = 1 is Krum. Source: Blanchard 2017, section 4;
papers/federated.md 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from atoll.errors import UsageError
from strategies.base import Strategy, advance
from strategies.layout import SHARED, Role
from strategies.options import bounded
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.layout import Array
    from strategies.values import ClientUpdate, ServerState


@dataclass(frozen=True)
class Krum(Strategy):
    """``faulty`` = f in 0..1000; ``keep`` = m in 1..1000. A round needs max(2f + 3, m + f) updates."""

    name: ClassVar[str] = "krum"
    FACTS: ClassVar[Facts] = Facts(
        "the updates nearest to their neighbours", "Blanchard 2017, section 4", linear=False, secure=False
    )

    faulty: int = bounded(1, 0, 1000)
    keep: int = bounded(1, 1, 1000)

    @property
    def min_updates(self) -> int:
        return max(2 * self.faulty + 3, self.keep + self.faulty)

    def _aggregate(self, state: ServerState, updates: Sequence[ClientUpdate]) -> ServerState:
        kept = self.chosen(squared_distances(state, updates))
        weights = {}
        for name in state.layout.names(*SHARED):
            stack = np.stack([updates[at].delta[name] for at in kept])
            weights[name] = state.weights[name] + np.mean(stack, axis=0)
        return advance(state, weights)

    def chosen(self, distances: Array) -> list[int]:
        """The ``keep`` updates of lowest score, ascending; [n, n] squared distances, n >= min_updates."""
        n = len(distances)
        if n < self.min_updates:
            raise UsageError(f"krum: {n} updates; {self.min_updates} for {self.faulty} faulty clients")
        others = np.sort(distances + np.diag(np.full(n, np.inf)), axis=1)
        scores = others[:, : n - self.faulty - 2].sum(axis=1)
        return sorted(np.argsort(scores, kind="stable")[: self.keep].tolist())


def squared_distances(state: ServerState, updates: Sequence[ClientUpdate]) -> Array:
    """[n, n], one tensor at a time: differences, not a Gram matrix, whose small distances cancel."""
    n = len(updates)
    distances = np.zeros((n, n))
    for name in state.layout.names(Role.TRAINED):
        flat = [np.asarray(update.delta[name], np.float64).reshape(-1) for update in updates]
        for i in range(n):
            for j in range(i):
                apart = flat[i] - flat[j]
                distances[i, j] += np.dot(apart, apart)
    return np.asarray(distances + distances.T)
