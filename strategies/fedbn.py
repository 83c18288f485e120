"""FedBN: every client keeps its own batch normalisation.

The server averages all tensors but those of BatchNorm layers: weight, bias and running statistics stay
with the client, integer counters too. A layer counts as BatchNorm when its state has a running mean.
Public code that keeps only weight and bias averages statistics of unlike data, which is what the
method is there to avoid. For clients whose inputs differ (scanners, cameras); not for new clients.
Source: Li 2021, Alg. 1; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from atoll.errors import UsageError
from strategies.fedavg import FedAvg
from strategies.layout import Role
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.layout import Layout

MARK = "running_mean"


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg's options."""

    name: ClassVar[str] = "fedbn"
    FACTS: ClassVar[Facts] = Facts(
        "FedAvg, each client keeps its batch normalisation", "Li 2021, Alg. 1", needs_client_state=True
    )

    def adapt(self, layout: Layout) -> Layout:
        layers = {name.removesuffix(MARK) for name in layout.metas if name.split(".")[-1] == MARK}
        if not layers:
            raise UsageError("fedbn: the model has no BatchNorm layer; take fedavg")
        own = [name for name in layout.metas if name.removesuffix(name.split(".")[-1]) in layers]
        return layout.with_roles(Role.LOCAL, own)
