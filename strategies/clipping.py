"""A data owner's bound on what one update may say: its norm clipped and Gaussian noise added by the client.

    u' = u min(1, C / |u|_2) + N(0, (z C)^2),    u all arrays of the update together

The client clips before any codec, so that what a codec drops and adds later is of the noised update alone.
Source: McMahan 2018 (arXiv 1710.06963), Alg. 1, flat clipping, with the noise added by each client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strategies.layout import pieces

if TYPE_CHECKING:
    from strategies.base import Strategy
    from strategies.layout import Array, Layout


@dataclass(frozen=True, slots=True)
class Clipping:
    """``norm``: C, the L2 bound, 0: none; ``noise``: z, the noise's standard deviation over C."""

    norm: float = 0.0
    noise: float = 0.0

    def applied(self, arrays: Mapping[str, Array], secret: bytes) -> dict[str, Array]:
        """Return an update's arrays clipped and noised; shapes and dtypes stay.

        ``secret`` seeds the noise: the same arrays under the same secret get the same noise, and nobody who
        does not know it can subtract the noise.
        """
        if not self.norm:
            return dict(arrays)
        scale = min(1.0, self.norm / max(_norm(arrays), 1e-300))
        draw = np.random.Generator(np.random.PCG64(int.from_bytes(secret, "little")))
        return {name: self._one(arrays[name], scale, draw) for name in sorted(arrays)}

    def _one(self, array: Array, scale: float, draw: np.random.Generator) -> Array:
        found = np.empty(array.shape, array.dtype)
        flat, source = found.reshape(-1), array.reshape(-1)
        for part in pieces(flat.size):
            values = source[part].astype(np.float64) * scale
            if self.noise:
                values += draw.normal(0.0, self.noise * self.norm, values.size)
            flat[part] = values
        return found


UNCLIPPED = Clipping()


def unclippable(strategy: Strategy, layout: Layout) -> str:
    """Return why the updates of a strategy cannot be clipped, empty where they can.

    What a client keeps (SCAFFOLD's controls, FedDyn's gradients) would contradict what it sent; a strategy's
    own arrays and an initial loss say more than the delta that the norm bounds.
    """
    facts = strategy.facts
    if facts.needs_client_state or strategy.extra_up(layout) or facts.needs_start_loss:
        return f"strategy {strategy.name} sends or keeps more than its model's difference"
    return ""


def _norm(arrays: Mapping[str, Array]) -> float:
    """L2 norm of all arrays together, summed in float64."""
    total = 0.0
    for array in arrays.values():
        flat = array.reshape(-1)
        for part in pieces(flat.size):
            piece = flat[part].astype(np.float64)
            total += float(np.dot(piece, piece))
    return math.sqrt(total)
