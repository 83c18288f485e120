"""The declared optimizer over named parameters, as torch runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from atoll.job import OptimizerName, stepwise_groups

if TYPE_CHECKING:
    from atoll.job import Optimizer


def make_optimizer(
    parameters: Mapping[str, torch.nn.Parameter], spec: Optimizer
) -> torch.optim.Optimizer | None:
    """One torch group for each (lr_scale, weight decay), with its ``lr_scale`` beside torch's own keys;
    None without parameters. The caller sets ``lr`` before each step."""
    if not parameters:
        return None
    chosen = stepwise_groups(tuple(parameters), spec)
    by_group: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = chosen[name].weight_decay
        key = (chosen[name].lr_scale, spec.weight_decay if decay is None else decay)
        by_group.setdefault(key, []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": members, "lr_scale": scale, "weight_decay": decay}
        for (scale, decay), members in by_group.items()
    ]
    if spec.name is OptimizerName.ADAMW:
        return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)
    return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov, fused=True)
