"""MOON: local features are drawn to the received model's and away from the client's previous one.

    L = CE + mu * -log( e^{cos(z, z_g)/T} / (e^{cos(z, z_g)/T} + e^{cos(z, z_p)/T}) )

z, z_g, z_p: features of the net in training, of the received one and of the client's last. The loss and
both frozen copies are in the wrapper (``strategies.moon_module``); this file fills the copies each round:
``anchor`` with what was received, ``previous`` with what the client ended its last round with, or the
received one in its first. The server half is FedAvg; the copies never travel. Three forwards a step.
Source: Li 2021 (MOON), Alg. 1; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from atoll.errors import UsageError
from strategies.fedavg import FedAvg
from strategies.layout import SHARED, Role
from strategies.values import Facts, Uploads
from strategies.wrapped import NET

if TYPE_CHECKING:
    from strategies.layout import Arrays, Layout
    from strategies.values import Broadcast, ClientState, Work

ANCHOR, PREVIOUS = "anchor.", "previous."
KEPT = "previous"


@dataclass(frozen=True)
class Moon(FedAvg):
    """FedAvg's options; mu and T are the wrapper's."""

    name: ClassVar[str] = "moon"
    FACTS: ClassVar[Facts] = Facts(
        "features near the common model's, away from the last local one's",
        "Li 2021 (MOON), Alg. 1",
        needs_client_state=True,
        changes_loss=True,
    )

    def adapt(self, layout: Layout) -> Layout:
        copies = [name for name in layout.metas if name.startswith((ANCHOR, PREVIOUS))]
        if not copies:
            raise UsageError("moon: the model holds no copies of itself; wrap it in moon_module.Moon")
        return layout.with_roles(Role.STILL, copies)

    def _own_start(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> Arrays:
        shared = {n.removeprefix(NET): broadcast.weights[n] for n in _copied(layout)}
        last = state.slots.get(KEPT, shared)
        return {ANCHOR + name: array for name, array in shared.items()} | {
            PREVIOUS + name: array for name, array in last.items()
        }

    def _uploads(self, work: Work) -> Uploads:
        ended = work.done[0].weights
        kept = {name.removeprefix(NET): ended[name].copy() for name in _copied(work.layout)}
        return Uploads(kept={KEPT: kept})


def _copied(layout: Layout) -> tuple[str, ...]:
    """The owner's tensors that change from round to round."""
    return tuple(name for name in layout.names(*SHARED) if name.startswith(NET))
