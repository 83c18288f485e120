"""Ditto: beside the common model, every client trains one of its own that is held near it.

    common     FedAvg
    personal   v_k <- v_k - lr (grad F_k(v_k) + lambda (v_k - w_t))

The personal model never leaves its client, begins as the common one, and is what the client evaluates
(``evaluate_with``). Twice the local computation. Source: Li 2021 (Ditto), Alg. 1; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from strategies.fedavg import FedAvg
from strategies.fedprox import proximal
from strategies.layout import SHARED
from strategies.options import bounded
from strategies.values import Facts, Phase, Uploads, Work

if TYPE_CHECKING:
    from strategies.layout import Arrays, Layout
    from strategies.values import Broadcast, ClientState

PERSONAL = "personal"


@dataclass(frozen=True)
class Ditto(FedAvg):
    """``lam`` = lambda in [0, 100]: 0 trains alone, a large one stays with the common model."""

    name: ClassVar[str] = "ditto"
    FACTS: ClassVar[Facts] = Facts(
        "FedAvg and a personal model near it", "Li 2021 (Ditto), Alg. 1", needs_client_state=True
    )

    lam: float = bounded(1.0, 0.0, 100.0)

    def begin(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> tuple[Phase, ...]:
        common = super().begin(layout, broadcast, state)
        mine = self.evaluate_with(broadcast, state)
        return (*common, Phase(mine, proximal(layout, broadcast, self.lam)))

    def evaluate_with(self, broadcast: Broadcast, state: ClientState) -> Arrays:
        return {**broadcast.weights, **state.slots.get(PERSONAL, {})}

    def _uploads(self, work: Work) -> Uploads:
        return Uploads(
            kept={PERSONAL: {n: work.done[1].weights[n].copy() for n in work.layout.names(*SHARED)}}
        )
