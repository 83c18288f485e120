"""Small net on random data in two replicas: the job of ``benchmarks.vs_hivemind``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import Job, Optimizer, OptimizerName, Rows, TrainingSpec

FEATURES, CLASSES = 64, 16  # as in benchmarks/rivals/hivemind_optimizer.py
WIDTH = 1024
LR = 0.05
MICRO_BATCH = 128
SHARE = 16  # micro-batches of a step that each replica has
STEPS = 12
SEED = 0


class Net(nn.Module):
    """Features [B, 64] and labels [B] -> mean cross-entropy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, CLASSES),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)


def job() -> Job:
    """What Atoll trains."""
    torch.manual_seed(SEED)
    net = Net(WIDTH)
    count = 2 * SHARE * MICRO_BATCH * STEPS
    rows = {"x": torch.randn(count, FEATURES), "y": torch.randint(CLASSES, (count,))}
    return Job(
        module=net,
        example_inputs={name: value[:MICRO_BATCH] for name, value in rows.items()},
        data=Rows(rows, seed=None),
        training=TrainingSpec(
            steps=STEPS,
            n_micro=2 * SHARE,
            seed=SEED,
            optimizer=Optimizer(OptimizerName.SGD, lr=LR),
            blocks=2,
            replicas="2",
        ),
        name="small",
    )
