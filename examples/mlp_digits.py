"""Handwritten digits with a small MLP: the quickest job file, and one with rows of arrays as data.

    atoll submit examples/mlp_digits.py --watch

Data: scikit-learn's 1,797 images of 8 x 8 pixels, embedded in that package.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from atoll import Job, Optimizer, OptimizerName, Rows, Schedule, ScheduleKind, TrainingSpec

WIDTH = 128
MICRO_BATCH = 32
N_MICRO = 4
STEPS = 200
HELD_OUT = 320  # images
SEED = 4711


class Digits(nn.Module):
    """Pixels [B, 64] and labels [B] -> mean cross-entropy."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(pixels), labels)


def rows() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Training and held-out images in one seeded order, pixels in [0, 1]."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    images = torch.from_numpy(pixels).float()[order] / 16.0
    classes = torch.from_numpy(labels).long()[order]
    split = len(order) - HELD_OUT
    return (
        {"pixels": images[:split], "labels": classes[:split]},
        {"pixels": images[split:], "labels": classes[split:]},
    )


def job() -> Job:
    """What Atoll trains."""
    torch.manual_seed(SEED)
    train, held_out = rows()
    return Job(
        module=Digits(),
        example_inputs={name: value[:MICRO_BATCH] for name, value in train.items()},
        data=Rows(train, held_out, seed=SEED),
        training=TrainingSpec(
            steps=STEPS,
            n_micro=N_MICRO,
            seed=SEED,
            optimizer=Optimizer(OptimizerName.SGD, lr=0.1, momentum=0.9),
            schedule=Schedule(ScheduleKind.COSINE, warmup_steps=10),
            eval_batches=HELD_OUT // MICRO_BATCH,
            eval_every=50,
        ),
        name="digits",
    )
