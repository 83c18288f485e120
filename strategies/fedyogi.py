"""FedYogi: as FedAdam, but v moves by a bounded amount.

    v <- v - (1 - b2) D^2 sign(v - D^2)

Source: Reddi 2021, Alg. 2; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from strategies.fedadam import FedAdam
from strategies.options import bounded
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.layout import Array


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAdam's options; ``server_lr`` 0.01."""

    name: ClassVar[str] = "fedyogi"
    FACTS: ClassVar[Facts] = Facts("Yogi on the server", "Reddi 2021, Alg. 2")

    server_lr: float = bounded(0.01, 0.0, 100.0, open_low=True)

    def _second(self, moment: Array, delta: Array) -> Array:
        square = delta * delta
        moved: Array = moment - (1.0 - self.b2) * square * np.sign(moment - square)
        return moved
