"""VHL's virtual images: a labelled set of shaped noise that every client makes, or gets, alike.

    class mean M_c ~ N(0, 1) of [channels, base, base];  sample = M_c + spread * N(0, 1)
    upsampled bilinearly to the image size, clipped to [0, 1], stored in steps of 1/255

All clients must hold the same set: one whose generator stands elsewhere silently destroys what the
method rests on. So the bits come from a counter-based generator whose raw output is fixed (Philox), the
normal numbers are made here, the result is rounded to bytes, and ``fingerprint`` goes with the seed.
Source: VHL, "upsampled noise" variant; papers/federated.md 1 (1b).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from strategies.options import within

if TYPE_CHECKING:
    from strategies.layout import Array

MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class VirtualSpec:
    """Parameters of a set of virtual images. ``base`` = the image size gives unsmoothed noise."""

    seed: int
    classes: int = 10
    per_class: int = 200
    shape: tuple[int, int, int] = (3, 32, 32)  # channels, height, width
    base: int = 8
    spread: float = 0.5

    def __post_init__(self) -> None:
        within("vhl", "seed", self.seed, 0, 2**63 - 1)
        within("vhl", "classes", self.classes, 2, 100_000)
        within("vhl", "per_class", self.per_class, 1, 1_000_000)
        within("vhl", "base", self.base, 1, min(self.shape[1:]))
        within("vhl", "spread", self.spread, 0.0, 10.0)
        within("vhl", "bytes of the set", self.classes * self.per_class * prod(self.shape), 1, MAX_BYTES)


def virtual_set(spec: VirtualSpec) -> tuple[Array, Array]:
    """(images uint8 [n, channels, height, width], labels int64 [n]), class by class."""
    channels, height, width = spec.shape
    small = (channels, spec.base, spec.base)
    means = _normal(spec.seed, 0, (spec.classes, *small))
    rows, columns = _bilinear(spec.base, height), _bilinear(spec.base, width)
    images = np.empty((spec.classes, spec.per_class, *spec.shape), np.uint8)
    for at in range(spec.classes):
        noise = _normal(spec.seed, at + 1, (spec.per_class, *small))
        large = rows @ (means[at] + spec.spread * noise) @ columns.T
        images[at] = np.rint(np.clip(large, 0.0, 1.0) * 255.0)
    labels = np.repeat(np.arange(spec.classes, dtype=np.int64), spec.per_class)
    return images.reshape(-1, *spec.shape), labels


def fingerprint(images: Array, labels: Array) -> str:
    """SHA-256 of the set: what a client compares before it trains on a set of its own making."""
    digest = sha256(repr((images.shape, labels.shape)).encode())
    digest.update(np.ascontiguousarray(images, np.uint8).tobytes())
    digest.update(np.ascontiguousarray(labels, "<i8").tobytes())
    return digest.hexdigest()


def _normal(seed: int, stream: int, shape: tuple[int, ...]) -> Array:
    """Standard normal numbers by Box and Muller from the 53 upper bits of Philox words."""
    count = prod(shape)
    pairs = -(-count // 2)
    words = np.random.Philox(key=[seed, stream]).random_raw(2 * pairs) >> np.uint64(11)
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log(uniform[:pairs]))
    angle = 2.0 * np.pi * uniform[pairs:]
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return np.asarray(both[:count].reshape(shape))


def _bilinear(small: int, large: int) -> Array:
    """[large, small] matrix of linear interpolation, edges held, pixel centres as in image libraries."""
    at = np.clip((np.arange(large) + 0.5) * small / large - 0.5, 0.0, small - 1.0)
    low = np.minimum(np.floor(at).astype(int), max(small - 2, 0))
    matrix = np.zeros((large, small))
    matrix[np.arange(large), low] += 1.0 - (at - low)
    matrix[np.arange(large), np.minimum(low + 1, small - 1)] += at - low
    return matrix
