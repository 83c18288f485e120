"""What spot checks cost: an idle worker's computing, and bytes that the neighbours send once more. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.job import CHECKPOINT_EVERY_S

if TYPE_CHECKING:
    from atoll.job import TrainingSpec
    from atoll.plan import Prediction


@dataclass(frozen=True, slots=True)
class CheckCost:
    """Costs of a check, ``steps`` repeated on average; and of a step of training, ``compute_share`` of the
    time of one idle worker like the plan's and ``n_bytes`` that a stage's neighbours send it."""

    every: int
    steps: float
    compute_share: float
    n_bytes: float

    @property
    def words(self) -> str:
        """Return the costs for people."""
        return (
            f"spot checks: 1 in {self.every} steps an idle worker repeats {self.steps:.0f} steps of a stage "
            f"on average, {self.compute_share:.1%} of its time; the stage's neighbours send it "
            f"{self.n_bytes / 1e6:.3g} MB per step of training"
        )


def check_cost(training: TrainingSpec, prediction: Prediction) -> CheckCost | None:
    """Return what a plan's spot checks cost, None where there are none.

    A check repeats what has been done since the newest checkpoint, so half of what lies between two. One goes
    on at a time: what is drawn meanwhile is not checked.
    """
    if not training.spot_checks or not prediction.stages or prediction.step_s <= 0.0:
        return None
    every = max(1, round(1.0 / training.spot_checks))
    between = training.checkpoint_every or max(1.0, CHECKPOINT_EVERY_S / prediction.step_s)
    steps = (min(between, training.steps) + 1) / 2
    stages = len(prediction.stages)
    compute_s = sum(stage.compute_s for stage in prediction.stages) / stages
    taken = sum(link.bytes_per_step for link in prediction.links) / stages
    repeated = min(steps / every, prediction.step_s / compute_s if compute_s else steps / every)
    return CheckCost(every, steps, repeated * compute_s / prediction.step_s, repeated * taken)
