"""One job ends with the same weights in one process, on real workers, and as a Flower app."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from atoll import Federated, Job
from benchmarks.federated_fleet import FederatedFleet
from benchmarks.real_workers import LoopbackFleet
from coordinator.client.prepare import prepare
from tests.e2e.same_job import CLIENTS, Classifier, furthest, in_this_process, job, samples, write_app

RULES = ("fedavg", "fedavgm", "fedprox", "scaffold", "fednova", "feddyn")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workers() -> Iterator[FederatedFleet]:
    with FederatedFleet([samples(name) for name in CLIENTS]) as started:
        yield started


def on(fleet: FederatedFleet, what: Job, path: Path) -> float:
    """How far the fleet's weights are from those of this process."""
    name = fleet.client.submit(prepare(what)).job
    deque(fleet.watch(name), maxlen=0)
    fleet.client.export(name, path)
    return furthest(load_file(path), in_this_process(what))


@pytest.mark.parametrize("rule", RULES)
def test_real_workers_end_with_the_very_weights_of_one_process(
    rule: str, workers: FederatedFleet, tmp_path: Path
) -> None:
    assert on(workers, job(rule), tmp_path / "weights") == 0.0


@pytest.mark.parametrize("downlink", ["lossless", "delta"])
def test_how_the_model_goes_down_changes_no_bit(
    downlink: str, workers: FederatedFleet, tmp_path: Path
) -> None:
    assert on(workers, job("scaffold", downlink=downlink), tmp_path / "weights") == 0.0


def test_clients_of_unlike_ranks_join_what_one_process_joins(workers: FederatedFleet, tmp_path: Path) -> None:
    rule = Federated("flora", {"scaling": 1.0, "ranks": "worker0=1"}, held_out=0.0, evaluate_every=0)
    adapted = get_peft_model(Classifier(), LoraConfig(r=4, lora_alpha=4, target_modules=["layers.0"]))
    what = replace(job("fedavg"), module=adapted, federated=rule)
    equal = replace(what, federated=replace(rule, options={"scaling": 1.0}))
    assert on(workers, what, tmp_path / "weights") == 0.0
    assert furthest(in_this_process(what), in_this_process(equal)) > 1e-4


def test_residuals_are_kept_alike(workers: FederatedFleet, tmp_path: Path) -> None:
    what = job("fedavg", uplink="topk:4", error_feedback=True)
    assert on(workers, what, tmp_path / "weights") == 0.0


# ---------------------------------------------------------------- Flower


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stock simulation has left each rule's weights."""
    pytest.importorskip("flwr")
    pytest.importorskip("ray")
    from benchmarks.rivals.flower_stock import StockFlower

    folder = tmp_path_factory.mktemp("simulated")
    with StockFlower(len(CLIENTS), simulation=True) as flower:
        flower.run(write_app(folder), {"rules": " ".join(RULES), "weights": str(folder)})
    return folder


@pytest.fixture(scope="module")
def run_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the app has left them when our coordinator and workers ran it."""
    pytest.importorskip("flwr")
    from tests.coordinator.flower.flower_apps import run

    folder = tmp_path_factory.mktemp("here")
    with LoopbackFleet(len(CLIENTS), options=("--allow-apps",)) as fleet:
        run(fleet, write_app(folder), folder / "found", rules=" ".join(RULES), weights=str(folder))
    return folder


@pytest.mark.parametrize("rule", RULES)
def test_the_flower_path_in_the_stock_simulation_ends_with_the_native_weights(
    rule: str, simulated: Path
) -> None:
    assert furthest(load_file(simulated / rule), in_this_process(job(rule))) <= 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_the_flower_path_on_our_own_workers_ends_with_the_native_weights(rule: str, run_here: Path) -> None:
    assert furthest(load_file(run_here / rule), in_this_process(job(rule))) <= 1e-6
