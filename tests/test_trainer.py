"""Local training under every rule: against plain torch loops, and in whole federations in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.federated import Federated
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from atoll.sampling import epoch_batches
from coordinator.capture import capture
from worker.federation_local import LocalFederation, local_model
from worker.local_model import Client, LocalModel

BATCH = 8
SGD = Optimizer(OptimizerName.SGD, lr=0.05)


class Small(nn.Module):
    """A small convolutional classifier with BatchNorm and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 4, 3, bias=False)  # Adam would enlarge what rounding leaves of its gradient
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4 * 6 * 6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.dropout(F.relu(self.norm(self.conv(x))))
        return F.cross_entropy(self.head(hidden.flatten(1)), y)


def arrays(n: int, seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 3, n)
    x = draw.normal(size=(n, 1, 8, 8)) + y[:, None, None, None]
    return {"x": x.astype(np.float32), "y": y}


def spec(optimizer: Optimizer = SGD, **options: Any) -> TrainingSpec:
    return TrainingSpec(steps=10, n_micro=1, seed=5, optimizer=optimizer, **options)


def model_of(
    module: nn.Module, training: TrainingSpec, batch: Mapping[str, Tensor] | None = None
) -> LocalModel:
    example = batch or {n: torch.from_numpy(a) for n, a in arrays(BATCH, 0).items()}
    found = capture(module, example, training)
    return local_model(found.train, found.evaluation, found.state, training)


def plain(
    module: nn.Module, training: TrainingSpec, rule: Federated, client: Client, data: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The first round as anybody would write it."""
    made = training.optimizer
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer
    if made.name is OptimizerName.ADAMW:
        optimizer = torch.optim.AdamW(parameters, made.lr, made.betas, made.eps, made.weight_decay)
    else:
        optimizer = torch.optim.SGD(parameters, made.lr, made.momentum, 0.0, made.weight_decay, made.nesterov)
    module.train()
    for epoch in range(rule.local_epochs):
        for at in epoch_batches(client.split.train, BATCH, training.seed, client.name, 0, epoch):
            optimizer.zero_grad()
            module(**{n: torch.from_numpy(a[at]) for n, a in data.items()}).backward()
            if made.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, made.clip_norm)
            optimizer.step()
    return dict(module.state_dict())


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD,
        replace(SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
        replace(SGD, clip_norm=0.1),
        Optimizer(OptimizerName.ADAMW, lr=0.01, weight_decay=0.1),
    ],
    ids=["sgd", "nesterov", "clipped", "adamw"],
)
def test_one_client_under_fedavg_is_plain_training(optimizer: Optimizer) -> None:
    training, rule = spec(optimizer), Federated(local_epochs=2, held_out=0.2)
    data = arrays(70, 1)
    federation = LocalFederation(model_of(Small(), training), rule, {"c0": data})
    found = federation.run_round()
    assert found.steps == {"c0": 14}
    expected = plain(Small(), training, rule, federation.clients["c0"], data)
    for name, tensor in federation.state.weights.items():
        assert np.allclose(tensor, expected[name].numpy(), atol=1e-6), name
    assert federation.state.weights["norm.running_mean"].any()
