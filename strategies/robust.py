"""Shared part of the strategies that outvote faulty clients: every update is seen, samples do not count.

A client that lies about its samples would otherwise outweigh all others. Not linear: no partial sums,
no secure aggregation. Under label skew honest clients with rare classes look faulty, and are outvoted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strategies.base import Strategy, advance
from strategies.layout import SHARED

if TYPE_CHECKING:
    from strategies.layout import Array
    from strategies.values import ClientUpdate, ServerState


@dataclass(frozen=True)
class CoordinateWise(Strategy):
    """w <- w + combine(deltas), tensor by tensor, averaged buffers too."""

    def _aggregate(self, state: ServerState, updates: Sequence[ClientUpdate]) -> ServerState:
        weights = {}
        for name in state.layout.names(*SHARED):
            stack = np.stack([update.delta[name] for update in updates])
            weights[name] = state.weights[name] + self._combine(stack)
        return advance(state, weights)

    def _combine(self, stack: Array) -> Array:
        """[clients, ...] -> [...]."""
        raise TypeError(f"{type(self).__name__} does not say how it combines")
