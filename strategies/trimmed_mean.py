"""Coordinate-wise trimmed mean: without the int(beta n) smallest and largest of each coordinate.

Source: Yin 2018, option II; papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from strategies.options import bounded
from strategies.robust import CoordinateWise
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.layout import Array


@dataclass(frozen=True)
class TrimmedMean(CoordinateWise):
    """``beta`` in [0, 0.49]: the share cut off at each end."""

    name: ClassVar[str] = "trimmed_mean"
    FACTS: ClassVar[Facts] = Facts(
        "mean of every coordinate without its extremes", "Yin 2018, option II", linear=False, secure=False
    )

    beta: float = bounded(0.2, 0.0, 0.49)

    def _combine(self, stack: Array) -> Array:
        n = len(stack)
        cut = int(self.beta * n)
        return np.asarray(np.mean(np.sort(stack, axis=0)[cut : n - cut], axis=0))
