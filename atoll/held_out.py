"""Held-out figures: means over all rows that were looked at, from those of micro-batches of unequal sizes.

A micro-batch counts by its rows, or by its weight where the loss is a sum over one (``atoll.step_loss``): a
last micro-batch with fewer rows counts less. Metrics count as the loss does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, SupportsFloat

if TYPE_CHECKING:
    from atoll.program import StageProgram


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over held-out rows; NaN where all weights are 0."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class HeldOutMeans:
    """What micro-batches' evaluations gave so far, left on the device until the means are taken."""

    def __init__(self, program: StageProgram) -> None:
        """``program``: for full micro-batches."""
        self._program, self._metrics = program, dict(program.metrics)
        self._found: list[tuple[float, Mapping[int, SupportsFloat]]] = []

    def add(self, out: Mapping[int, SupportsFloat], rows: int) -> None:
        """Take in the outputs of a micro-batch of ``rows`` rows, those of the program's loss, weight and
        metrics."""
        full, wanted = self._program.rows, (self._program.loss, self._program.weight, *self._metrics.values())
        out = {op: out[op] for op in wanted if op is not None}
        # As a share, so that means of full micro-batches alone have the bits of a plain mean.
        self._found.append((rows / full if full else 1.0, out))

    def take(self) -> Figures | None:
        """Return the means and forget; None where nothing was evaluated, or elsewhere."""
        found, self._found = self._found, []
        loss, weight = self._program.loss, self._program.weight
        if not found or loss is None:
            return None
        if weight is None:
            counts = [share for share, _ in found]
            totals = [share * float(out[loss]) for share, out in found]
        else:
            counts = [float(out[weight]) for _, out in found]
            totals = [float(out[loss]) for _, out in found]
        whole = math.fsum(counts)
        if not whole > 0.0:
            return Figures(math.nan, dict.fromkeys(self._metrics, math.nan))
        # Where nothing was counted a metric may be 0 / 0.
        parts = [(count, out) for count, (_, out) in zip(counts, found, strict=True) if count > 0.0]
        metrics = {
            name: math.fsum(count * float(out[op]) for count, out in parts) / whole
            for name, op in self._metrics.items()
        }
        return Figures(math.fsum(totals) / whole, metrics)
