"""FLoRA: the mean of the clients' BA is folded into the layer, and every round begins with a new adapter.

    A = [p_1 A_1; ...; p_K A_K],   B = [B_1, ..., B_K]
    W <- W + s B A = W + s sum_k p_k B_k A_k,   A <- drawn anew,   B <- 0

Exact with both factors trained, and no adapter's rank binds it: after T rounds W - W0 may be of rank T K r.
The paper sends the stack, rank sum r_k, to clients who fold it themselves. A client that misses a round would
need every stack since; so the folded W goes down, d_out d_in a layer, which K stacked ranks exceed from
K r = d_out d_in / (d_out + d_in) on. Up go the factors alone. A contribution is summed as a product,

    B_k A_k = B A + B dA_k + dB_k A + dB_k dA_k

whose first terms follow from mean changes.

Clients may have lower ranks than the module (``ranks``). One of rank r_k begins with the first r_k rows of A
and columns of B, the rest 0. The rest stays 0, as the gradient of each factor is a product with the other.
Its rows of dA beyond r_k are sent as 0: B + dB_k is 0 there, so no product has them.
Source: Wang 2024 (FLoRA), section 3; papers/federated.md 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar
from zlib import crc32

import numpy as np

from atoll.errors import UsageError
from strategies.adapters import adapters_of
from strategies.layout import Role
from strategies.linear import WEIGHT, Linear
from strategies.options import bounded
from strategies.sums import Contribution, Term
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.adapters import Adapter
    from strategies.fixed import Grid
    from strategies.layout import Array, Arrays, Layout, SlotMetas, Slots
    from strategies.sums import Sums
    from strategies.values import Broadcast, ClientState, ClientUpdate, Done, ServerState

PRODUCTS = "products"
WIDE = ("float32", "float64")
"""Types of a layer's weight that small changes can be added to."""


@dataclass(frozen=True)
class FLoRA(Linear):
    """``scaling`` = s in (0, 1000]: lora_alpha / r, as the module has it; ``seed``: of the new A's.

    ``ranks``: "laptop=8 phone-*=2", by shell wildcards over clients' names; the first that matches counts,
    who matches none has the module's rank.
    """

    name: ClassVar[str] = "flora"
    FACTS: ClassVar[Facts] = Facts(
        "adapters: the mean of BA is folded into the layer, both factors are reset",
        "Wang 2024 (FLoRA), section 3; papers/federated.md 7",
        asynchronous=False,
    )

    scaling: float = bounded(1.0, 0.0, 1000.0, open_low=True)
    seed: int = bounded(0, 0, 2**31)
    ranks: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ranks(self.ranks)  # refused at submit

    def adapt(self, layout: Layout) -> Layout:
        found = self._adapters(layout)
        for adapter in found:
            _check(layout, adapter)
        most = max(layout.metas[adapter.a].shape[0] for adapter in found)
        if high := [f"{pattern}={rank}" for pattern, rank in _ranks(self.ranks) if rank > most]:
            raise UsageError(
                f"flora: ranks {high[0][:64]!r}; the module's is {most}, build it with the highest"
            )
        return layout.with_roles(Role.TOLD, [adapter.base for adapter in found])

    def end(
        self, layout: Layout, broadcast: Broadcast, done: Sequence[Done], state: ClientState, seed: int = 0
    ) -> tuple[ClientUpdate, ClientState]:
        update, after = super().end(layout, broadcast, done, state, seed)
        rank = self._rank_of(state.client)
        if rank is None:
            return update, after
        names = [adapter.a for adapter in self._adapters(layout)]
        narrow = {name: _first_rows(update.delta[name], rank) for name in names}
        return replace(update, delta={**update.delta, **narrow}), after

    def _own_start(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> Arrays:
        rank = self._rank_of(state.client)
        if rank is None:
            return {}
        start = {}
        for adapter in self._adapters(layout):
            start[adapter.a] = _first_rows(broadcast.weights[adapter.a], rank)
            start[adapter.b] = _first_rows(broadcast.weights[adapter.b].T, rank).T
        return start

    def contribute(self, layout: Layout, update: ClientUpdate) -> Contribution:
        common = super().contribute(layout, update)
        products = {
            adapter.base: np.asarray(
                _wide(update.delta[adapter.b]) @ _wide(update.delta[adapter.a]),
                layout.metas[adapter.base].dtype,
            )
            for adapter in self._adapters(layout)
        }
        return replace(common, terms={**common.terms, PRODUCTS: Term(self._weight(update), products)})

    def term_metas(self, layout: Layout) -> SlotMetas:
        products = {adapter.base: layout.metas[adapter.base] for adapter in self._adapters(layout)}
        return {**super().term_metas(layout), PRODUCTS: products}

    def grid(self, clients: int, samples: int) -> Grid:
        common = super().grid(clients, samples)
        return replace(common, weights={**common.weights, PRODUCTS: samples})

    def _step(self, state: ServerState, mean: Arrays, sums: Sums) -> tuple[Arrays, Slots]:
        found, slots = super()._step(state, mean, sums)
        weights = dict(found)
        for adapter in self._adapters(state.layout):
            a, b = _wide(state.weights[adapter.a]), _wide(state.weights[adapter.b])
            product = _wide(sums.arrays[PRODUCTS][adapter.base]) / sums.scalars[WEIGHT]
            joined = b @ (a + mean[adapter.a]) + mean[adapter.b] @ a + product
            weights[adapter.base] = state.weights[adapter.base] + self.scaling * joined
            weights[adapter.a] = self._drawn(adapter.a, a, state.round)
            weights[adapter.b] = np.zeros_like(b)
        return weights, slots

    def _drawn(self, name: str, like: Array, at_round: int) -> Array:
        """A as peft begins it: uniform within 1 / sqrt(d_in)."""
        draw = np.random.default_rng([self.seed, at_round, crc32(name.encode())])
        bound = like.shape[1] ** -0.5
        return draw.uniform(-bound, bound, like.shape)

    def _adapters(self, layout: Layout) -> tuple[Adapter, ...]:
        return adapters_of(self.name, layout)

    @property
    def trains_plainly(self) -> bool:
        return not self.ranks

    def _rank_of(self, client: str) -> int | None:
        """Rank of a client's adapters; None: the module's."""
        return next((rank for pattern, rank in _ranks(self.ranks) if fnmatchcase(client, pattern)), None)


def _ranks(text: str) -> tuple[tuple[str, int], ...]:
    """Patterns and their ranks, in the order in which they are tried. UsageError for anything else."""
    found = []
    for part in text.split():
        pattern, _, rank = part.rpartition("=")
        if not pattern or not rank.isdecimal() or int(rank) < 1:
            raise UsageError(f"flora: ranks {part[:64]!r}; write NAME=RANK, as in 'laptop=8 phone-*=2'")
        found.append((pattern, int(rank)))
    return tuple(found)


def _first_rows(array: Array, count: int) -> Array:
    """``array`` with zeros in all rows behind the first ``count``."""
    found = np.array(array)
    found[count:] = 0
    return found


def _check(layout: Layout, adapter: Adapter) -> None:
    """UsageError where the layer's weight cannot take B A."""
    meta = layout.metas.get(adapter.base)
    out, into = layout.metas[adapter.b].shape[0], layout.metas[adapter.a].shape[1]
    if layout.roles[adapter.a] is not Role.TRAINED:
        raise UsageError(f"flora: {adapter.a!r} is frozen; take fedavg or fedsvd, or train both factors")
    if meta is None or meta.shape != (out, into) or meta.dtype not in WIDE:
        found = "missing" if meta is None else f"{meta.dtype} {meta.shape}"
        raise UsageError(f"flora: {adapter.base!r} is {found}; it takes {(out, into)} in float32")
    if layout.roles[adapter.base] not in (Role.STILL, Role.TOLD):
        raise UsageError(f"flora: {adapter.base!r} is trained beside its adapter; freeze it")


def _wide(array: Array) -> Array:
    return np.asarray(array, np.float64)
