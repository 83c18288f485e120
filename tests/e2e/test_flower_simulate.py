"""`atoll flower simulate`: many nodes on a few workers, with the accuracies of stock Flower."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from benchmarks.rivals.flower_stock import StockFlower
from protos.app_bundle import make_bundle
from tests.examples.test_flower_digits import APP, LISTED
from tests.patience import HUNG_S

NODES, MANY = 4, 100


def simulated(app: Path, nodes: int, workers: int, out: Path, **config: Any) -> tuple[list[float], list[Any]]:
    """Accuracies after every round, and the run's events."""
    pairs = {"min-nodes": nodes, "out": str(out), **config}
    words = " ".join(f"{key}={json.dumps(value)}" for key, value in pairs.items())
    command = [sys.executable, "-P", "-m", "coordinator.cli", "flower", "simulate", str(app), "--json"]
    command += ["--nodes", str(nodes), "--workers", str(workers), "--run-config", words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return [round(share, 4) for share in json.loads(out.read_text())["acc"][1:]], events


@pytest.mark.slow
def test_nodes_on_two_workers_give_the_listed_accuracies_and_what_they_write_is_no_part_of_the_app(
    tmp_path: Path,
) -> None:
    app = tmp_path / "digits"
    shutil.copytree(APP, app, ignore=shutil.ignore_patterns("__pycache__"))
    before = make_bundle(app).hash
    found, events = simulated(app, NODES, 2, app / "final_model.json")
    assert found == LISTED[NODES]
    (nodes,) = [event["nodes"] for event in events if event["event"] == "nodes"]
    assert [node["partition"] for node in nodes] == list(range(NODES))
    assert len({node["worker"] for node in nodes}) == 2
    assert (app / "final_model.json").exists()
    assert make_bundle(app).hash == before


@pytest.mark.slow
def test_a_hundred_nodes_give_stock_simulations_accuracies(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with StockFlower(MANY, simulation=True) as flower:
        stock = [round(share, 4) for share in flower.run(APP, {"min-nodes": MANY})["acc"][1:]]
    found, _ = simulated(APP, MANY, 2, tmp_path / "found.json")
    # Sums go in the order of node ids, which Flower draws: the last bits differ, one image may.
    assert found == pytest.approx(stock, abs=1.5 / 360)
