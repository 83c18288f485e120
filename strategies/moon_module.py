"""MOON's local loss as a wrapper of the owner's net, before capture. Needs torch."""

from __future__ import annotations

import copy
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import UsageError
from strategies.supcon_module import submodule, with_inputs


class Moon(nn.Module):
    """``net(x)`` [B, C]; ``forward(x, y)`` is the loss, contrastive on what enters the module ``head``.

    The paper adds a projection head of 256 outputs below the classifier; give the net one, if wanted.
    The copies ``anchor`` and ``previous`` are frozen and stay in evaluation mode.
    """

    def __init__(self, net: nn.Module, head: str, *, mu: float = 1.0, temperature: float = 0.5) -> None:
        super().__init__()
        submodule(net, head, "moon")
        if mu < 0.0 or temperature <= 0.0:
            raise UsageError(f"moon: mu {mu:g} >= 0, temperature {temperature:g} > 0")
        self.net, self.head, self.mu, self.temperature = net, head, mu, temperature
        self.anchor = copy.deepcopy(net).requires_grad_(False)
        self.previous = copy.deepcopy(net).requires_grad_(False)
        self.train(net.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.anchor.train(False)
        self.previous.train(False)
        return self

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.training:
            return F.cross_entropy(self.net(x), y)
        logits, mine = with_inputs(self.net, self.net.get_submodule(self.head), x)
        with torch.no_grad():
            common, last = (
                with_inputs(net, net.get_submodule(self.head), x)[1] for net in (self.anchor, self.previous)
            )
        contrast = moon_loss(mine, common, last, self.temperature)
        return F.cross_entropy(logits, y) + self.mu * contrast


def moon_loss(mine: Tensor, common: Tensor, last: Tensor, temperature: float) -> Tensor:
    """Mean over rows of -log of the share of ``common``; [B, ...] each, flattened."""
    z = mine.flatten(1)
    pull = F.cosine_similarity(z, common.flatten(1), dim=1) / temperature
    push = F.cosine_similarity(z, last.flatten(1), dim=1) / temperature
    return F.softplus(push - pull).mean()
