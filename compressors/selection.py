"""Which elements a sparse codec keeps: the largest by magnitude, compared as integers.

The bits of a float without its sign order as |x| does, infinities above all finite values and NaN
above infinities: so what is not finite is selected first, and integers compare as fast as floats.

An exact selection first takes the maxima of about 4k groups of elements. Their k-th largest is at
most the k-th largest of all, and for elements in no particular order about 1.15 k reach it
(4k ln(4/3)): only those are then sorted out. One pass of maxima, one of comparisons. From 4 % on a
strided sample gives that bound, with a margin, for less.

Measured on one core, GB/s of float32, 25 M elements, 1 %: docs/compression.md
(papers/compression.md 1.1: exact 0.25, sampled threshold 1.45, reused threshold 5.5).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from atoll.opdag import TensorMeta
from compressors.bits import Ints
from compressors.layout import ALIGNMENT
from compressors.packing import TORCH_DTYPES, Floats, flat

Keys = npt.NDArray[np.signedinteger[Any]]

BLOCK = 1 << 18
"""Elements compared at a time: their keys stay in the second-level cache."""
STRIDE = 97
"""Every 97th element stands for all in a sampled threshold; prime, so that rows do not alias."""
_GROUPS = 4  # times k
_SPARSE = 6
"""Groups of so many elements at least: of smaller ones there are so many maxima that a sample is faster."""
_VECTOR = 64  # groups at least: maxima are taken over vectors of groups
_SHORT = 256  # rows up to here are partitioned faster than their maxima are taken


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
    """The key that about ``kept`` elements reach: the exact quantile of a strided sample.

    Every 97th element, or closer where fewer than 512 of the sample would reach it (5 % of noise).
    """
    stride = max(1, min(STRIDE, kept // 512 | 1))
    sample = magnitude(np.ascontiguousarray(bits[::stride]))
    rank = min(len(sample), max(1, round(kept * len(sample) / len(bits))))
    return int(np.partition(sample, len(sample) - rank)[len(sample) - rank])


def largest(bits: Keys, kept: int) -> Ints:
    """Ascending positions of exactly ``kept`` elements of the largest magnitude; of equal ones the first."""
    if kept >= len(bits):
        return np.arange(len(bits))
    if len(bits) <= BLOCK:
        return _of_rows(magnitude(bits).reshape(1, -1), kept)
    size = len(bits) // (_GROUPS * kept)
    if size >= _SPARSE:
        blocks = (magnitude(bits[at : at + BLOCK]) for at in range(0, len(bits), BLOCK))
        maxima = np.concatenate([_maxima(keys.reshape(1, -1), size)[0] for keys in blocks])
        positions = above(bits, kth_largest(maxima, kept))
    else:
        positions = above(bits, sampled_threshold(bits, min(len(bits), kept + _noise(kept, len(bits)))))
        if len(positions) < kept:  # oddly ordered elements misled the sample
            positions = above(bits, kth_largest(magnitude(bits), kept))
    keys = magnitude(bits.take(positions))
    least = kth_largest(keys, kept)
    stays = keys >= least
    surplus = int(np.count_nonzero(stays)) - kept
    if surplus:  # of equal ones the first
        stays[np.flatnonzero(keys == least)[-surplus:]] = False
    return positions[stays]


def kth_largest(keys: Keys, kept: int) -> int:
    """The ``kept``-th largest of ``keys``, 1 <= kept <= len(keys).

    Exact: a sample only says between which keys it should lie, and few lie there; where they do not
    hold it, all are partitioned.
    """
    total = len(keys)
    if total > BLOCK:
        margin = _noise(kept, total)
        high = sampled_threshold(keys, max(1, kept - margin))
        low = sampled_threshold(keys, min(total, kept + margin))
        among = keys[(keys >= low) & (keys <= high)]
        wanted = kept - int(np.count_nonzero(keys > high))
        if 1 <= wanted <= len(among):
            return int(np.partition(among, len(among) - wanted)[len(among) - wanted])
    return int(np.partition(keys, total - kept)[total - kept])


def _noise(kept: int, total: int) -> int:
    """Six standard deviations of a count of ``kept`` of ``total`` estimated from every 97th, and one of
    the sample more."""
    return STRIDE * (1 + round(6 * math.sqrt(kept * (1 - kept / total) / STRIDE)))


def largest_in_rows(bits: Keys, width: int, kept: int) -> Ints:
    """Return the ``kept`` largest elements of each row of ``width``, as ascending positions into all."""
    if kept >= width:
        return np.arange(len(bits))
    if width > BLOCK:
        rows = [largest(bits[at : at + width], kept) + at for at in range(0, len(bits), width)]
        return np.concatenate(rows)
    step = BLOCK // width * width
    found = []
    for at in range(0, len(bits), step):
        positions = _of_rows(magnitude(bits[at : at + step]).reshape(-1, width), kept)
        positions += at
        found.append(positions)
    return np.concatenate(found)


def _maxima(keys: Keys, size: int) -> Keys:
    """Maxima of [R, width // size] groups; each takes every (width // size)-th element, for vectors."""
    rows, width = keys.shape
    groups = max(1, width // size)
    size = min(size, width)
    maxima: Keys = keys[:, : size * groups].reshape(rows, size, groups).max(axis=1)
    return maxima


def _of_rows(keys: Keys, kept: int) -> Ints:
    """Positions of exactly ``kept`` < width elements of each row of [R, width]."""
    rows, width = keys.shape
    size = width // max(_GROUPS * kept, _VECTOR) if width > _SHORT else 1
    candidates = _maxima(keys, size) if size >= 2 else keys
    rank = candidates.shape[1] - kept
    mask = keys >= np.partition(candidates, rank, axis=1)[:, rank, None]
    positions = np.flatnonzero(mask)
    if len(positions) == rows * kept:
        return positions
    counts = np.diff(np.searchsorted(positions, np.arange(rows + 1) * width))
    return positions[_trimmed(keys.reshape(-1).take(positions), counts, kept)]


def _trimmed(keys: Keys, counts: Ints, kept: int) -> npt.NDArray[np.bool_]:
    """Which of ``keys`` stay when each run of ``counts`` (each at least ``kept``) keeps that many.

    The largest of each run; of equal ones the first.
    """
    ends = np.cumsum(counts)
    run = np.repeat(np.arange(len(counts)), counts)
    table = np.full((len(counts), int(counts.max())), -1, keys.dtype)
    table[run, np.arange(len(keys)) - (ends - counts)[run]] = keys
    rank = table.shape[1] - kept
    threshold = np.partition(table, rank, axis=1)[:, rank]
    more = np.count_nonzero(table > threshold[:, None], axis=1)
    own = threshold[run]
    ties = keys == own
    seen = np.cumsum(ties)
    before = np.concatenate(([0], seen[ends[:-1] - 1])) if len(ends) else seen
    stays: npt.NDArray[np.bool_] = (keys > own) | (ties & (seen - before[run] <= (kept - more)[run]))
    return stays


def as_floats(bits: Keys, dtype: str) -> Floats:
    """The elements with these bits, as float32."""
    if dtype == "float32":
        return bits.view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.int32) << 16).view(np.float32)


def values_at(bits: Keys, positions: Ints, dtype: str) -> Floats:
    """The elements there, as float32."""
    return as_floats(bits.take(positions), dtype)


def scatter(positions: Ints, values: Floats, meta: TensorMeta) -> torch.Tensor:
    """A tensor of ``meta`` with these elements, zero elsewhere. ``positions`` must be in range.

    numpy's zeros are pages that the system clears when they are touched, torch's a pass over all.
    """
    memory = np.zeros(meta.nbytes + ALIGNMENT, np.uint8)
    lead = -memory.ctypes.data % ALIGNMENT
    tensor = torch.from_numpy(memory[lead : lead + meta.nbytes]).view(TORCH_DTYPES[meta.dtype])
    place(tensor, positions, torch.from_numpy(values))
    return tensor.view(meta.shape)


def place(target: torch.Tensor, positions: Ints, values: torch.Tensor) -> None:
    """Put ``values`` at ``positions`` of a contiguous CPU tensor's elements, cast to its dtype."""
    # torch's scatter is up to 1.5 times as fast as numpy's; on integers, so that no NaN's bits change.
    keys = torch.from_numpy(bits_of(values.to(target.dtype)))
    torch.from_numpy(bits_of(target)).scatter_(0, torch.from_numpy(positions), keys)


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether no element is infinite or NaN. A finite sum proves it in one fast pass."""
    whole = flat(tensor)
    return bool(torch.isfinite(whole.sum(dtype=torch.float32))) or bool(torch.isfinite(whole).all())
