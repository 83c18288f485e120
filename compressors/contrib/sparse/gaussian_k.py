"""Gaussian-k: a threshold from the tensor's mean and deviation, then its budget made good.

    t = |mu| + sigma * Phi^-1(1 - k/(2d)); S = {i : |v[i]| >= t}; while |S| < k: t lower; S cut to k

The published form moves t by half at most three times and stops within [2k/3, 4k/3]. Real gradients
are heavy-tailed: it then sends from 0.17 to 10.7 times its budget (papers/compression.md 1.2). Here t
comes down until at least k elements reach it, and the k largest of those are kept: exactly k, as
exact top-k keeps, at the cost of one or two more passes. Zeros are never sent.
Source: arXiv 1911.08772; papers/compression.md 1.2, 3.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from atoll.opdag import TensorMeta
from compressors.base import State
from compressors.bits import Ints
from compressors.selection import Keys, above, as_floats, largest, magnitude
from compressors.sparse import Keep, Sparse
from compressors.sparse_sizes import kept_of_row

_LOWERINGS = 6
_FACTOR = 0.6
_NEAR, _NEAR_FACTOR = 0.9, 0.95  # of the budget: so little is missing that so little lower suffices
_EVERY = 16  # one block of that many gives mean and deviation
_RUN = 1024


class GaussianK(Sparse):
    """The codec above. ``ratio``: dense bytes / payload bytes aimed at; ``density``: k/d instead."""

    name = "gaussian_k"
    values = "fp16"

    def __init__(self, ratio: float = 100.0, *, density: float | None = None) -> None:
        """Raises ValueError for settings outside their range."""
        if not ratio >= 1.0 or (density is not None and not 0.0 < density <= 1.0):
            raise ValueError(f"Gaussian-k of ratio {ratio}, density {density}; ratio >= 1, 0 < density <= 1")
        self.ratio, self.density = ratio, density

    def keep(self, meta: TensorMeta) -> Keep:
        if self.density is None:
            kept = kept_of_row(1, meta.elements, meta.nbytes / self.ratio, self.values)
        else:
            kept = min(meta.elements, max(1, round(self.density * meta.elements)))
        return Keep(1, kept)

    def select(self, bits: Keys, meta: TensorMeta, state: State) -> tuple[Ints, State]:
        kept = self.keep(meta).most
        key = first_threshold(bits, kept, meta.dtype)
        positions = above(bits, key) if key else None
        for _ in range(_LOWERINGS):
            if positions is None or len(positions) >= kept or key <= 1:
                break
            near = len(positions) > _NEAR * kept
            key = max(1, _times(key, _NEAR_FACTOR if near else _FACTOR, meta.dtype))
            positions = above(bits, key)
        if positions is None or (len(positions) < kept and key > 1):
            positions = largest(bits, kept)  # no Gaussian at all: constant, or not finite
        reached = bits.take(positions)
        positions = positions[largest(reached, kept)]
        return positions[magnitude(bits.take(positions)) > 0], None


def first_threshold(bits: Keys, kept: int, dtype: str) -> int:
    """The key of the Gaussian's threshold; 0 where mean and deviation say nothing."""
    if not 0 < kept < len(bits):
        return 0
    runs = bits[: len(bits) // (_RUN * _EVERY) * _RUN * _EVERY].reshape(-1, _EVERY, _RUN)[:, 0].reshape(-1)
    sample = as_floats(runs if len(runs) >= 1 << 16 else bits, dtype)
    with np.errstate(invalid="ignore"):  # infinities
        mean, deviation = float(sample.mean(dtype=np.float64)), float(sample.std(dtype=np.float64))
    threshold = abs(mean) + deviation * NormalDist().inv_cdf(1.0 - kept / (2.0 * len(bits)))
    if not math.isfinite(threshold) or not deviation > 0.0:
        return 0
    return max(1, _key(threshold, dtype))


def _key(value: float, dtype: str) -> int:
    """The magnitude key of a positive number in ``dtype``."""
    if dtype == "float16":
        return int(np.float16(min(value, 65504.0)).view(np.int16))
    bits = int(np.float32(min(value, 3e38)).view(np.int32))
    return bits if dtype == "float32" else bits >> 16


def _times(key: int, factor: float, dtype: str) -> int:
    if dtype == "float16":
        value = float(np.int16(key).view(np.float16))
    else:
        value = float(np.int32(key if dtype == "float32" else key << 16).view(np.float32))
    return _key(value * factor, dtype)
