"""OPWA: coordinates that few sparsified updates hold are not diluted by the others' zeros.

    n_j = clients whose update holds coordinate j
    w_j <- w_j + mask_j * sum_k p_k delta_kj,   mask_j = gamma if 1 <= n_j <= D else 1

Under top-k most coordinates are kept by one client only, and the mean shrinks them by its p_k. What an
update holds is where its decoded delta is not zero. Valid for sparse deltas; not with error feedback,
which returns the lost mass itself (together it counts twice). Not under secure aggregation, since the
server needs to see which coordinates each update holds. With gamma 10 it overshoots late at 10 % kept on
skewed data. The weights p_k stay those by samples: replacing them by functions of the ratios cost accuracy
where it was tried (papers/compression.md 2.1). The formula is a reconstruction there, not the paper's text.
Source: BCRS+OPWA, ICPP 2024 (arXiv 2408.14736); papers/compression.md 2.1 step 6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from atoll.errors import UsageError
from strategies.fedavg import FedAvg
from strategies.layout import Role
from strategies.linear import TRAINED
from strategies.options import bounded
from strategies.sums import Contribution, Sums, Term
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.fixed import Grid
    from strategies.layout import Arrays, Layout, SlotMetas, Slots
    from strategies.values import ClientUpdate, ServerState

HOLDERS = "holders"


@dataclass(frozen=True)
class Opwa(FedAvg):
    """``gamma`` in [1, 100], ``overlap`` = D in 1..1000; ``error_feedback``: clients keep residuals."""

    name: ClassVar[str] = "opwa"
    FACTS: ClassVar[Facts] = Facts(
        "mean of sparse updates, rare coordinates enlarged",
        "BCRS+OPWA (arXiv 2408.14736), papers/compression.md 2.1",
        secure=False,
    )

    gamma: float = bounded(5.0, 1.0, 100.0)
    overlap: int = bounded(1, 1, 1000)
    error_feedback: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.error_feedback:
            raise UsageError(
                "opwa and error feedback both restore what top-k leaves out, so together it counts twice; "
                "take fedavg with error feedback for clients that return, opwa without it otherwise"
            )

    def contribute(self, layout: Layout, update: ClientUpdate) -> Contribution:
        base = super().contribute(layout, update)
        held = {name: array != 0 for name, array in base.terms[TRAINED].arrays.items()}
        return Contribution({**base.terms, HOLDERS: Term(1.0, held)}, base.scalars)

    def term_metas(self, layout: Layout) -> SlotMetas:
        return {**super().term_metas(layout), HOLDERS: layout.metas_of(Role.TRAINED)}

    def grid(self, clients: int, samples: int) -> Grid:
        base = super().grid(clients, samples)
        return replace(base, weights={**base.weights, HOLDERS: clients})

    def _step(self, state: ServerState, mean: Arrays, sums: Sums) -> tuple[Arrays, Slots]:
        holders = sums.arrays[HOLDERS]
        enlarged = {
            name: np.where(holders[name] <= self.overlap, delta * self.gamma, delta)
            for name, delta in mean.items()
        }
        return super()._step(state, enlarged, sums)
