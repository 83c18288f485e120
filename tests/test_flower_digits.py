"""The digits app gives the accuracies that its README lists, and runs every rule and a codec."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict

from examples.flower_digits.flower_digits import client_app, server_app, task
from strategies import STRATEGIES
from tests.flower_grid import LocalGrid

APP = Path(__file__).resolve().parents[1] / "examples" / "flower_digits"
DEFAULTS: dict[str, Any] = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"][
    "config"
]
LISTED = {
    2: [0.5972, 0.7139, 0.8000, 0.8639, 0.8694],
    4: [0.5806, 0.6917, 0.7333, 0.8278, 0.8722],
}


def accuracies(nodes: int, out: Path, **settings: Any) -> list[float]:
    """The app's run, all of it in this process."""
    run = {**DEFAULTS, "min-nodes": nodes, "out": str(out / "found.json"), **settings}
    grid = LocalGrid(dict.fromkeys(range(nodes), client_app.app))
    for node in range(nodes):
        config = {"partition-id": node, "num-partitions": nodes}
        grid.contexts[node] = Context(1, node, config, RecordDict(), run)  # type: ignore[arg-type]
    server_app.app(grid, Context(1, 0, {}, RecordDict(), run))
    found = json.loads((out / "found.json").read_text())
    assert len(found["round_s"]) == run["num-server-rounds"]
    return [round(share, 4) for share in found["acc"][1:]]


@pytest.mark.parametrize("nodes", LISTED)
def test_the_plain_app_gives_the_listed_accuracies(nodes: int, tmp_path: Path) -> None:
    assert accuracies(nodes, tmp_path) == LISTED[nodes]


def test_our_fedavg_gives_them_too(tmp_path: Path) -> None:
    assert accuracies(4, tmp_path, strategy="atoll.fedavg") == LISTED[4]


def test_our_fedprox_agrees_with_flowers(tmp_path: Path) -> None:
    theirs = accuracies(4, tmp_path, strategy="fedprox")
    assert accuracies(4, tmp_path, strategy="atoll.fedprox") == theirs
    assert theirs != LISTED[4]


@pytest.mark.parametrize("rule", STRATEGIES)
def test_every_rule_runs_in_the_app(rule: str, tmp_path: Path) -> None:
    options = {"options": '{"faulty": 0}'} if rule == "krum" else {}
    found = accuracies(3, tmp_path, strategy=f"atoll.{rule}", **{"num-server-rounds": 2, **options})
    assert max(found) > 0.2


def test_a_codec_packs_what_clients_upload(tmp_path: Path) -> None:
    found = accuracies(2, tmp_path, codec="topk:10")
    assert found != LISTED[2]
    assert found[-1] > 0.7
    assert accuracies(2, tmp_path, codec="lossless") == LISTED[2]


def test_the_model_and_the_split_are_those_of_the_table() -> None:
    assert sum(p.numel() for p in task.make_model(0).parameters()) == 9610
    parts = [task.partition(client, 4, 0.5, 0) for client in range(4)]
    assert sum(len(labels) for _, labels in parts) == 1797 - task.HELD_OUT
