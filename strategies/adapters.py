"""Low-rank adapters in a model's layout, by the names that peft gives their tensors.

    W = W0 + s B A,   A [r, d_in],   B [d_out, r]

X.lora_A.NAME.weight and X.lora_B.NAME.weight are the factors of the layer X, X.base_layer.weight is W0. The
scale s is in the graph. Source: LoRA (Hu 2021), section 4.1; papers/federated.md 7.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.errors import UsageError
from strategies.layout import Role

if TYPE_CHECKING:
    from strategies.layout import Layout

A = re.compile(r"(?P<layer>.+\.)lora_A(?P<name>\.[^.]+)?\.weight")
OTHER = re.compile(r".*\blora_embedding_[AB]\b.*")
"""Factors of an embedding: stored the other way round, and of a table that no product is made of."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Names of one layer's factors and of its own weight, which the layout may lack."""

    a: str
    b: str
    base: str


def adapters_of(rule: str, layout: Layout) -> tuple[Adapter, ...]:
    """Return the adapters whose B all clients train together, in the layout's order.

    Those that each client keeps are left out. UsageError, in ``rule``'s name, where there are none, and for
    adapters that are no product of two matrices of rank at most min(d_in, d_out): convolutions, embeddings.
    """
    found = []
    trained = set(layout.names(Role.TRAINED))
    for name in layout.metas:
        if OTHER.fullmatch(name) and name in trained:
            raise UsageError(f"{rule}: {name!r} adapts an embedding; leave it out of target_modules")
        at = A.fullmatch(name)
        if at is None:
            continue
        layer, label = at["layer"], at["name"] or ""
        adapter = Adapter(name, f"{layer}lora_B{label}.weight", f"{layer}base_layer.weight")
        if adapter.b in trained:
            _check(rule, layout, adapter)
            found.append(adapter)
    if not found:
        raise UsageError(
            f"{rule}: the model trains no adapter's B (X.lora_B.NAME.weight); wrap it in peft's "
            "get_peft_model, or take fedavg"
        )
    return tuple(found)


def _check(rule: str, layout: Layout, adapter: Adapter) -> None:
    a, b = layout.metas[adapter.a].shape, layout.metas[adapter.b].shape
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        raise UsageError(f"{rule}: {adapter.a!r} {a} and {adapter.b!r} {b} are not two matrices to multiply")
    if a[0] > min(a[1], b[0]):
        raise UsageError(
            f"{rule}: {adapter.a!r} has rank {a[0]}, its layer at most {min(a[1], b[0])}; lower r"
        )
    if layout.roles[adapter.a] is Role.LOCAL:
        raise UsageError(f"{rule}: {adapter.a!r} is local and its B is not; let both match local=")
