"""FedAvg: the mean of the clients' models, weighted by their samples.

    w <- w + eta_s * sum_k p_k (w_k - w),   p_k = n_k / sum n

With ``server_lr`` 1 this is sum_k p_k w_k. Source: McMahan 2017, Alg. 1; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from strategies.linear import Linear
from strategies.options import bounded
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.layout import Arrays, Slots
    from strategies.sums import Sums
    from strategies.values import ServerState


@dataclass(frozen=True)
class FedAvg(Linear):
    """``server_lr`` in (0, 10]."""

    name: ClassVar[str] = "fedavg"
    FACTS: ClassVar[Facts] = Facts("mean of the models by samples", "McMahan 2017, Alg. 1")

    server_lr: float = bounded(1.0, 0.0, 10.0, open_low=True)

    def _step(self, state: ServerState, mean: Arrays, sums: Sums) -> tuple[Arrays, Slots]:
        return {n: state.weights[n] + delta * self.server_lr for n, delta in mean.items()}, state.slots
