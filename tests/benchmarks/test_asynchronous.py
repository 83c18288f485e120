"""The virtual federation of the asynchronous benchmark is the product itself, and its time a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.federated import NO_FLOORS, Federated
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from benchmarks.asynchronous import final, reached_s, speeds
from coordinator.capture.capture import capture
from tests.inprocess.federation import LocalFederation, local_model
from tests.inprocess.virtual_federation import VirtualFederation


class Small(nn.Module):
    """A layer; returns the loss, in evaluation with metrics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(self.layer(x), y)
        return loss if self.training else {"loss": loss}


def rows(seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {"x": draw.normal(size=(20, 6)).astype(np.float32), "y": draw.integers(0, 3, 20)}


CLIENTS = {name: rows(at) for at, name in enumerate("abcd")}


def made(steps: int) -> Any:
    optimizer = Optimizer(OptimizerName.SGD, lr=0.1)
    training = TrainingSpec(steps=steps, n_micro=1, seed=3, optimizer=optimizer)
    example = {"x": torch.zeros(4, 6), "y": torch.zeros(4, dtype=torch.int64)}
    found = capture(Small(), example, training)
    return local_model(found.train, found.evaluation, found.state, training)


def rule(**options: Any) -> Federated:
    known: dict[str, Any] = {"held_out": 0.0, "evaluate_every": 0, "min_clients": 1, "deadline_s": 1e5}
    return Federated(**{**known, **options})


@pytest.mark.parametrize("buffer", [0, 4])
def test_rounds_of_everybody_have_the_bits_of_a_federation_in_one_process(buffer: int) -> None:
    virtual = VirtualFederation(made(3), rule(buffer=buffer), CLIENTS, lambda name, steps: 1.0)
    *_, last = virtual.run()
    local = LocalFederation(made(3), rule(), CLIENTS, floors=NO_FLOORS)
    for _ in range(3):
        local.run_round()
    for name, array in local.state.weights.items():
        np.testing.assert_array_equal(last.weights[name], array)


def test_a_slow_client_costs_rounds_its_time_and_a_buffer_none() -> None:
    factor = {"a": 100.0, "b": 1.0, "c": 1.0, "d": 1.0}
    rounds = VirtualFederation(made(4), rule(), CLIENTS, lambda name, steps: factor[name])
    flow = VirtualFederation(made(8), rule(buffer=2), CLIENTS, lambda name, steps: factor[name])
    assert [closed.at_s for closed in rounds.run()] == [100.0, 200.0, 300.0, 400.0]
    closed = list(flow.run())
    assert closed[-1].at_s <= 8.0
    assert all("a" not in each.fact.participants for each in closed)


def test_an_old_update_arrives_with_its_age_and_fedasync_sees_its_model() -> None:
    factor = {"a": 5.5, "b": 1.0, "c": 1.0, "d": 1.0}
    options = {"buffer": 1, "strategy": "fedasync"}
    closed = list(
        VirtualFederation(made(20), rule(**options), CLIENTS, lambda name, steps: factor[name]).run()
    )
    ages = [
        told["staleness"] for each in closed for name, told in each.fact.participants.items() if name == "a"
    ]
    assert ages
    assert ages[0] > 10
    assert all(np.isfinite(array).all() for array in closed[-1].weights.values())


def test_speeds_are_drawn_by_seed_with_the_share_of_slow_ones() -> None:
    names = [f"c{at}" for at in range(100)]
    plain, slow = speeds(names, 0.0, 1), speeds(names, 0.1, 1)
    ratios = [slow[name] / plain[name] for name in names]
    assert sorted(round(ratio) for ratio in ratios) == [1] * 90 + [10] * 10
    assert speeds(names, 0.1, 1) == slow


def test_a_curve_tells_when_it_is_there_and_where_it_ends() -> None:
    points = [(1.0, 0.2), (2.0, 0.5), (3.0, 0.4), (4.0, 0.6)]
    assert reached_s(points, 0.5) == 2.0
    assert reached_s(points, 0.9) is None
    assert final(points) == pytest.approx(0.425)


MANY = {f"c{at}": rows(at) for at in range(9)}


@pytest.mark.parametrize("strategy", ["fedavg", "fedadam"])
def test_with_everybody_in_the_buffer_hosts_end_with_the_bits_of_rounds(strategy: str) -> None:
    found = []
    for hosts, buffer in ((2, 0), (1, 9), (2, 9), (3, 9)):
        options = {"strategy": strategy, "buffer": buffer}
        virtual = VirtualFederation(made(3), rule(**options), MANY, lambda host, steps: 1.0, hosts)
        *_, last = virtual.run()
        assert virtual.trained == 27
        found.append({name: array.tobytes() for name, array in last.weights.items()})
    assert all(other == found[0] for other in found[1:])


def test_a_slow_host_costs_rounds_its_time_and_a_buffer_none() -> None:
    factor = {"host-0": 1.0, "host-1": 1.0, "host-2": 50.0}
    options = {"clients": 6, "deadline_s": 1e4}
    rounds = VirtualFederation(made(3), rule(**options), MANY, lambda host, steps: factor[host], 3)
    first = next(iter(rounds.run()))
    flow = VirtualFederation(made(30), rule(buffer=4, **options), MANY, lambda host, steps: factor[host], 3)
    closed = list(flow.run())
    assert first.at_s == 100.0  # two of six clients on the slow host
    assert closed[-1].at_s < first.at_s
    assert all("host-2" not in each.fact.participants for each in closed)
    trained = [len(told["clients"]) for each in closed for told in each.fact.participants.values()]
    assert max(trained) <= 4
