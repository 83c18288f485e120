"""VHL's local loss as a wrapper of the owner's net, before capture. Needs torch.

Dimensions: B real batch, V virtual batch, D features, C real classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import UsageError
from strategies.supcon_module import submodule, supcon, with_inputs
from strategies.virtual_data import VirtualSpec, fingerprint, virtual_set

if TYPE_CHECKING:
    from strategies.layout import Array


@dataclass(frozen=True, slots=True)
class VhlLoss:
    """Weights of the loss. ``pad``: pixels of the random crop of virtual images; 0 with no flip: none.

    ``mean``, ``std``: virtual images in [0, 1] are normalised with these, the paper's for photographs.
    They must leave them about as large as real ones are to the net, since both share its first layers.
    """

    virtual: float = 1.0  # alpha, of CE(virtual)
    match: float = 1.0  # lambda, of the term between real and virtual features
    cohere: float = 0.1  # of the term among virtual features
    temperature: float = 0.07
    batch: int = 128
    pad: int = 4
    flip: bool = True
    mean: float = 0.5
    std: float = 0.25

    def __post_init__(self) -> None:
        if not self.std > 0.0 or self.batch < 1 or self.pad < 0 or not self.temperature > 0.0:
            raise UsageError(
                f"vhl: std {self.std:g} > 0, batch {self.batch} >= 1, pad {self.pad} >= 0, "
                f"temperature {self.temperature:g} > 0"
            )


class Vhl(nn.Module):
    """``net(x)`` [B, C] with ``head`` its last linear layer; ``forward(x, y)`` is the loss.

    In training one forward of [real, virtual] images:

        CE(real) + virtual CE(virtual) + vhl_match (match SupCon([f_real, stopgrad(f_virt)], label mod C)
        + cohere SupCon(f_virt))

    over 2C outputs, the virtual ones from ``vhl_weight``, ``vhl_bias`` on the features that enter
    ``head``; the owner's net keeps its shape, so its exported weights load as they are. In evaluation
    CE of the C real outputs. Virtual features are detached in the first SupCon term, or they collapse
    onto the real ones; they may be of either label there. ``vhl_match`` is set by the strategy each epoch.
    """

    vhl_images: Tensor
    vhl_labels: Tensor
    vhl_match: Tensor

    def __init__(
        self,
        net: nn.Module,
        head: str,
        virtual: VirtualSpec | tuple[Array, Array],
        loss: VhlLoss | None = None,
        sha256: str = "",
    ) -> None:
        """``virtual``: a spec, or (uint8 images [n, channels, height, width], labels 0..C-1 [n]).

        UsageError for a ``head`` that is no linear layer of C outputs, C the classes of the set, or for
        a set whose fingerprint is not ``sha256`` (where that is given).
        """
        super().__init__()
        images, labels = virtual_set(virtual) if isinstance(virtual, VirtualSpec) else virtual
        classes = int(labels.max()) + 1
        last = submodule(net, head, "vhl")
        if not isinstance(last, nn.Linear) or last.out_features != classes:
            raise UsageError(f"vhl: {head!r} is {last}; it must be a Linear with {classes} outputs")
        if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(labels):
            raise UsageError(f"vhl: {images.dtype} images {images.shape}, {len(labels)} labels; give uint8")
        self.fingerprint = fingerprint(images, labels)
        if sha256 and sha256 != self.fingerprint:
            raise UsageError(
                f"vhl: this virtual set has SHA-256 {self.fingerprint}, not {sha256[:64]} "
                "as elsewhere; send the set itself"
            )
        self.net, self.head = net, head
        self.classes, self.loss = classes, loss or VhlLoss()
        generator = torch.Generator().manual_seed(int(self.fingerprint[:8], 16))
        bound = last.in_features**-0.5
        weight = torch.rand(classes, last.in_features, generator=generator) * 2 * bound - bound
        self.vhl_weight = nn.Parameter(weight)
        self.vhl_bias = nn.Parameter(torch.zeros(classes))
        self.register_buffer("vhl_images", torch.from_numpy(images))
        self.register_buffer("vhl_labels", torch.from_numpy(labels.astype(np.int64)))
        self.register_buffer("vhl_match", torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.training:
            return F.cross_entropy(self.net(x), y)
        images, labels = self._virtual(x.dtype)
        logits, features = with_inputs(self.net, self.net.get_submodule(self.head), torch.cat([x, images]))
        return vhl_loss(
            torch.cat([logits, F.linear(features, self.vhl_weight, self.vhl_bias)], dim=1),
            features,
            y,
            labels,
            self.loss,
            self.vhl_match,
        )

    def _virtual(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A random batch, augmented and normalised: ([V, channels, height, width], [V])."""
        chosen = torch.randint(0, len(self.vhl_labels), (self.loss.batch,), device=self.vhl_labels.device)
        images = self.vhl_images[chosen].to(dtype) / 255.0
        images = (images - self.loss.mean) / self.loss.std
        if self.loss.pad or self.loss.flip:
            images = shifted(images, self.loss.pad, self.loss.flip)
        return images, self.vhl_labels[chosen]


def vhl_loss(
    logits: Tensor, features: Tensor, y: Tensor, virtual_y: Tensor, loss: VhlLoss, match: Tensor | float = 1.0
) -> Tensor:
    """The loss from ``logits`` [B+V, 2C] and ``features`` [B+V, D], real rows first; labels 0..C-1."""
    real = len(y)
    classes = logits.shape[1] // 2
    told = F.cross_entropy(logits[:real], y)
    told = told + loss.virtual * F.cross_entropy(logits[real:], virtual_y + classes)
    mixed = torch.cat([features[:real], features[real:].detach()])
    between = supcon(mixed, torch.cat([y, virtual_y]), loss.temperature)
    among = supcon(features[real:], virtual_y, loss.temperature)
    return told + match * (loss.match * between + loss.cohere * among)


def shifted(images: Tensor, pad: int, flip: bool) -> Tensor:
    """Each image cropped at random out of itself with a border of ``pad`` zeros, half of them mirrored."""
    count, channels, height, width = images.shape
    device = images.device
    rows = torch.randint(0, 2 * pad + 1, (count, 1), device=device) + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(count, width)
    if flip:
        mirror = torch.randint(0, 2, (count, 1), device=device) > 0
        columns = torch.where(mirror, width - 1 - columns, columns)
    columns = columns + torch.randint(0, 2 * pad + 1, (count, 1), device=device)
    padded = F.pad(images, (pad, pad, pad, pad))
    which = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return padded[which, channel, rows[:, None, :, None], columns[:, None, None, :]]
