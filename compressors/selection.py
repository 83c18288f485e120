"""Which elements a sparse codec keeps: the largest by magnitude, compared as integers.

The bits of a float without its sign order as |x| does, infinities above all finite values and NaN
above infinities: so what is not finite is selected first, and comparisons run as fast as for floats.

Measured on one core, GB/s of float32, 25 M elements, 1 %: reused threshold 7.8, sampled threshold
about half, exact 0.8 to 4 in rows of 256 to 4,096 (papers/compression.md 1.1: 5.5, 1.45, 0.25).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from atoll.opdag import TensorMeta
from compressors.bits import Ints
from compressors.packing import Floats, flat, zeros

Keys = npt.NDArray[np.signedinteger[Any]]

BLOCK = 1 << 18
"""Elements compared at a time: their keys stay in the second-level cache."""
STRIDE = 97
"""Every 97th element stands for all in a sampled threshold; prime, so that rows do not alias."""


def bits_of(tensor: torch.Tensor) -> Keys:
    """The bits of floating elements as signed integers of their width; shares CPU memory."""
    whole = flat(tensor)
    bits: Keys = whole.view(torch.int32 if whole.element_size() == 4 else torch.int16).numpy()
    return bits


def magnitude(bits: Keys, out: Keys | None = None) -> Keys:
    """Order-preserving keys of |x|."""
    keys: Keys = np.bitwise_and(bits, np.iinfo(bits.dtype).max, out=out)
    return keys


def above(bits: Keys, threshold: int) -> Ints:
    """Ascending positions of the elements whose key is at least ``threshold``."""
    found = []
    keys = np.empty(min(BLOCK, len(bits)), bits.dtype)
    mask = np.empty(len(keys), np.bool_)
    for start in range(0, len(bits), BLOCK):
        block = bits[start : start + BLOCK]
        count = len(block)
        np.greater_equal(magnitude(block, keys[:count]), bits.dtype.type(threshold), out=mask[:count])
        positions = np.flatnonzero(mask[:count])
        positions += start
        found.append(positions)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def sampled_threshold(bits: Keys, kept: int) -> int:
    """The key that about ``kept`` elements reach, by the exact quantile of every 97th element."""
    sample = magnitude(np.ascontiguousarray(bits[::STRIDE]))
    rank = min(len(sample), max(1, round(kept * len(sample) / len(bits))))
    return int(np.partition(sample, len(sample) - rank)[len(sample) - rank])


def largest(keys: Keys, kept: int) -> Ints:
    """Ascending positions of exactly ``kept`` of the largest keys; of equal ones the first."""
    if kept >= len(keys):
        return np.arange(len(keys))
    return largest_in_rows(keys.reshape(1, -1), kept)


def largest_in_rows(keys: Keys, kept: int) -> Ints:
    """For each row of [R, n] the ``kept`` < n largest, as ascending positions into all elements."""
    rows, width = keys.shape
    rank = width - kept
    threshold = np.partition(keys, rank, axis=1)[:, rank, None]
    mask = keys >= threshold
    positions = np.flatnonzero(mask)
    if len(positions) == rows * kept:
        return positions
    # Equal keys at the threshold (common in 16-bit tensors): of those, drop the last of each row.
    surplus = mask.sum(axis=1) - kept
    rows_with = np.flatnonzero(surplus)
    ties = keys[rows_with] == threshold[rows_with]
    from_the_end = np.cumsum(ties[:, ::-1], axis=1)[:, ::-1]
    mask[rows_with] &= ~(ties & (from_the_end <= surplus[rows_with, None]))
    return np.flatnonzero(mask)


def values_at(bits: Keys, positions: Ints, dtype: str) -> Floats:
    """The elements there, as float32."""
    taken = bits.take(positions)
    if dtype == "float32":
        return taken.view(np.float32)
    if dtype == "float16":
        return taken.view(np.float16).astype(np.float32)
    return (taken.astype(np.int32) << 16).view(np.float32)


def scatter(positions: Ints, values: Floats, meta: TensorMeta) -> torch.Tensor:
    """A tensor of ``meta`` with these elements, zero elsewhere. ``positions`` must be in range."""
    tensor = zeros(meta)
    bits = bits_of(tensor)
    typed = torch.from_numpy(values).to(tensor.dtype)
    bits[positions] = bits_of(typed)
    return tensor


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is infinite or NaN. A finite sum proves it in one fast pass."""
    whole = flat(tensor)
    return bool(torch.isfinite(whole.sum(dtype=torch.float32))) or bool(torch.isfinite(whole).all())
