"""Frozen weights of which the smallest half is left out, and an adapter of what is missing. Needs torch.

SALR keeps the large entries of a frozen W0 and puts the best approximation of rank r of the others beside:

    W = M W0 + U V        M: the largest (1 - sparsity) d k entries; U V from the SVD of (1 - M) W0

The mean square error is at most 1 - r / min(d, k) of that of pruning alone, as r of min(d, k) singular values
are kept, the largest. What is stored is a bit an entry, the entries that are kept, U and V: of 16-bit weights
1/16 + (1 - sparsity) + r (d + k) / (d k) of the dense bytes. What is trained is peft's, on top of W.

A worker makes W of these again in each forward and backward, and no micro-batch in flight keeps it
(``atoll.standing``). Source: SALR as in papers/federated.md 7; its kernels that multiply by a bitmap are not.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from atoll.errors import UsageError
from strategies.quantised_module import InParts, frozen_layers

M = TypeVar("M", bound=nn.Module)


def salr(module: M, sparsity: float = 0.5, rank: int = 8, layers: str = "*") -> M:
    """Prune frozen weights of ``module``'s linear layers, in place, and return ``module``.

    The layers are those of ``quantise_frozen``: frozen, of their own, no adapter, whose name matches
    ``layers``. ``sparsity``: share of a weight's entries that is left out, of the smallest magnitude, above 0
    and below 1; ``rank``: 0 to min(d, k). UsageError otherwise, and where there is no such layer.
    """
    if not 0.0 < sparsity < 1.0:
        raise UsageError(f"salr: sparsity = {sparsity}; give a share above 0 and below 1")
    found = frozen_layers(module, layers)
    if not found:
        raise UsageError(
            f"salr: no linear layer that matches {layers!r} has a frozen weight of its own; call "
            "get_peft_model first, or requires_grad_(False) on the base"
        )
    for name, _, weight in found:
        if weight.is_meta or not weight.is_floating_point():
            raise UsageError(f"salr: {name}.weight is {weight.dtype} on {weight.device}; load it first")
        if not 0 <= rank <= min(weight.shape):
            raise UsageError(f"salr: rank {rank} must be 0 to {min(weight.shape)} at {name}")
    for _, layer, weight in found:
        form = Pruned(tuple(weight.shape), sparsity, rank)
        parametrize.register_parametrization(layer, "weight", form, unsafe=True)
    return module


class Pruned(InParts):
    """Weight [d, k] from a bitmap [ceil(d k / 8)], the kept entries in order, U [d, r] and V [r, k]."""

    def __init__(self, shape: tuple[int, ...], sparsity: float, rank: int) -> None:
        super().__init__()
        self.shape, self.sparsity, self.rank = shape, sparsity, rank
        self.bits = 2 ** torch.arange(8, dtype=torch.uint8)

    def forward(self, bitmap: Tensor, kept: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Return the weight."""
        held = bitmap.unsqueeze(-1).bitwise_and(self.bits.to(bitmap.device)).ne(0)
        mask = held.flatten()[: self.shape[0] * self.shape[1]].view(self.shape)
        sparse = torch.zeros_like(mask, dtype=kept.dtype).masked_scatter(mask, kept)
        return torch.addmm(sparse, u, v)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return bitmap, kept entries and both factors."""
        with torch.no_grad():
            flat = weight.detach().flatten()
            kept = flat.abs().topk(max(1, flat.numel() - int(self.sparsity * flat.numel()))).indices
            mask = torch.zeros(flat.numel(), dtype=torch.bool, device=flat.device)
            mask[kept] = True
            padded = nn.functional.pad(mask, (0, -mask.numel() % 8)).view(-1, 8)
            bitmap = (padded * self.bits.to(flat.device)).sum(dim=1, dtype=torch.uint8)
            missing = torch.where(mask, torch.zeros_like(flat), flat).view(self.shape)
            u, s, v = torch.linalg.svd(missing.double(), full_matrices=False)
            root = s[: self.rank].sqrt()
            left, right = u[:, : self.rank] * root, root.unsqueeze(1) * v[: self.rank]
        return bitmap, flat[mask].clone(), left.to(flat.dtype), right.contiguous().to(flat.dtype)
