"""FedAdam: Adam on the server.

    m <- b1 m + (1 - b1) D,   v <- b2 v + (1 - b2) D^2,   w <- w + eta m / (sqrt(v) + tau)

``bias_correction`` divides m by 1 - b1^(t+1) and v by 1 - b2^(t+1), t the round from 0; the paper has
none. Source: Reddi 2021, Alg. 2; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from strategies.fedopt import FedOpt
from strategies.options import bounded
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.layout import Array


@dataclass(frozen=True)
class FedAdam(FedOpt):
    """``b1``, ``b2`` in [0, 1)."""

    name: ClassVar[str] = "fedadam"
    FACTS: ClassVar[Facts] = Facts("Adam on the server", "Reddi 2021, Alg. 2")

    b1: float = bounded(0.9, 0.0, 0.9999)
    b2: float = bounded(0.99, 0.0, 0.999999)
    bias_correction: bool = False

    def _first(self, moment: Array, delta: Array) -> Array:
        return self.b1 * moment + (1.0 - self.b1) * delta

    def _second(self, moment: Array, delta: Array) -> Array:
        return self.b2 * moment + (1.0 - self.b2) * delta * delta

    def _unbiased(self, at_round: int) -> tuple[float, float]:
        if not self.bias_correction:
            return 1.0, 1.0
        return 1.0 / (1.0 - self.b1 ** (at_round + 1)), 1.0 / (1.0 - self.b2 ** (at_round + 1))
