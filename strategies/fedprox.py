"""FedProx: the local loss holds on to the received weights.

    local loss L_k(w) + mu/2 |w - w_t|^2,   gradient g + mu (w - w_t)

Partial work counts: an update with fewer steps is as welcome as any. The server half is FedAvg.
Source: Li 2020, Alg. 2; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from strategies.fedavg import FedAvg
from strategies.layout import Role
from strategies.options import bounded
from strategies.values import Correction, Facts

if TYPE_CHECKING:
    from strategies.layout import Layout
    from strategies.values import Broadcast, ClientState


def proximal(layout: Layout, broadcast: Broadcast, mu: float) -> Correction:
    """The gradient of mu/2 |w - w_t|^2 over the trained tensors."""
    if not mu:
        return Correction()
    return Correction(anchor={n: broadcast.weights[n] for n in layout.names(Role.TRAINED)}, pull=mu)


@dataclass(frozen=True)
class FedProx(FedAvg):
    """``mu`` in [0, 100]; the paper's grid is 0.001, 0.01, 0.1, 1."""

    name: ClassVar[str] = "fedprox"
    FACTS: ClassVar[Facts] = Facts("FedAvg with a proximal term on the clients", "Li 2020, Alg. 2")

    mu: float = bounded(0.01, 0.0, 100.0)

    def _correction(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> Correction:
        return proximal(layout, broadcast, self.mu)
