"""Streaming DiLoCo: DiLoCo of one fragment of the model a round, in turn, used some steps later.

    fragment of round t: t mod P;   theta <- alpha theta_local + (1 - alpha) theta_outer, of the fragment

P is ``exchange.fragments`` and a round takes place every H / P steps (``exchange.every``), so each fragment
has H steps between its rounds: DiLoCo's bytes in all at 1 / P of its peak. The result is used
``exchange.delay`` steps after the round began, in which the ranks go on computing; a delay smaller than
``every`` leaves one fragment under way at a time.

A fragment is made of equal runs of each tensor that lie P runs apart: strided as the source's layers are,
equally large whatever the tensors' shapes, and the same elements whoever holds which tensors. Local steps
taken during the delay remain to the share alpha. A newcomer begins between two rounds, or is given the result
under way as well.
Source: papers/decentralized.md 8.5 (Streaming DiLoCo); the outer rate, alpha and runs are (GK) there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from atoll.collective import Segment, cut, even_shares
from strategies.exchanges.diloco import DiLoCo

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.exchange import ExchangeRound


@dataclass(frozen=True)
class StreamingDiLoCo(DiLoCo):
    """The rule above; state: ``OuterState`` of the whole model."""

    lr: float = 0.4
    alpha: float = 0.5
    runs: int = 3  # of a fragment in each tensor; the source's have three layers

    def segments(self, sizes: Sequence[int], at: ExchangeRound) -> Sequence[Segment]:
        """Runs of the fragment whose turn it is."""
        fragments = self.exchange.fragments
        if fragments == 1:
            return super().segments(sizes, at)
        shares, turn = even_shares(fragments * self.runs), at.number % fragments
        return [
            Segment(start + run.start, start + run.stop)
            for start, size in zip(accumulate((0, *sizes)), sizes, strict=False)
            for run in cut(size, shares)[turn::fragments]
        ]

    def used(self, now: Tensor, outer: Tensor) -> Tensor:
        """The mixture, or the outer one where the local one is not finite."""
        mixed = self.alpha * now + (1.0 - self.alpha) * outer
        return torch.where(torch.isfinite(now), mixed, outer)
