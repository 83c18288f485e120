"""Adapters of peft made ready for a federation, in the job file before capture. Needs torch.

FFA-LoRA (Sun 2024) and LoRA-FA (Zhang 2023) train B alone. With one A for all, the mean of B is the mean of
BA: ``fedavg`` is exact, and an update is half as large. papers/federated.md 7.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from atoll.errors import UsageError

FACTOR_A, FACTOR_B = ".lora_A.", ".lora_B."


def freeze_a(model: nn.Module, seed: int = 0) -> nn.Module:
    """Return ``model`` with every A frozen, its r rows orthonormal and drawn from ``seed``.

    LoRA-FA's step is g_B (A A^T)^-1 / s^2, then the optimizer's. Here A A^T = I, so the job's own AdamW is
    LoRA-FA's but for its epsilon, which s^2 scales; SGD's is at a rate of lr / s^2. Before training only:
    UsageError where a B is not 0 or a rank exceeds d_in, and where there is no adapter. A convolution's
    A [r, c, h, w] has orthonormal rows of c h w elements.
    """
    draw = torch.Generator().manual_seed(seed)
    for name, a in _factors(model, FACTOR_A):
        rank, width = a.shape[0], a[0].numel()
        if rank > width:
            raise UsageError(f"{name!r} has rank {rank} and {width} inputs; lower r")
        b = model.get_parameter(name.replace(FACTOR_A, FACTOR_B))
        if b.detach().any():
            raise UsageError(
                f"{name!r}: its B is trained already and belongs to its A; begin with a new adapter"
            )
        q, _ = torch.linalg.qr(torch.randn(width, rank, generator=draw, dtype=torch.float64))
        with torch.no_grad():
            a.copy_(q.T.reshape(a.shape))
        a.requires_grad_(False)
    return model


def check_scaling(model: nn.Module, scaling: float) -> None:
    """UsageError unless every adapted layer of ``model`` is W + ``scaling`` B A, as FLoRA folds it."""
    for name, layer in model.named_modules():
        scales = getattr(layer, "scaling", None)
        if not isinstance(scales, dict) or not hasattr(layer, "lora_A"):
            continue
        if len(getattr(layer, "lora_magnitude_vector", ())):
            raise UsageError(
                f"flora: {name!r} is a DoRA layer, which is not a sum of W and BA; leave out use_dora"
            )
        if getattr(layer, "fan_in_fan_out", False):
            raise UsageError(
                f"flora: {name!r} stores W as fan_in_fan_out; take fedsvd, or leave the layer out"
            )
        if other := [scale for scale in scales.values() if not math.isclose(scale, scaling, rel_tol=1e-6)]:
            raise UsageError(
                f"flora: {name!r} scales its adapter by {other[0]:g}, the job's option by {scaling:g}; set "
                f'Federated("flora", {{"scaling": {other[0]:g}}}), one for all layers'
            )


def _factors(model: nn.Module, word: str) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's factors of one kind. UsageError where there are none."""
    found = [(name, tensor) for name, tensor in model.named_parameters() if word in name]
    if not found:
        raise UsageError(
            f"no parameter of {type(model).__name__} is named '{word}'; wrap it in get_peft_model first"
        )
    yield from found
