"""LAGS: a compression ratio for each layer's gradient, so that its exchange hides behind backward work.

Layer-wise adaptive sparsification (LAGS-SGD, arXiv 1911.08727; papers/compression.md 3). The form
of the rule is from general knowledge, not from the paper's text: a layer's ratio is the smallest
with which its exchange and selection end before the backward work still below it does,

    c_l = min(c_max, smallest c >= 1 with t_comm_l(c) + t_select_l <= t_backward(layers below l)).

It is for data-parallel gradients among workers that hold the same model, which the project is to have.
Nothing asks for these ratios until then: a stage has one replica, and peers do not exchange gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, log2

MAX_RATIO = 1000.0


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's gradient; layers stand in forward order."""

    n_bytes: int  # dense, >= 0
    backward_s: float  # of this layer, >= 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """How gradients travel among ``workers`` equal ones."""

    workers: int  # >= 1
    latency_s: float  # a message, one way
    bandwidth_bps: float  # of each worker, > 0
    select_bytes_per_s: float = inf  # of dense gradient: finding what to send

    def dense_s(self, n_bytes: float) -> float:
        """Ring all-reduce: 2 a (P - 1) + 2 (P - 1) / P * bytes / rate."""
        p = self.workers
        return 2 * self.latency_s * (p - 1) + 2 * (p - 1) / p * 8.0 * n_bytes / self.bandwidth_bps

    def sparse_s(self, n_bytes: float, ratio: float) -> float:
        """All-gather of everybody's own selection: a ceil(log2 P) + (P - 1) bytes / (c * rate)."""
        p = self.workers
        return self._rounds_s + (p - 1) * 8.0 * n_bytes / (ratio * self.bandwidth_bps)

    def ratio_within(self, n_bytes: float, seconds: float) -> float:
        """The smallest ratio whose exchange and selection take at most ``seconds``; inf: none."""
        left_s = seconds - self._rounds_s - n_bytes / self.select_bytes_per_s
        if left_s <= 0.0:
            return inf
        return max(1.0, (self.workers - 1) * 8.0 * n_bytes / (left_s * self.bandwidth_bps))

    @property
    def _rounds_s(self) -> float:
        return self.latency_s * ceil(log2(self.workers))


def layer_ratios(layers: Sequence[Layer], way: Exchange, max_ratio: float = MAX_RATIO) -> tuple[float, ...]:
    """Dense bytes over sent bytes for each layer, 1 where the dense exchange hides as it is.

    The first layer has no work below it, so it always gets ``max_ratio`` (>= 1), as does every
    layer that no ratio hides; one worker exchanges nothing. ValueError for figures that cannot be.
    """
    if way.workers < 1 or way.bandwidth_bps <= 0 or way.latency_s < 0 or max_ratio < 1:
        raise ValueError(f"{way} with ratios up to {max_ratio}: workers >= 1, rate > 0, ratio >= 1 expected")
    if way.workers == 1:
        return (1.0,) * len(layers)
    found, below_s = [], 0.0
    for layer in layers:
        hides = layer.n_bytes == 0 or way.dense_s(layer.n_bytes) <= below_s
        found.append(1.0 if hides else min(max_ratio, way.ratio_within(layer.n_bytes, below_s)))
        below_s += layer.backward_s
    return tuple(found)
