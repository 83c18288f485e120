"""q-FedAvg: clients with a higher loss count more, so that accuracy spreads less between them.

    D_k = L (w - w_k),  L = 1 / lr;   F_k = local loss at the round's start
    w <- w - sum_k F_k^q D_k / sum_k (q F_k^(q-1) |D_k|^2 + L F_k^q)

q = 0 is the unweighted mean. F_k must be the loss at the received weights: Flower takes whatever the client
calls train_loss, usually that after or during training, and so weighs by another quantity. 1e-10 is added to
F_k. A job's server knows the round's lr and refuses another. F_k and w_k it has to believe, so this is no
strategy where clients may lie: with q < 1 one that claims a loss of 0 swells the divisor until nothing moves.
Source: Li 2020 (fair resource allocation), Alg. 2; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from atoll.errors import BadUpdate, UsageError
from strategies.checking import RATE
from strategies.layout import Role
from strategies.linear import TRAINED, WEIGHT, Linear
from strategies.options import bounded
from strategies.sums import Contribution, Term
from strategies.values import Facts, Scalar, Uploads, Work

if TYPE_CHECKING:
    from strategies.layout import Layout
    from strategies.values import ClientUpdate

LOSS = "start_loss"
FLOOR = 1e-10
MAX_SHARE = 1e34
"""Largest share of a client in a sum, so that the sum of 4,096 of them is still a float32."""
LEAST_SHARE = 1e-30
"""Losses near 0 to a high q vanish as float32; where all of them do, a round shall not be 0 / 0."""


@dataclass(frozen=True)
class QFedAvg(Linear):
    """``q`` in [0, 10]."""

    name: ClassVar[str] = "qfedavg"
    FACTS: ClassVar[Facts] = Facts(
        "clients with a higher loss count more",
        "Li 2020 (fair resource allocation), Alg. 2",
        bounded=False,
        secure=False,
        needs_start_loss=True,
        asynchronous=False,
    )

    q: float = bounded(0.1, 0.0, 10.0)

    def scalars_up(self) -> tuple[Scalar, ...]:
        return (Scalar(LOSS, 0.0, 1e6), Scalar(RATE, 1e-12, 1e3))

    def check(self, layout: Layout, update: ClientUpdate) -> None:
        """BadUpdate for one that could make a sum overflow."""
        trained = [update.delta[name] for name in layout.names(Role.TRAINED)]
        largest = max((float(np.abs(array).max(initial=0.0)) for array in trained), default=0.0)
        weight, divisor = self._shares(update, largest**2 * sum(array.size for array in trained))
        share = max(weight, weight * largest, divisor)
        if not share <= MAX_SHARE:
            raise BadUpdate(
                f"a start loss of {update.scalars[LOSS]:g} at the rate {update.scalars[RATE]:g} and a change "
                f"of up to {largest:.3g} weigh {share:.3g} with q = {self.q:g}; at most {MAX_SHARE:g}"
            )

    def contribute(self, layout: Layout, update: ClientUpdate) -> Contribution:
        base = super().contribute(layout, update)
        trained = base.terms[TRAINED].arrays
        square = sum(float(np.sum(np.square(a, dtype=np.float64))) for a in trained.values())
        weight, divisor = self._shares(update, square)
        pushed = Term(weight, trained)
        return Contribution({**base.terms, TRAINED: pushed}, {**base.scalars, WEIGHT: divisor})

    def _shares(self, update: ClientUpdate, square: float) -> tuple[float, float]:
        """(factor of the delta, part of the divisor) where the delta's squared norm is ``square``."""
        reach, loss = 1.0 / update.scalars[RATE], update.scalars[LOSS] + FLOOR
        weight = max(LEAST_SHARE, reach * loss**self.q)
        return weight, self.q * loss ** (self.q - 1.0) * (reach**2 * square) + weight

    def _uploads(self, work: Work) -> Uploads:
        first = work.done[0]
        if first.start_loss is None:
            raise UsageError("qfedavg needs the loss at the round's start; measure it before training")
        return Uploads(scalars={LOSS: first.start_loss, RATE: first.lr})
