"""Federated jobs with real processes over loopback with TLS: rounds, faults, kill -9, export."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from atoll import Federated, Job, Optimizer, OptimizerName, Registered, TrainingSpec
from benchmarks.federated_fleet import COORDINATOR, FederatedFleet
from coordinator.client.prepare import prepare
from strategies.fedimpro_module import FedImpro
from strategies.moon_module import Moon
from tests.e2e.same_job import Classifier

BATCH = 16


def samples(n: int, seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 4, n)
    centres = np.random.default_rng(7).normal(size=(4, 16))
    x = centres[y] + 0.8 * draw.normal(size=(n, 16))
    return {"image": x.astype(np.float32), "label": y.astype(np.int64)}


def job(rounds: int, name: str = "federation", **options: Any) -> Job:
    held = samples(64, 99)
    return Job(
        module=Classifier(),
        example_inputs={"x": torch.zeros(BATCH, 16), "y": torch.zeros(BATCH, dtype=torch.int64)},
        data=Registered("digits", {"x": "image", "y": "label"}, {"x": held["image"], "y": held["label"]}),
        training=TrainingSpec(
            steps=rounds,
            n_micro=1,
            seed=3,
            optimizer=Optimizer(OptimizerName.SGD, lr=0.05),
            eval_every=1,
            eval_batches=4,
        ),
        federated=Federated(**{"deadline_s": 30.0, **options}),
        metrics=("accuracy",),
        name=name,
    )


@pytest.fixture(scope="module")
def fleet() -> Iterator[FederatedFleet]:
    with FederatedFleet([samples(120, 1), samples(80, 2)]) as started:
        yield started


def submitted(fleet: FederatedFleet, what: Job, resume_of: str = "") -> str:
    return fleet.client.submit(prepare(what, resume_of=resume_of)).job


def finished(fleet: FederatedFleet, name: str) -> Any:
    (last,) = deque(fleet.watch(name), maxlen=1)
    return last


def weights(fleet: FederatedFleet, name: str) -> dict[str, Tensor]:
    path = fleet.folder / f"{name}.safetensors"
    fleet.client.export(name, path)
    return load_file(path)


@pytest.fixture(scope="module")
def undisturbed(fleet: FederatedFleet) -> dict[str, Tensor]:
    """What eight rounds of SCAFFOLD end with when nothing goes wrong."""
    name = submitted(fleet, job(8, "undisturbed", strategy="scaffold", min_clients=2))
    finished(fleet, name)
    return weights(fleet, name)


def test_a_federation_learns_and_its_figures_are_shown(fleet: FederatedFleet) -> None:
    # With one of the two, whom a busy machine may lose for a moment, six rounds learn less.
    name = submitted(fleet, job(6, downlink="delta", min_clients=2))
    last = finished(fleet, name)
    shown = last.federated
    assert (last.step, shown.strategy, len(shown.clients)) == (6, "fedavg", 2)
    assert {m.name: m.value for m in shown.central_metrics}["accuracy"] > 0.7
    # On a busy machine a round may close with one client's few held-out samples alone.
    assert {m.name: m.value for m in shown.clients_metrics}["accuracy"] > 0.5
    assert shown.bytes_up > 0
    assert shown.bytes_down > 0
    exported = weights(fleet, name)
    module = Classifier()
    module.load_state_dict(exported)
    held = samples(64, 99)
    with torch.no_grad():
        module.train(False)
        out = module(torch.from_numpy(held["image"]), torch.from_numpy(held["label"]))
    assert float(out.loss) == pytest.approx(last.eval_loss, rel=1e-5)
    with (fleet.folder / COORDINATOR / "runs" / name / "metrics.csv").open() as file:
        found = {row["name"] for row in csv.DictReader(file)}
    assert {"loss", "eval_loss", "eval_accuracy", "clients_accuracy", "bytes_up", "round_s"} <= found


@pytest.mark.slow
def test_sparse_updates_with_error_feedback_learn_too(fleet: FederatedFleet) -> None:
    last = finished(fleet, submitted(fleet, job(6, uplink="bcrs:4", downlink="lossless")))
    assert {c.codec for c in last.federated.clients} == {"topk"}
    assert last.federated.central_metrics[0].value > 0.6


@pytest.mark.slow
def test_an_asynchronous_job_whose_buffer_holds_everybody_has_the_bits_of_rounds(
    fleet: FederatedFleet,
) -> None:
    """Also where the coordinator is killed meanwhile: what it has taken counts once."""
    rounds = submitted(fleet, job(5, "in-rounds", min_clients=2))
    finished(fleet, rounds)
    buffered = submitted(fleet, job(5, "buffered", min_clients=2, buffer=2))
    for update in fleet.client.watch(buffered):
        if update.step >= 2:
            break
    fleet.kill(COORDINATOR)
    fleet.serve()
    last = finished(fleet, buffered)
    assert last.step == 5
    expected, found = weights(fleet, rounds), weights(fleet, buffered)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_coordinator_killed_in_mid_round_ends_with_the_same_weights(
    fleet: FederatedFleet, undisturbed: dict[str, Tensor]
) -> None:
    name = submitted(fleet, job(8, "killed", strategy="scaffold", min_clients=2))
    for update in fleet.client.watch(name):
        if update.step >= 3:
            break
    fleet.kill(COORDINATOR)
    fleet.serve()
    last = finished(fleet, name)
    assert last.step == 8
    found = weights(fleet, name)
    assert found.keys() == undisturbed.keys()
    assert all(torch.equal(found[key], undisturbed[key]) for key in found)


@pytest.mark.slow
def test_a_worker_killed_in_mid_round_costs_its_rounds_and_comes_back(fleet: FederatedFleet) -> None:
    name = submitted(fleet, job(5000, "orphaned", evaluate_every=0))
    killed = False
    for update in fleet.watch(name):
        if update.step >= 5 and not killed:
            fleet.kill("worker1")
            killed = True
        if killed and any(c.state == "gone" for c in update.federated.clients):
            break
    fleet.join("worker1")
    for update in fleet.watch(name):
        states = [c.state for c in update.federated.clients]
        # Alone the other one trains no round: no owner lets an update leave that nobody else's joins.
        if len(states) == 2 and "gone" not in states and "loading" not in states and update.step > 6:
            break
    assert fleet.client.cancel(name).state == "cancelled"
    lines = [line for line in fleet.client.logs(name) if line.event == "client.dropped"]
    assert any("lost" in line.fields_json for line in lines)


@pytest.mark.slow
def test_a_job_goes_on_from_another_ones_last_round(
    fleet: FederatedFleet, undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    first = submitted(fleet, job(4, "first-half"))
    finished(fleet, first)
    last = finished(fleet, submitted(fleet, job(6, "second-half"), resume_of=first))
    assert (last.step, last.steps) == (6, 6)


@pytest.mark.slow
def test_a_job_whose_data_fit_nobody_says_why(fleet: FederatedFleet) -> None:
    wanted = Registered("digits", {"x": "picture", "y": "label"})
    training = TrainingSpec(2, 1, optimizer=Optimizer(OptimizerName.SGD))
    name = submitted(fleet, replace(job(2, "misfit"), data=wanted, training=training))

    def told() -> bool:
        update = next(j for j in fleet.client.status().jobs if j.job == name)
        return any("has no field 'picture'" in c.reason for c in update.federated.clients)

    fleet.wait_until(told, "the misfit to be told")
    assert fleet.client.cancel(name).state == "cancelled"


class Plain(nn.Module):
    """The owner's net: logits [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.low(x))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["fedimpro", "moon"])
def test_a_rule_that_changes_the_loss_exports_the_owners_plain_net(fleet: FederatedFleet, rule: str) -> None:
    example = torch.zeros(BATCH, 16)
    module = FedImpro(Plain(), "low", 4, example) if rule == "fedimpro" else Moon(Plain(), "head")
    name = submitted(fleet, replace(job(4, rule, strategy=rule), module=module, metrics=()))
    last = finished(fleet, name)
    net = Plain()
    net.load_state_dict(weights(fleet, name))
    held = samples(64, 99)
    with torch.no_grad():
        loss = F.cross_entropy(net(torch.from_numpy(held["image"])), torch.from_numpy(held["label"]))
    assert float(loss) == pytest.approx(last.eval_loss, rel=1e-5)
    assert not torch.equal(net.head.weight, Plain().head.weight)
