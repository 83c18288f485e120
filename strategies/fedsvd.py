"""FedSVD: clients train B alone; the server turns both factors so that A's rows are singular vectors of BA.

    clients   B_k <- local training,   A as received
    server    B <- sum_k p_k B_k,   U S V^T = B A,   A <- V_r^T,   B <- U_r S_r

All clients share A within a round, so (sum p_k B_k) A is the mean of the B_k A: exact, as FFA-LoRA is, with
the same upload. A travels down only. The SVD is that of two triangular factors of r x r, in float64.

B A has its rows in A's row space, and so has the new A: the method turns the basis of that space and never
leaves it. Plain SGD sees no basis: from an orthonormal A it takes FFA-LoRA's steps to rounding. What the turn
changes is an optimizer that goes by coordinates, as AdamW does, and noise's share in each.
Source: Lee 2025 (FedSVD); papers/federated.md 7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from strategies.adapters import adapters_of
from strategies.fedavg import FedAvg
from strategies.layout import Role
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.layout import Array, Arrays, Layout, Slots
    from strategies.sums import Sums
    from strategies.values import Broadcast, ClientState, Phase, ServerState


@dataclass(frozen=True)
class FedSVD(FedAvg):
    """FedAvg's options. Whatever else is trained (a head, magnitudes) is averaged."""

    name: ClassVar[str] = "fedsvd"
    FACTS: ClassVar[Facts] = Facts(
        "adapters: the mean of B, then A and B by the SVD of BA",
        "Lee 2025 (FedSVD); papers/federated.md 7",
        asynchronous=False,
    )

    def adapt(self, layout: Layout) -> Layout:
        return layout.with_roles(Role.TOLD, self._a(layout))

    def begin(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> tuple[Phase, ...]:
        (phase,) = super().begin(layout, broadcast, state)
        return (replace(phase, frozen=self._a(layout)),)

    def _a(self, layout: Layout) -> tuple[str, ...]:
        return tuple(adapter.a for adapter in adapters_of(self.name, layout))

    def _step(self, state: ServerState, mean: Arrays, sums: Sums) -> tuple[Arrays, Slots]:
        found, slots = super()._step(state, mean, sums)
        weights = dict(found)
        for adapter in adapters_of(self.name, state.layout):
            factors = weights[adapter.b], state.weights[adapter.a]
            if all(np.isfinite(factor).all() for factor in factors):  # else refused afterwards, by name
                weights[adapter.b], weights[adapter.a] = turned(*factors)
        return weights, slots


def turned(b: Array, a: Array) -> tuple[Array, Array]:
    """Return U_r S_r [d_out, r] and V_r^T [r, d_in] of ``b a``, in float64; r <= min(d_out, d_in).

    A's rows are orthonormal and span ``a``'s even where ``b`` is 0 or lacks rank.
    """
    q_out, r_out = np.linalg.qr(b.astype(np.float64))
    q_in, r_in = np.linalg.qr(a.astype(np.float64).T)
    u, s, vt = np.linalg.svd(r_out @ r_in.T)
    return (q_out @ u) * s, vt @ q_in.T
