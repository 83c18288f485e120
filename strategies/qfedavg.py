"""q-FedAvg: clients with a higher loss count more, so that accuracy spreads less between them.

    D_k = L (w - w_k),  L = 1 / lr;   F_k = local loss at the round's start
    w <- w - sum_k F_k^q D_k / sum_k (q F_k^(q-1) |D_k|^2 + L F_k^q)

q = 0 is the unweighted mean. F_k must be the loss at the received weights: Flower takes whatever the
client calls train_loss, usually that after or during training, and so weighs by another quantity.
1e-10 is added to F_k. Source: Li 2020 (fair resource allocation), Alg. 2; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from atoll.errors import UsageError
from strategies.base import Facts, Scalar, Uploads, Work
from strategies.linear import TRAINED, WEIGHT, Linear
from strategies.options import within
from strategies.sums import Contribution, Term

if TYPE_CHECKING:
    from strategies.base import ClientUpdate
    from strategies.layout import Layout

LOSS, RATE = "start_loss", "lr"
FLOOR = 1e-10


@dataclass(frozen=True)
class QFedAvg(Linear):
    """``q`` in [0, 10]."""

    name: ClassVar[str] = "qfedavg"
    FACTS: ClassVar[Facts] = Facts(
        "clients with a higher loss count more",
        "Li 2020 (fair resource allocation), Alg. 2",
        secure=False,
        needs_start_loss=True,
    )

    q: float = 0.1

    def __post_init__(self) -> None:
        within(self.name, "q", self.q, 0.0, 10.0)

    def scalars_up(self) -> tuple[Scalar, ...]:
        return (Scalar(LOSS, 0.0, 1e6), Scalar(RATE, 1e-12, 1e3))

    def contribute(self, layout: Layout, update: ClientUpdate) -> Contribution:
        base = super().contribute(layout, update)
        reach, loss = 1.0 / update.scalars[RATE], update.scalars[LOSS] + FLOOR
        trained = base.terms[TRAINED].arrays
        square = reach**2 * sum(float(np.sum(np.square(a, dtype=np.float64))) for a in trained.values())
        divisor = self.q * loss ** (self.q - 1.0) * square + reach * loss**self.q
        pushed = Term(reach * loss**self.q, trained)
        return Contribution({**base.terms, TRAINED: pushed}, {**base.scalars, WEIGHT: divisor})

    def _uploads(self, work: Work) -> Uploads:
        first = work.done[0]
        if first.start_loss is None:
            raise UsageError("qfedavg needs the loss at the round's start; measure it before training")
        return Uploads(scalars={LOSS: first.start_loss, RATE: first.lr})
