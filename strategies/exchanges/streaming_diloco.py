"""Streaming DiLoCo: DiLoCo of one fragment of the model a round, in turn, used some steps later.

    fragment of round t: t mod P;   theta <- alpha theta_local + (1 - alpha) theta_outer, of the fragment

P is ``exchange.fragments`` and a round takes place every H / P steps (``exchange.every``), so each fragment
has H steps between its rounds: DiLoCo's bytes in all at 1 / P of its peak. The result is used
``exchange.delay`` steps after the round began, in which the ranks go on computing; a delay smaller than
``every`` leaves one fragment under way at a time.

A fragment is made of equal runs of the model's row that lie P runs apart: strided as the source's layers
are, and equally large whatever the tensors' shapes. Local steps taken during the delay remain to the share
alpha. A newcomer begins between two rounds, or is given the result under way as well.
Source: papers/decentralized.md 8.5 (Streaming DiLoCo); the outer rate, alpha and runs are (GK) there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    runs: int = 3  # of a fragment, which has three layers there

    def segments(self, size: int, at: ExchangeRound) -> Sequence[Segment]:
        """Runs of the fragment whose turn it is."""
        fragments = self.exchange.fragments
        return cut(size, even_shares(fragments * self.runs))[at.number % fragments :: fragments]

    def used(self, now: Tensor, outer: Tensor) -> Tensor:
        """The mixture, or the outer one where the local one is not finite."""
        mixed = self.alpha * now + (1.0 - self.alpha) * outer
        return torch.where(torch.isfinite(now), mixed, outer)
