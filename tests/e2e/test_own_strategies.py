"""A strategy that this project does not contain, on real workers: rounds, and a buffer without them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from benchmarks.federated_fleet import ROOT, FederatedFleet
from tests.e2e.test_federated import finished, job, samples, submitted, weights
from tests.patience import HUNG_S
from tests.strategies.own.tutorial import ClientMomentum, tutorial


@pytest.fixture(scope="module")
def fleet() -> Iterator[FederatedFleet]:
    with FederatedFleet([samples(120, 1), samples(80, 2), samples(60, 3)]) as started:
        yield started


@pytest.mark.slow
def test_a_strategy_of_the_job_s_file_learns_on_workers(fleet: FederatedFleet) -> None:
    name = submitted(fleet, job(5, "own", strategy=ClientMomentum.name, options={"alpha": 0.6}))
    last = finished(fleet, name)
    assert last.state == "finished", last
    assert last.federated.strategy == "client_momentum"
    assert {m.name: m.value for m in last.federated.central_metrics}["accuracy"] > 0.7


@pytest.mark.slow
def test_what_the_tutorial_writes_has_the_bits_of_ours_on_workers(fleet: FederatedFleet) -> None:
    tutorial()
    mine = submitted(fleet, job(3, "mine", strategy="controls", min_clients=3))
    finished(fleet, mine)
    ours = submitted(fleet, job(3, "ours", strategy="scaffold", min_clients=3))
    finished(fleet, ours)
    one, two = weights(fleet, mine), weights(fleet, ours)
    assert all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.slow
def test_it_runs_in_a_job_without_rounds(fleet: FederatedFleet) -> None:
    options = {"strategy": ClientMomentum.name, "buffer": 2}
    last = finished(fleet, submitted(fleet, job(8, "waitless", **options)))
    assert (last.state, last.step) == ("finished", 8)
    assert {m.name: m.value for m in last.federated.central_metrics}["accuracy"] > 0.7


JOB = """
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from atoll import Federated, Job, Optimizer, OptimizerName, Registered, TrainingSpec
from strategies.own import OwnStrategy, own_strategy


@own_strategy
class ServerMomentum(OwnStrategy):
    "The means of the last rounds still count, and so do each client's own."

    name = "two_momenta"
    SERVER = ("speed",)
    CLIENT = ("habit",)
    SENT_UP = ("norms",)
    beta: float = 0.5

    def gradient(self, at):
        return at.gradient - self.beta * at.habit / at.habit.norm().clamp(min=1.0)

    def after(self, at):
        return {"norms": torch.ones_like(at.delta) * at.delta.norm(), "habit": at.delta / (at.steps * at.lr)}

    def step(self, at):
        speed = self.beta * at.speed + at.mean
        return {"weight": at.weight + speed / (1 + at.norms / at.clients), "speed": speed}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y)


def job():
    return Job(
        module=Net(),
        example_inputs={"x": torch.zeros(8, 16), "y": torch.zeros(8, dtype=torch.int64)},
        data=Registered("digits", {"x": "image", "y": "label"}),
        training=TrainingSpec(steps=3, n_micro=1, optimizer=Optimizer(OptimizerName.SGD, lr=0.1)),
        federated=Federated("two_momenta", {"beta": 0.4}, clients=6),
    )
"""


def simulated(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    path, data = folder / "job.py", folder / "data.safetensors"
    path.write_text(JOB)
    save_file({name: np.ascontiguousarray(array) for name, array in samples(240, 1).items()}, data)
    command = [sys.executable, "-m", "coordinator.cli", "simulate", str(path), "--population", "12"]
    command += ["--data", str(data), "--by", "label", "--json", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HUNG_S, check=False)


@pytest.mark.slow
def test_a_job_file_with_a_strategy_of_its_own_is_simulated_with_a_population(tmp_path: Path) -> None:
    done = simulated(tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert (found["rounds"], found["clients"]) == (3, 12)
    assert found["loss"] < 1.4


@pytest.mark.slow  # of the class: tests/strategies/own/test_own.py
def test_a_name_that_nobody_declares_is_refused_with_the_remedy(tmp_path: Path) -> None:
    done = simulated(tmp_path, "--set", "federated.strategy=two_moments")
    assert done.returncode == 2
    assert "no strategy 'two_moments'" in done.stderr
    assert "yours two_momenta: define it in the job file with @own_strategy" in " ".join(done.stderr.split())
