"""VHL's virtual images from an untrained style generator. Needs torch; on the owner's machine, once.

A StyleGAN-v2 generator that is never trained: one mapping layer, modulated and demodulated convolutions
from 4x4 upwards, noise in every layer, images summed over resolutions. Classes differ by

    latents      z ~ N(m_c, latent_std^2 I),  m_c ~ N(0, class_std^2 I)
    layer noise  of its own mean per class, orthogonal between classes, std noise_std / layers

The public code makes the noise means orthogonal by 500 SGD steps on their Gram matrix; here a QR
factorisation does so at once. Floating-point results differ between machines and releases, so the set
itself travels, not its seed. Source: VHL (Tang 2022); papers/federated.md 1 (1a).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from strategies.options import within

if TYPE_CHECKING:
    from strategies.layout import Array

SLOPE, GAIN = 0.2, 2.0**0.5  # of the leaky ReLU
BATCH = 64


@dataclass(frozen=True, slots=True)
class StyleSpec:
    """``shape``: channels, height, width. 100 classes: ``style`` 256, ``latent_std`` 0.2."""

    seed: int
    classes: int = 10
    per_class: int = 200
    shape: tuple[int, int, int] = (3, 32, 32)
    style: int = 64
    width: int = 32  # channels of the generator
    class_std: float = 0.5
    latent_std: float = 0.3
    noise_std: float = 0.1

    def __post_init__(self) -> None:
        within("vhl", "classes", self.classes, 2, 100_000)
        within("vhl", "per_class", self.per_class, 1, 1_000_000)
        within("vhl", "image size", max(self.shape[1:]), 4, 1024)


@dataclass(frozen=True)
class _Layer:
    """Layer of one resolution: weights of its convolution, its style and its image; per-class noise means."""

    convolution: Tensor  # [width, width, 3, 3]
    style: Tensor  # [width, style]
    image: Tensor  # [channels, width, 1, 1]
    noise: Tensor  # [classes, 1, side, side]


def styled_set(spec: StyleSpec) -> tuple[Array, Array]:
    """(images uint8 [n, channels, height, width], labels int64 [n]), class by class; for ``Vhl``."""
    draw = torch.Generator().manual_seed(spec.seed)
    mapping = torch.randn(spec.style, spec.style, generator=draw) * spec.style**-0.5
    constant = torch.randn(1, spec.width, 4, 4, generator=draw)
    layers = _layers(spec, draw)
    means = spec.class_std * torch.randn(spec.classes, spec.style, generator=draw)
    labels = torch.arange(spec.classes).repeat_interleave(spec.per_class)
    made = []
    with torch.no_grad():
        for mine in torch.split(labels, BATCH):
            z = means[mine] + spec.latent_std * torch.randn(len(mine), spec.style, generator=draw)
            style = F.leaky_relu(F.normalize(z) * spec.style**0.5 @ mapping.T, SLOPE)
            made.append(_images(spec, layers, constant, style, mine, draw))
    found = torch.cat(made)
    low, high = torch.quantile(found.flatten()[: 1 << 20], torch.tensor([0.01, 0.99]))
    scaled = ((found - low) / (high - low).clamp(min=1e-6)).clamp(0.0, 1.0) * 255.0
    return scaled.round().to(torch.uint8).numpy(), labels.numpy().astype(np.int64)


def _layers(spec: StyleSpec, draw: torch.Generator) -> list[_Layer]:
    sides = [4]
    while sides[-1] < max(spec.shape[1:]):
        sides.append(2 * sides[-1])
    noise = _orthogonal(spec.classes, [side * side for side in sides], draw)
    return [
        _Layer(
            torch.randn(spec.width, spec.width, 3, 3, generator=draw),
            torch.randn(spec.width, spec.style, generator=draw) * spec.style**-0.5,
            torch.randn(spec.shape[0], spec.width, 1, 1, generator=draw) * spec.width**-0.5,
            mean.reshape(spec.classes, 1, side, side),
        )
        for side, mean in zip(sides, noise, strict=True)
    ]


def _orthogonal(classes: int, sizes: list[int], draw: torch.Generator) -> list[Tensor]:
    """Rows [classes, size] a layer, of unit mean square; whole rows are orthogonal while they can be."""
    rows = torch.randn(sum(sizes), classes, generator=draw)
    if classes <= sum(sizes):
        rows = torch.linalg.qr(rows)[0] * sum(sizes) ** 0.5
    return list(torch.split(rows.T, sizes, dim=1))


def _images(
    spec: StyleSpec,
    layers: list[_Layer],
    constant: Tensor,
    style: Tensor,
    labels: Tensor,
    draw: torch.Generator,
) -> Tensor:
    x = constant.expand(len(labels), -1, -1, -1)
    image = torch.zeros(len(labels), spec.shape[0], 2, 2)
    for at, layer in enumerate(layers):
        if at:
            x = F.interpolate(x, scale_factor=2, mode="bilinear")
        x = _modulated(x, layer.convolution, 1.0 + style @ layer.style.T)
        mean = layer.noise[labels]
        noise = mean + spec.noise_std / len(layers) * torch.randn(mean.shape, generator=draw)
        x = F.leaky_relu(x + noise, SLOPE) * GAIN
        image = F.interpolate(image, scale_factor=2, mode="bilinear") + F.conv2d(x, layer.image)
    return image[:, :, : spec.shape[1], : spec.shape[2]]


def _modulated(x: Tensor, weight: Tensor, style: Tensor) -> Tensor:
    """StyleGAN-v2's convolution: weights scaled by input channel and sample, then to unit norm by output."""
    count, width, height, side = x.shape
    scaled = weight[None] * style[:, None, :, None, None]
    scaled = scaled * (scaled.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
    grouped = scaled.reshape(count * width, width, 3, 3)
    return F.conv2d(x.reshape(1, count * width, height, side), grouped, padding=1, groups=count).view_as(x)
