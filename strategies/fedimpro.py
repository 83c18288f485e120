"""FedImpro: the upper layers also learn from features drawn out of a distribution common to all.

The net is split; below, real features; above, real ones and h' ~ N(mu[y'], sigma[y']) per class. The
loss is in the wrapper (``strategies.fedimpro_module``):

    L = CE(high(low(x)), y) + r CE(high(h'), y'),   r = round / ramp_rounds, at most max_weight

Each client keeps moving estimates mu_m, sigma_m of its own features and uploads them with how often it
saw each class; the server takes

    mu <- beta mu + (1 - beta) sum_m c_m mu_m / sum_m c_m     (sigma alike), c_m by class

where the c_m of a client add up to its samples. Public code and the paper take the plain mean over
participants, which clients without a class dilute with what they were sent; classes that nobody saw
stay as they are. Another fault of public code: its moving weight is min(1, d/5000) = 1 at the usual
split, so the "moving estimate" is the last batch's mean. ``noise`` adds N(0, noise^2) to mu_m and sigma_m
before they leave (the paper's sigma_eps); the counts tell which classes a client has. Extra traffic
2 C d floats each way, C more up. Source: Tang 2024, section 4.3; papers/federated.md 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from atoll.errors import BadUpdate, UsageError
from strategies.base import advance
from strategies.fedavg import FedAvg
from strategies.fedimpro_graph import check_statistics
from strategies.layout import Role
from strategies.options import bounded
from strategies.sums import Contribution, Sums, Term
from strategies.values import Facts, Uploads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.flow.walk import Walked
    from strategies.fixed import Grid
    from strategies.layout import Array, Arrays, Layout, SlotMetas
    from strategies.values import Broadcast, ClientState, ClientUpdate, ServerState, Work

WEIGHT = "fedimpro_weight"
COUNTS = "fedimpro_counts"
PAIRS = {
    "fedimpro_shared_means": "fedimpro_means",
    "fedimpro_shared_stds": "fedimpro_stds",
}
"""The server's tensor and the clients' estimate of it."""
STATISTICS = "statistics"


@dataclass(frozen=True)
class FedImpro(FedAvg):
    """``beta`` in [0, 1); ``ramp_rounds`` in [1, 1e6]; ``max_weight`` in [0, 10]; ``noise`` in [0, 10]."""

    name: ClassVar[str] = "fedimpro"
    FACTS: ClassVar[Facts] = Facts(
        "upper layers also learn from common feature statistics",
        "Tang 2024, section 4.3",
        changes_loss=True,
        asynchronous=False,
    )

    beta: float = bounded(0.0, 0.0, 0.9999)
    ramp_rounds: float = bounded(500.0, 1.0, 1e6)
    max_weight: float = bounded(2.0, 0.0, 10.0)
    noise: float = bounded(0.0, 0.0, 10.0)

    def adapt(self, layout: Layout) -> Layout:
        mine = (*PAIRS.values(), COUNTS)
        missing = [name for name in (WEIGHT, *PAIRS, *mine) if name not in layout.metas]
        if missing:
            raise UsageError(
                f"fedimpro: the model has no {missing[0]!r}; wrap it in strategies.fedimpro_module.FedImpro"
            )
        return layout.with_roles(Role.TOLD, (WEIGHT, *PAIRS)).with_roles(Role.STILL, mine)

    @property
    def statistics(self) -> tuple[str, ...]:
        return (*PAIRS.values(), COUNTS)

    def check_statistics(self, walked: Sequence[Walked], least: int) -> None:
        means, stds = PAIRS.values()
        check_statistics(walked, (means, stds, COUNTS), least)

    def extra_up(self, layout: Layout) -> SlotMetas:
        return {STATISTICS: {name: layout.metas[name] for name in (*PAIRS.values(), COUNTS)}}

    def check(self, layout: Layout, update: ClientUpdate) -> None:
        found = update.extra[STATISTICS]
        if found[COUNTS].min() < 0:
            raise BadUpdate(f"a class was seen {found[COUNTS].min():g} times")

    def contribute(self, layout: Layout, update: ClientUpdate) -> Contribution:
        base, found = super().contribute(layout, update), update.extra[STATISTICS]
        counts = found[COUNTS].astype(np.float64)
        counts *= update.n_samples / max(float(counts.sum()), 1.0)
        weighted = {name: found[name] * _by_class(counts, found[name]) for name in PAIRS.values()}
        return Contribution({**base.terms, STATISTICS: Term(1.0, {**weighted, COUNTS: counts})}, base.scalars)

    def term_metas(self, layout: Layout) -> SlotMetas:
        return {**super().term_metas(layout), **self.extra_up(layout)}

    def grid(self, clients: int, samples: int) -> Grid:
        base = super().grid(clients, samples)
        # A client weighs 1, but what it adds is already multiplied by its counts, which make up its samples.
        return replace(base, weights={**base.weights, STATISTICS: samples})

    def finish(self, state: ServerState, sums: Sums) -> ServerState:
        after = super().finish(state, sums)
        found = sums.arrays[STATISTICS]
        told = {}
        for shared, own in PAIRS.items():
            before = state.weights[shared]
            counts = _by_class(found[COUNTS], before)
            mean = found[own] / np.maximum(counts, np.finfo(np.float32).tiny)
            told[shared] = np.where(counts > 0, self.beta * before + (1.0 - self.beta) * mean, before)
        return advance(state, {**after.weights, **told}, after.slots)

    def _told(self, state: ServerState) -> Arrays:
        weight = min(self.max_weight, state.round / self.ramp_rounds)
        return {WEIGHT: np.asarray(weight, state.layout.metas[WEIGHT].dtype)}

    def _own_start(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> Arrays:
        counts = layout.metas[COUNTS]
        start = {own: broadcast.weights[shared] for shared, own in PAIRS.items()}
        return {**start, COUNTS: np.zeros(counts.shape, counts.dtype)}

    def _uploads(self, work: Work) -> Uploads:
        found = {name: work.done[0].weights[name] for name in (*PAIRS.values(), COUNTS)}
        if self.noise:
            draw = np.random.default_rng([work.seed, work.broadcast.round])
            for name in PAIRS.values():
                added = draw.normal(0.0, self.noise, found[name].shape)
                found[name] = (found[name] + added).astype(found[name].dtype)
        return Uploads(extra={STATISTICS: {name: array.copy() for name, array in found.items()}})


def _by_class(counts: Array, like: Array) -> Array:
    """[C] to [C, 1, ...] with as many dimensions as ``like``."""
    return counts.reshape(-1, *[1] * (like.ndim - 1))
