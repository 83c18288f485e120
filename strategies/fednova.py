"""FedNova: deltas normalised by how far each client's optimizer would carry a constant gradient.

    a_k = sum over local steps of the weight of that step's gradient in w_0 - w_tau, over lr
    w  <- w + (sum_k p_k a_k) * sum_k p_k (w_k - w) / a_k

so a client that took more steps does not pull harder. It removes the bias of unequal step counts,
not the drift of each client. The count a_k is found by running the optimizer on gradient 1, which for plain
SGD gives tau. For momentum rho it is (tau - rho(1 - rho^tau)/(1 - rho))/(1 - rho); with a proximal term mu
(1 - (1 - lr mu)^tau)/(lr mu); and is right for Nesterov and for both together too. With AdamW there
is no such sum: the strategy refuses it. Under quantity skew FedNova may collapse (0.10 against FedAvg's
0.72 in the authors' own CIFAR-10 table as papers/federated.md 4 quotes it): large p_k times large
a_k make an effective step that diverges. ``beta`` adds FedAvgM's server momentum.
Source: Wang 2020, eq. 9 and table 1; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from strategies.fedavgm import FedAvgM
from strategies.fedprox import proximal
from strategies.linear import SAMPLES, TRAINED
from strategies.options import bounded
from strategies.sums import Contribution, Sums, Term, divided
from strategies.values import Correction, Facts, Scalar, Uploads, Work

if TYPE_CHECKING:
    from strategies.fixed import Grid
    from strategies.layout import Arrays, Layout, Slots
    from strategies.values import Broadcast, ClientState, ClientUpdate, ServerState

STEPS = "effective_steps"
WEIGHTED_STEPS = "weighted_steps"
MAX_EFFECTIVE_STEPS = 1e9


def effective_steps(
    steps: int, lr: float, momentum: float = 0.0, nesterov: bool = False, mu: float = 0.0
) -> float:
    """Return the distance in lr of a constant gradient that ``steps`` local steps cover; ``steps`` for plain
    SGD."""
    if not momentum and not mu:
        return float(steps)
    gone = velocity = 0.0
    for _ in range(steps):
        gradient = 1.0 - lr * mu * gone
        velocity = momentum * velocity + gradient
        gone += gradient + momentum * velocity if nesterov else velocity
    return gone


@dataclass(frozen=True)
class FedNova(FedAvgM):
    """``mu`` in [0, 100]: FedProx's proximal term on the clients."""

    name: ClassVar[str] = "fednova"
    FACTS: ClassVar[Facts] = Facts(
        "deltas normalised by local steps", "Wang 2020, eq. 9 and table 1", sgd_only=True
    )

    beta: float = bounded(0.0, 0.0, 0.9999)
    mu: float = bounded(0.0, 0.0, 100.0)

    def scalars_up(self) -> tuple[Scalar, ...]:
        # Never below 1: a tiny one would let one client's delta through enlarged at will.
        return (Scalar(STEPS, 1.0, MAX_EFFECTIVE_STEPS),)

    def contribute(self, layout: Layout, update: ClientUpdate) -> Contribution:
        base = super().contribute(layout, update)
        steps = update.scalars[STEPS]
        normalised = Term(update.n_samples / steps, base.terms[TRAINED].arrays)
        return Contribution(
            {**base.terms, TRAINED: normalised},
            {**base.scalars, WEIGHTED_STEPS: update.n_samples * steps},
        )

    def grid(self, clients: int, samples: int) -> Grid:
        base = super().grid(clients, samples)
        return replace(base, scalars={**base.scalars, WEIGHTED_STEPS: samples * MAX_EFFECTIVE_STEPS})

    def _correction(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> Correction:
        return proximal(layout, broadcast, self.mu)

    def _uploads(self, work: Work) -> Uploads:
        first = work.done[0]
        steps = effective_steps(first.steps, first.lr, first.momentum, first.nesterov, self.mu)
        return Uploads(scalars={STEPS: steps})

    def _step(self, state: ServerState, mean: Arrays, sums: Sums) -> tuple[Arrays, Slots]:
        scale = sums.scalars[SAMPLES] / sums.scalars[WEIGHTED_STEPS]
        return super()._step(state, divided(mean, scale), sums)
