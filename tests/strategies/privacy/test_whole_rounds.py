"""Private rounds with the real trainer: clients in one process, and a population on hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.errors import UsageError
from atoll.federated import NO_FLOORS, Federated
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from atoll.privacy import Privacy
from coordinator.capture.capture import capture
from strategies.privacy.private import Private
from tests.inprocess.federation import LocalFederation, local_model
from tests.inprocess.population import LocalPopulation
from worker.federated.trainer import LOSS

CLIENTS = [f"c{at:02d}" for at in range(12)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = F.cross_entropy(self.layer(x), y)
        return loss


def federation(module: nn.Module | None = None, **options: Any) -> LocalFederation:
    torch.manual_seed(0)
    spec = TrainingSpec(steps=4, n_micro=1, seed=3, optimizer=Optimizer(OptimizerName.SGD, lr=0.1))
    example = {"x": torch.randn(4, 6), "y": torch.zeros(4, dtype=torch.int64)}
    found = capture(module or Net(), example, spec)
    draw = np.random.default_rng(0)
    data = {
        name: {"x": draw.normal(size=(16, 6)).astype(np.float32), "y": draw.integers(0, 3, 16)}
        for name in CLIENTS
    }
    rule = Federated(**{"clients": 8, "evaluate_every": 0, "held_out": 0.0, **options})
    model = local_model(found.train, found.evaluation, found.state, spec)
    return LocalFederation(model, rule, data, floors=NO_FLOORS)


def silent(made: LocalFederation) -> LocalFederation:
    rule = made.strategy
    assert isinstance(rule, Private)
    made.strategy = replace(rule, noise=lambda sigma, size: np.zeros(size, np.int64))
    return made


def test_no_loss_of_a_private_client_leaves_the_trainer() -> None:
    made = federation(privacy=Privacy(noise=1.0))
    broadcast = made.strategy.configure(made.state)
    found = made.trainer.train(made.clients["c00"], broadcast, made.client_states["c00"])
    assert dict(found.update.metrics) == {LOSS: 0.0}
    assert found.square_loss == 0.0
    plain = federation()
    shown = plain.trainer.train(plain.clients["c00"], broadcast, plain.client_states["c00"])
    assert shown.update.metrics[LOSS] > 0.0


@pytest.mark.parametrize("adaptive", [None, 0.5])
def test_a_private_round_on_hosts_has_the_bits_of_one_process(tmp_path: Path, adaptive: float | None) -> None:
    privacy = Privacy(noise=0.3, clip=0.05, adaptive=adaptive)
    one = silent(federation(clients=8, privacy=privacy))
    two = silent(federation(clients=8, privacy=privacy))
    one._secret = two._secret = "4" * 64
    hosts = LocalPopulation(two, ["h0", "h1", "h2"], tmp_path)
    for _ in range(3):
        one.run_round()
        hosts.run_round()
    assert one.state.weights.keys() == two.state.weights.keys()
    for name in one.state.weights:
        np.testing.assert_array_equal(one.state.weights[name], two.state.weights[name])
    if adaptive is not None:
        assert one.state.slots["privacy"]["clip"] == two.state.slots["privacy"]["clip"] != 0.05


def test_sampled_rounds_differ_in_size_and_may_be_empty(tmp_path: Path) -> None:
    made = federation(clients=1, min_clients=1, privacy=Privacy(noise=1.0, sampling=0.08))
    sizes = [len(made.run_round().participants) for _ in range(12)]
    assert 0 in sizes
    assert len(set(sizes)) > 1
    assert made.state.round == 12
    hosts = LocalPopulation(
        federation(clients=1, min_clients=1, privacy=Privacy(noise=1.0, sampling=1e-4)), ["h"], tmp_path
    )
    assert hosts.run_round().rows == {}
    assert hosts.federation.state.round == 1


def test_a_model_with_running_statistics_is_refused_until_they_stay_home() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(self.norm(x), y)

    with pytest.raises(UsageError, match="noise would make a variance negative"):
        federation(Normed(), privacy=Privacy(noise=1.0))
    federation(Normed(), privacy=Privacy(noise=1.0), local=("*running_mean", "*running_var")).run_round()
