"""FedAsync: the model moves towards each client's as it comes, the less the older it is.

    w <- (1 - a_t) w + a_t w_k,   a_t = alpha (1 + t) ** -staleness,   t: models since the client began

The client may hold on to what it received (``mu``), as FedProx does. The staleness weight is the job's. It is
made for a buffer of one update; of several it takes the mean.
Source: Xie 2019, Alg. 1; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from strategies.fedprox import proximal
from strategies.linear import Linear
from strategies.options import bounded
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.layout import Arrays, Layout, Slots
    from strategies.sums import Sums
    from strategies.values import Broadcast, ClientState, Correction, ServerState


@dataclass(frozen=True)
class FedAsync(Linear):
    """``alpha`` in (0, 1], ``mu`` in [0, 100]."""

    name: ClassVar[str] = "fedasync"
    FACTS: ClassVar[Facts] = Facts(
        "each client's model mixed in as it comes", "Xie 2019, Alg. 1", needs_base=True
    )

    alpha: float = bounded(0.6, 0.0, 1.0, open_low=True)
    mu: float = bounded(0.0, 0.0, 100.0)

    def _correction(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> Correction:
        return proximal(layout, broadcast, self.mu)

    def _step(self, state: ServerState, mean: Arrays, sums: Sums) -> tuple[Arrays, Slots]:
        return {n: state.weights[n] + delta * self.alpha for n, delta in mean.items()}, state.slots
