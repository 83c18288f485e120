"""FedAvgM: momentum on the server.

    m <- beta m + d,   w <- w - eta_s m            d = -(mean delta), the pseudo-gradient
    with ``nesterov``: w <- w - eta_s (d + beta m)

m starts at zero. Averaged buffers are left out of the momentum. Flower's class has beta 0, that is
FedAvg, unless it is set, and pairs arrays by position, so it goes wrong when a reply lists them in
another order; here they are paired by name. Source: Hsu 2019, section 4.2; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from strategies.fedavg import FedAvg
from strategies.layout import Role, zeros
from strategies.options import bounded
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.layout import Arrays, Layout, Slots
    from strategies.sums import Sums
    from strategies.values import ServerState

MOMENTUM = "momentum"


@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """``beta`` in [0, 1); the paper's best lie between 0.7 and 0.997, lower for more skew."""

    name: ClassVar[str] = "fedavgm"
    FACTS: ClassVar[Facts] = Facts("FedAvg with momentum on the server", "Hsu 2019, section 4.2")

    beta: float = bounded(0.9, 0.0, 0.9999)
    nesterov: bool = False

    def _slots(self, layout: Layout, weights: Arrays) -> Slots:
        return {MOMENTUM: zeros(layout, Role.TRAINED)} if self.beta else {}

    def _step(self, state: ServerState, mean: Arrays, sums: Sums) -> tuple[Arrays, Slots]:
        if not self.beta:
            return super()._step(state, mean, sums)
        weights, momenta = {}, {}
        for name, delta in mean.items():
            moved = self.beta * state.slots[MOMENTUM][name] - delta
            step = self.beta * moved - delta if self.nesterov else moved
            weights[name] = state.weights[name] - self.server_lr * step
            momenta[name] = moved
        return weights, {MOMENTUM: momenta}
