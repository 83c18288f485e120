"""FedImpro's local loss as a wrapper of the owner's net, before capture. Needs torch.

Dimensions: B batch, N drawn features, C classes, D elements of one split-layer feature.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import UsageError
from atoll.federated import MIN_BATCH
from strategies.supcon_module import submodule, with_outputs


class FedImpro(nn.Module):
    """``net(x)`` [B, C], split after its module ``split``; ``forward(x, y)`` is the loss.

    In training one forward, in which what ``split`` returns is extended by N = C (floor(B/C) + 1) features
    drawn from the shared per-class normal distribution; they carry no gradient below. Then the moving
    estimates of the classes with at least ``min_samples`` samples in the batch, which are counted:

        mean <- beta mean + (1 - beta) batch mean      (std alike, at most ``max_std``)

    Estimates and counts go to the model's owner: a class of fewer samples would show them. Data owners
    refuse a ``min_samples`` below their own floor.

    In evaluation plain CE. ``split`` must be the only way from below to above: a block's end, not a layer
    that a skip connection passes by. BatchNorm above the split normalises real and drawn features as one
    batch; below it, it sees only real data.
    """

    fedimpro_shared_means: Tensor
    fedimpro_shared_stds: Tensor
    fedimpro_means: Tensor
    fedimpro_stds: Tensor
    fedimpro_counts: Tensor
    fedimpro_weight: Tensor

    def __init__(
        self,
        net: nn.Module,
        split: str,
        classes: int,
        example: Tensor,
        *,
        beta: float = 0.9,
        max_std: float = 0.1,
        min_samples: int = MIN_BATCH,
        seed: int = 0,
    ) -> None:
        """``example``: an input batch, for the feature's shape. Shared means start at U(0, 1), stds at
        ``max_std``."""
        super().__init__()
        if not 0.0 <= beta < 1.0 or max_std <= 0.0 or classes < 2 or min_samples < 1:
            raise UsageError(
                f"fedimpro: beta {beta:g} in [0, 1), max_std {max_std:g} > 0, {classes} classes >= 2, "
                f"min_samples {min_samples} >= 1"
            )
        self.net, self.split, self.classes = net, split, classes
        self.beta, self.max_std, self.min_samples = beta, max_std, min_samples
        size = _feature_size(net, split, example)
        draw = torch.rand(classes, size, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("fedimpro_shared_means", draw)
        self.register_buffer("fedimpro_shared_stds", torch.full((classes, size), max_std))
        self.register_buffer("fedimpro_means", draw.clone())
        self.register_buffer("fedimpro_stds", torch.full((classes, size), max_std))
        self.register_buffer("fedimpro_counts", torch.zeros(classes))
        self.register_buffer("fedimpro_weight", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.training:
            return F.cross_entropy(self.net(x), y)
        drawn_y = torch.arange(self.classes, device=y.device).repeat(len(y) // self.classes + 1)
        below: list[Tensor] = []

        def extend(features: Tensor) -> Tensor:
            below.append(features.detach())
            return torch.cat([features, self._drawn(drawn_y, features)])

        logits = with_outputs(self.net, self.net.get_submodule(self.split), x, extend)
        real, drawn = logits[: len(y)], logits[len(y) :]
        loss = F.cross_entropy(real, y) + self.fedimpro_weight * F.cross_entropy(drawn, drawn_y)
        self._learn(below[0].flatten(1), y)
        return loss

    def _drawn(self, labels: Tensor, like: Tensor) -> Tensor:
        means, stds = self.fedimpro_shared_means[labels], self.fedimpro_shared_stds[labels]
        features = means + stds * torch.randn_like(means)
        return features.reshape(len(labels), *like.shape[1:]).to(like.dtype)

    def _learn(self, features: Tensor, labels: Tensor) -> None:
        """Move the estimates of the classes in this batch; ``features`` [B, D] without gradient."""
        with torch.no_grad():
            means, stds, counts = class_statistics(features.to(torch.float32), labels, self.classes)
            enough = counts >= self.min_samples
            moved = self.beta * self.fedimpro_means + (1.0 - self.beta) * means
            self.fedimpro_means.copy_(torch.where(enough[:, None], moved, self.fedimpro_means))
            spread = self.beta * self.fedimpro_stds + (1.0 - self.beta) * stds
            spread = spread.clamp(max=self.max_std)
            self.fedimpro_stds.copy_(torch.where(enough[:, None], spread, self.fedimpro_stds))
            self.fedimpro_counts.add_(counts * enough)


def class_statistics(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """(means [C, D], standard deviations [C, D], counts [C]) of a batch; 0 for absent classes.

    The deviation divides by the count, from centred features: two passes, no cancellation.
    """
    member = F.one_hot(labels, classes).to(features.dtype)
    counts = member.sum(0)
    divisor = counts.clamp(min=1.0)[:, None]
    means = member.T @ features / divisor
    centred = features - means[labels]
    stds = (member.T @ centred.square() / divisor).sqrt()
    return means, stds, counts


def _feature_size(net: nn.Module, split: str, example: Tensor) -> int:
    sizes: list[int] = []

    def look(module: nn.Module, args: tuple[Any, ...], out: object) -> None:
        sizes.append(out[0].numel() if isinstance(out, Tensor) and out.ndim > 1 else 0)

    was_training = net.training
    handle = submodule(net, split, "fedimpro").register_forward_hook(look)
    try:
        with torch.no_grad():
            net.train(False)(example)
    finally:
        handle.remove()
        net.train(was_training)
    if len(sizes) != 1 or not sizes[0]:
        raise UsageError(f"fedimpro: {split!r} must return one tensor [batch, ...] once a forward")
    return sizes[0]
