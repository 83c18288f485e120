"""FedRep: a common representation, and a head of each client's own that is trained first.

    head   on the broadcast's body, which stays as it is; begins as the client left it
    body   under that head, which stays as it is; its change goes up, averaged as FedAvg does

Without a head it is FedAvg. The head are the tensors that ``Federated(local=...)`` names; they never leave
their client. Each part is trained for the round's local epochs, so a round computes twice what FedAvg's does.
Normalisation statistics are those of the second part. Source: Collins 2021, Alg. 1; papers/federated.md 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from strategies.fedavg import FedAvg
from strategies.layout import Role
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.layout import Layout
    from strategies.values import Broadcast, ClientState, ClientUpdate, Done, Phase


@dataclass(frozen=True)
class FedRep(FedAvg):
    """FedAvg's options."""

    name: ClassVar[str] = "fedrep"
    FACTS: ClassVar[Facts] = Facts(
        "FedAvg of the body; each client's own head is trained first",
        "Collins 2021, Alg. 1",
        needs_client_state=True,
    )

    def begin(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> tuple[Phase, ...]:
        (start,) = super().begin(layout, broadcast, state)
        head, body = layout.names(Role.LOCAL), layout.names(Role.TRAINED)
        if not head:
            return (start,)
        common = {name: array for name, array in start.start.items() if name not in head}
        return (
            replace(start, frozen=body),
            replace(start, start=common, frozen=head, carried=head),
        )

    def end(
        self, layout: Layout, broadcast: Broadcast, done: Sequence[Done], state: ClientState, seed: int = 0
    ) -> tuple[ClientUpdate, ClientState]:
        return super().end(layout, broadcast, done[-1:], state, seed)
