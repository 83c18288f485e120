"""SCAFFOLD on digits that the clients registered: the federated job of ``benchmarks.same_bits``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll import Federated, Job, Optimizer, OptimizerName, Registered, TrainingSpec

BATCH = 16
CLIENTS = 3
ROUNDS = 4
SEED = 4711


class Digits(nn.Module):
    """Mean cross-entropy of images [B, 64] and labels [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)


def job() -> Job:
    """What is trained, every client in every round."""
    torch.manual_seed(SEED)
    return Job(
        module=Digits(),
        example_inputs={"x": torch.zeros(BATCH, 64), "y": torch.zeros(BATCH, dtype=torch.int64)},
        data=Registered("digits", {"x": "image", "y": "label"}),
        training=TrainingSpec(
            steps=ROUNDS, n_micro=1, seed=SEED, optimizer=Optimizer(OptimizerName.SGD, lr=0.05)
        ),
        federated=Federated("scaffold", local_epochs=2, clients=CLIENTS, min_clients=CLIENTS),
        name="scaffold-digits",
    )
