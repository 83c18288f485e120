"""Coordinate-wise median of the deltas; for an even number the mean of the middle two.

Holds as long as fewer than half of the participants are faulty. Source: Yin 2018, option I;
papers/federated.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from strategies.robust import CoordinateWise
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.layout import Array


@dataclass(frozen=True)
class CoordinateMedian(CoordinateWise):
    """No options."""

    name: ClassVar[str] = "coordinate_median"
    FACTS: ClassVar[Facts] = Facts(
        "median of every coordinate", "Yin 2018, option I", linear=False, secure=False
    )

    def _combine(self, stack: Array) -> Array:
        return np.asarray(np.median(stack, axis=0))
