"""FLoRA: the mean of the clients' BA is folded into the layer, and every round begins with a new adapter.

    A = [p_1 A_1; ...; p_K A_K],   B = [B_1, ..., B_K]
    W <- W + s B A = W + s sum_k p_k B_k A_k,   A <- drawn anew,   B <- 0

Exact with both factors trained, and no adapter's rank binds it: after T rounds W - W0 may be of rank T K r.
The paper sends the stack, rank sum r_k, to clients who fold it themselves. A client that misses a round would
need every stack since; so the folded W goes down, d_out d_in a layer, which K stacked ranks exceed from
K r = d_out d_in / (d_out + d_in) on. Up go the factors alone. A contribution is summed as a product,

    B_k A_k = B A + B dA_k + dB_k A + dB_k dA_k

whose first terms follow from mean changes. Factors padded with zeros stay so, as the gradient of each is a
product with the other: unlike ranks would sum exactly too.
Source: Wang 2024 (FLoRA), section 3; papers/federated.md 7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar
from zlib import crc32

import numpy as np

from atoll.errors import UsageError
from strategies.adapters import adapters_of
from strategies.layout import Role
from strategies.linear import WEIGHT, Linear
from strategies.options import within
from strategies.sums import Contribution, Term
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.adapters import Adapter
    from strategies.fixed import Grid
    from strategies.layout import Array, Arrays, Layout, SlotMetas, Slots
    from strategies.sums import Sums
    from strategies.values import ClientUpdate, ServerState

PRODUCTS = "products"
WIDE = ("float32", "float64")
"""Types of a layer's weight that small changes can be added to."""


@dataclass(frozen=True)
class FLoRA(Linear):
    """``scaling`` = s in (0, 1000]: lora_alpha / r, as the module has it; ``seed``: of the new A's."""

    name: ClassVar[str] = "flora"
    FACTS: ClassVar[Facts] = Facts(
        "adapters: the mean of BA is folded into the layer, both factors begin anew",
        "Wang 2024 (FLoRA), section 3; papers/federated.md 7",
        asynchronous=False,
    )

    scaling: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        within(self.name, "scaling", self.scaling, 0.0, 1000.0, open_low=True)
        within(self.name, "seed", self.seed, 0, 2**31)

    def adapt(self, layout: Layout) -> Layout:
        found = self._adapters(layout)
        for adapter in found:
            _check(layout, adapter)
        return layout.with_roles(Role.TOLD, [adapter.base for adapter in found])

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
