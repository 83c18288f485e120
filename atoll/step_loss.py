"""The loss of a step, from what each of its micro-batches gave.

Without weights it is the mean of the micro-batches' losses. Where the model returns a sum and its ``weight``
(a count, such as that of target tokens), it is the sum of the sums over the sum of the weights: micro-batches
count by what is in them. Gradients follow. They are summed undivided, and divided once, by the step's weight,
as the step is committed. Who adds what in which order is fixed, so the figure does not depend on the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class StepLoss:
    """``mean``: of what is finite, NaN where nothing is or all weights are zero. ``weight``: the step's, by
    which gradients are divided. ``odd`` of ``count`` micro-batches have a loss that is not finite."""

    mean: float
    weight: float = 1.0
    odd: int = 0
    count: int = 0

    @property
    def empty(self) -> bool:
        """Whether nothing is counted, so that there is nothing to learn from the step."""
        return self.weight == 0.0

    @property
    def words(self) -> str:
        """Say what is odd about the step's loss, "" where nothing is."""
        if self.empty:
            return "the weights of all micro-batches are 0: no update"
        if self.odd:
            rest = (
                "" if self.odd == self.count else f", the loss shown is of the other {self.count - self.odd}"
            )
            return f"the loss of {self.odd} of {self.count} micro-batches is not finite{rest}"
        return ""


def step_loss(losses: Sequence[float], weights: Sequence[float] = ()) -> StepLoss:
    """Return the loss of a step from its micro-batches in their order.

    ``losses``: without ``weights`` each over the number of micro-batches, else sums, one a weight (ValueError
    for another number of them). Losses that are not finite are left out of the mean.
    """
    if weights and len(weights) != len(losses):
        raise ValueError(f"{len(losses)} losses with {len(weights)} weights")
    count = len(losses)
    odd = sum(not math.isfinite(loss) for loss in losses)
    if not weights:
        if odd == count:
            return StepLoss(math.nan, odd=odd, count=count)
        if not odd:
            return StepLoss(sum(losses), count=count)
        return StepLoss(sum(filter(math.isfinite, losses)) * count / (count - odd), odd=odd, count=count)
    counted = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if math.isfinite(loss)]
    over = sum(weight for _, weight in counted)
    mean = sum(loss for loss, _ in counted) / over if over > 0.0 else math.nan
    return StepLoss(mean, sum(weights), odd, count)
