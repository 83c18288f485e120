"""Top-k: the largest elements by magnitude, their values in 16 bits, their positions coded by density.

    v'[i] = v[i] (rounded) for i in S, 0 elsewhere;  S = the k largest |v| of each group

``make_compressor("topk", ratio)`` is the pipeline's form: an exact k in each row, no state, the same
packet for the same tensor. For gradients and deltas, under ``error_feedback``, take the whole
tensor as one group and find the threshold cheaply:

- ``exact``: the k largest;
- ``sampled``: the threshold is the exact quantile of every 97th element; the count lands near k;
- ``reused``: the threshold of the last tensor, drawn anew when the count leaves k/2 .. 2k, moved by
  about 1.2 % when it leaves 2k/3 .. 5k/4 (Ok-Topk).

The last two never send more than 5k/4 elements, nor a zero. Bounds: the kept values as in
``values.py``; ||v - v'||**2 <= (1 - k/d) ||v||**2 for the exact selection, by group. Sources: AdaTopK
(papers/decentralized.md 1.7); papers/compression.md 3 (TopK-SGD, arXiv 1911.08772; Ok-Topk,
arXiv 2201.07598).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from atoll.opdag import TensorMeta
from compressors.base import State
from compressors.bits import Ints
from compressors.selection import Keys, above, largest, largest_in_rows, magnitude, sampled_threshold
from compressors.sparse import Keep, Sparse
from compressors.sparse_sizes import kept_of_row, rows_of

Selection = Literal["exact", "sampled", "reused"]
Values = Literal["fp32", "fp16", "2bit", "1bit"]

_MANTISSA_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}


@dataclass(frozen=True, slots=True)
class Threshold:
    """State of ``reused``: the key (``selection.magnitude``) that the last kept elements reached."""

    key: int


class TopK(Sparse):
    """The codec above. ``ratio``: dense bytes / payload bytes aimed at; ``density``: k/d instead.

    ``rows``: whether rows select for themselves (``sparse_sizes.rows_of``); True only with ``exact``.
    """

    name = "topk"

    def __init__(
        self,
        ratio: float = 100.0,
        *,
        density: float | None = None,
        selection: Selection = "exact",
        rows: bool = True,
        values: Values = "fp16",
    ) -> None:
        """Raises ValueError for settings outside their range."""
        if not ratio >= 1.0 or (density is not None and not 0.0 < density <= 1.0):
            raise ValueError(f"top-k of ratio {ratio}, density {density}; ratio >= 1, 0 < density <= 1")
        if rows and selection != "exact":
            raise ValueError(f"rows select exactly; give rows=False for selection={selection!r}")
        self.ratio, self.density = ratio, density
        self.selection, self.rows, self.values = selection, rows, values

    def keep(self, meta: TensorMeta) -> Keep:
        rows, width, kept = self._sizes(meta)
        most = kept if self.selection == "exact" else min(width, _most(kept))
        return Keep(rows, rows * most)

    def select(self, bits: Keys, meta: TensorMeta, state: State) -> tuple[Ints, State]:
        _, width, kept = self._sizes(meta)
        if self.selection == "exact":
            return largest_in_rows(bits, width, kept), None
        reused = state if self.selection == "reused" else None
        positions, threshold = _by_threshold(bits, kept, reused, _MANTISSA_BITS[meta.dtype])
        return positions, threshold if self.selection == "reused" else None

    def _sizes(self, meta: TensorMeta) -> tuple[int, int, int]:
        """(groups, elements of each, kept of each)."""
        rows, width = rows_of(meta) if self.rows else (1, meta.elements)
        if self.density is not None:
            return rows, width, min(width, max(1, round(self.density * width)))
        return rows, width, kept_of_row(rows, width, meta.nbytes / self.ratio, self.values)


def _most(kept: int) -> int:
    """More elements than these are never sent by a threshold."""
    return kept + kept // 4


def _by_threshold(
    bits: Keys, kept: int, state: Threshold | None, mantissa_bits: int
) -> tuple[Ints, Threshold | None]:
    """Positions by the state's threshold or a sampled one, and the threshold for the next tensor."""
    if not len(bits):
        return np.empty(0, np.int64), state
    # Key 1 is the least that is not zero: zeros are never worth their positions.
    key = state.key if state else max(1, sampled_threshold(bits, kept))
    positions = above(bits, key)
    if state and not kept / 2 <= len(positions) <= 2 * kept:
        state, key = None, max(1, sampled_threshold(bits, kept))
        positions = above(bits, key)
    if 3 * len(positions) < 2 * kept and key > 1 and not state:
        positions = largest(bits, kept)  # a sample that misled: small or oddly ordered tensors
        reached = magnitude(bits.take(positions))
        positions = positions[reached > 0]
        key = max(1, int(reached.min()))
    count, step = len(positions), round(0.0172 * 2**mantissa_bits)  # log2(1.012)
    if count > _most(kept):
        positions = positions[largest(bits.take(positions), kept)]
        key = min(key + step, np.iinfo(bits.dtype).max)
    elif 3 * count < 2 * kept:
        key = max(1, key - step)
    return positions, Threshold(key)
