"""FedAdagrad: steps shrink with the sum of squares of all deltas.

    v <- v + D^2,   w <- w + eta D / (sqrt(v) + tau)

Source: Reddi 2021, Alg. 2 with b1 = 0; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from strategies.fedopt import FedOpt
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.layout import Array


@dataclass(frozen=True)
class FedAdagrad(FedOpt):
    """FedOpt's options."""

    name: ClassVar[str] = "fedadagrad"
    FACTS: ClassVar[Facts] = Facts("Adagrad on the server", "Reddi 2021, Alg. 2")

    def _second(self, moment: Array, delta: Array) -> Array:
        grown: Array = moment + delta * delta
        return grown
