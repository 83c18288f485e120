"""SCAFFOLD: control variates that take the clients' drift out of every local step.

    local step   y <- y - lr (g - c_i + c)
    client       c_i' = c_i - c + (x - y) / (tau lr'),   lr' = lr / (1 - rho) under momentum rho
    server       x <- x + eta_g mean(y_i - x),   c <- c + (S/N) mean(c_i' - c_i)

c and c_i start at zero; means are over the S participants, unweighted, of N clients. Twice FedAvg's
traffic both ways. With momentum the local displacement is about tau lr / (1 - rho), and taking tau lr
makes c_i too large by 1/(1 - rho) and training diverge. The limit form is exact only for many steps;
for few it makes c_i' a moving average, c_i - c + s (mean corrected gradient) with s < 1, which has the
same fixed point. Another known fault of public code: counting local epochs as steps. A client that
was lost and returns without its c_i starts again at zero, which only the next rounds repair. At low
participation c_i go stale and SCAFFOLD may collapse (100 parties at 10 %: 0.10 in NIID-Bench's own
table as papers/federated.md 4 quotes it).
Source: Karimireddy 2020, Alg. 1, option II; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from strategies.fedavg import FedAvg
from strategies.layout import Role, zeros
from strategies.sums import Contribution, Sums, Term
from strategies.values import ClientState, Correction, Facts, Uploads, Work

if TYPE_CHECKING:
    from strategies.fixed import Grid
    from strategies.layout import Arrays, Layout, SlotMetas, Slots
    from strategies.values import Broadcast, ClientUpdate, ServerState

CONTROL = "control"


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """``server_lr`` is the paper's eta_g."""

    name: ClassVar[str] = "scaffold"
    FACTS: ClassVar[Facts] = Facts(
        "control variates against client drift",
        "Karimireddy 2020, Alg. 1, option II",
        needs_client_state=True,
        sgd_only=True,
        asynchronous=False,
    )
    BY_SAMPLES: ClassVar[bool] = False

    def extra_down(self, layout: Layout) -> SlotMetas:
        return {CONTROL: layout.metas_of(Role.TRAINED)}

    def extra_up(self, layout: Layout) -> SlotMetas:
        return {CONTROL: layout.metas_of(Role.TRAINED)}

    def client_init(self, layout: Layout) -> ClientState:
        return ClientState({CONTROL: zeros(layout, Role.TRAINED)})

    def contribute(self, layout: Layout, update: ClientUpdate) -> Contribution:
        base = super().contribute(layout, update)
        return Contribution({**base.terms, CONTROL: Term(1.0, update.extra[CONTROL])}, base.scalars)

    def term_metas(self, layout: Layout) -> SlotMetas:
        return {**super().term_metas(layout), **self.extra_up(layout)}

    def grid(self, clients: int, samples: int) -> Grid:
        base = super().grid(clients, samples)
        return replace(base, weights={**base.weights, CONTROL: clients})

    def _slots(self, layout: Layout, weights: Arrays) -> Slots:
        return {CONTROL: zeros(layout, Role.TRAINED)}

    def _extra(self, state: ServerState) -> Slots:
        return {CONTROL: state.slots[CONTROL]}

    def _correction(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> Correction:
        common, mine = broadcast.extra[CONTROL], self._mine(layout, state)
        return Correction(offset={name: common[name] - mine[name] for name in mine})

    def _uploads(self, work: Work) -> Uploads:
        first, common = work.done[0], work.broadcast.extra[CONTROL]
        mine = self._mine(work.layout, work.state)
        reach = first.steps * first.lr / (1.0 - first.momentum)
        change = {name: -common[name] - work.delta[name] / reach for name in mine}
        kept = {name: mine[name] + change[name] for name in mine}
        return Uploads(extra={CONTROL: change}, kept={CONTROL: kept})

    def _step(self, state: ServerState, mean: Arrays, sums: Sums) -> tuple[Arrays, Slots]:
        weights, _ = super()._step(state, mean, sums)
        before, change = state.slots[CONTROL], sums.arrays[CONTROL]
        return weights, {CONTROL: {n: before[n] + change[n] / state.n_clients for n in before}}

    def _mine(self, layout: Layout, state: ClientState) -> Arrays:
        return state.slots.get(CONTROL) or zeros(layout, Role.TRAINED)
