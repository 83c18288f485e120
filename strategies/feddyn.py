"""FedDyn: each client's loss is bent so that all local optima meet at the common one.

    local loss   L_k(w) - <h_k, w> + alpha/2 |w - w_t|^2,   gradient g - h_k + alpha (w - w_t)
    client       h_k <- h_k - alpha (w_k - w_t)
    server       H <- H - alpha/N sum_S (w_k - w_t),   w <- mean_S(w_k) - H/alpha

h_k and H start at zero; means over the participants are unweighted. The state costs no traffic.
Gradients may grow with h_k: clip them (10 is a common norm in public code); a larger ``alpha`` is
steadier and slower. Source: Acar 2021, Alg. 1; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from strategies.layout import Role, zeros
from strategies.linear import TRAINED, Linear
from strategies.options import bounded
from strategies.values import ClientState, Correction, Facts, Uploads, Work

if TYPE_CHECKING:
    from strategies.layout import Arrays, Layout, Slots
    from strategies.sums import Sums
    from strategies.values import Broadcast, ServerState

DUAL = "dual"


@dataclass(frozen=True)
class FedDyn(Linear):
    """``alpha`` in (0, 100]."""

    name: ClassVar[str] = "feddyn"
    FACTS: ClassVar[Facts] = Facts(
        "dynamic regularisation: local optima agree",
        "Acar 2021, Alg. 1",
        needs_client_state=True,
        asynchronous=False,
    )
    BY_SAMPLES: ClassVar[bool] = False

    alpha: float = bounded(0.1, 0.0, 100.0, open_low=True)

    def client_init(self, layout: Layout) -> ClientState:
        return ClientState({DUAL: zeros(layout, Role.TRAINED)})

    def _slots(self, layout: Layout, weights: Arrays) -> Slots:
        return {DUAL: zeros(layout, Role.TRAINED)}

    def _correction(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> Correction:
        offset = {name: -dual for name, dual in self._mine(layout, state).items()}
        return Correction(offset, {name: broadcast.weights[name] for name in offset}, self.alpha)

    def _uploads(self, work: Work) -> Uploads:
        mine = self._mine(work.layout, work.state)
        return Uploads(kept={DUAL: {name: mine[name] - self.alpha * work.delta[name] for name in mine}})

    def _step(self, state: ServerState, mean: Arrays, sums: Sums) -> tuple[Arrays, Slots]:
        share = self.alpha / state.n_clients
        summed = sums.arrays[TRAINED]
        dual = {name: held - share * summed[name] for name, held in state.slots[DUAL].items()}
        weights = {n: state.weights[n] + delta - dual[n] / self.alpha for n, delta in mean.items()}
        return weights, {DUAL: dual}

    def _mine(self, layout: Layout, state: ClientState) -> Arrays:
        return state.slots.get(DUAL) or zeros(layout, Role.TRAINED)
