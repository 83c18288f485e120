"""The supervised contrastive loss, and calling a net with one of its modules watched. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import UsageError

MASKED = -1e9  # far below any similarity over a temperature; finite, so that 0 times it is 0


def supcon(features: Tensor, labels: Tensor, temperature: float = 0.07) -> Tensor:
    """Mean over rows i of -1/|P(i)| sum_{p in P(i)} log( exp(z_i z_p/T) / sum_{a != i} exp(z_i z_a/T) ).

    ``features`` [n, d], z their L2 normalisation; P(i): other rows with i's label; a row without any
    contributes 0. Source: Khosla 2020, L_out; papers/federated.md 1.
    """
    z = F.normalize(features, dim=1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    similar = (z @ z.T / temperature).masked_fill(itself, MASKED)
    log_share = similar - torch.logsumexp(similar, dim=1, keepdim=True)
    positive = ((labels[:, None] == labels[None, :]) & ~itself).to(z.dtype)
    return -((positive * log_share).sum(1) / positive.sum(1).clamp(min=1.0)).mean()


def submodule(net: nn.Module, name: str, rule: str) -> nn.Module:
    """The module ``name`` inside ``net``. UsageError when there is none, with those there are."""
    inner: dict[str, nn.Module] = dict(net.named_modules())
    if not name or name not in inner:
        known = ", ".join(list(inner)[1:9])
        raise UsageError(f"{rule}: the net has no module {name!r}; some of its modules: {known}")
    return inner[name]


def with_inputs(net: nn.Module, inner: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """(what ``net`` returns, what ``inner`` got), each in one forward."""
    seen: list[Tensor] = []

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0])

    handle = inner.register_forward_pre_hook(look)
    try:
        out = net(x)
    finally:
        handle.remove()
    return out, _once(seen)


def with_outputs(net: nn.Module, inner: nn.Module, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the output of ``net`` when ``change`` is applied to the output of ``inner``."""
    seen: list[Tensor] = []

    def replace(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        seen.append(out)
        return change(out)

    handle = inner.register_forward_hook(replace)
    try:
        result: Tensor = net(x)
    finally:
        handle.remove()
    _once(seen)
    return result


def _once(seen: list[Tensor]) -> Tensor:
    if len(seen) != 1:
        raise UsageError(f"the watched module runs {len(seen)} times a forward; name one that runs once")
    return seen[0]
