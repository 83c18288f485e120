"""The digits app gives the accuracies that its README lists, and runs every rule and a codec."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Context, RecordDict

from benchmarks import vs_flower_job
from coordinator.client.prepare import prepare
from examples.flower_digits.flower_digits import client_app, server_app, task
from strategies import STRATEGIES
from tests.inprocess.federation import LocalFederation, local_model
from tests.parameters import sampled
from tests.strategies.flower_grid import LocalGrid

APP = Path(__file__).resolve().parents[2] / "examples" / "flower_digits"
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


@pytest.mark.parametrize("rule", sampled(10, STRATEGIES))
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


def test_paired_with_a_native_job_it_trains_on_the_same_batches(tmp_path: Path) -> None:
    names, share = ("a", "b"), vs_flower_job.HELD_OUT_SHARE
    app = accuracies(2, tmp_path, **{"paired-with": " ".join(names), "held-out": share})
    native = vs_flower_job.job()
    assert native.federated is not None
    prepared = prepare(native)
    graphs, state = prepared.graphs, native.module.state_dict()
    model = local_model(graphs.dag, graphs.eval_dag, state, prepared.spec.training)
    parts = {name: task.partition(at, 2, 0.5, vs_flower_job.SEED) for at, name in enumerate(names)}
    clients = {name: {"pixels": x.numpy(), "label": y.numpy()} for name, (x, y) in parts.items()}
    federation = LocalFederation(model, native.federated, clients, inputs={"x": "pixels", "y": "label"})
    found, net = [], task.make_model(vs_flower_job.SEED)
    for _ in app:
        federation.run_round()
        weights = {n.removeprefix("net."): torch.tensor(a) for n, a in federation.weights.items()}
        net.load_state_dict(weights)
        found.append(round(task.evaluate(net, task.held_out(full_batches=True))[1], 4))
    assert app == found
    assert app != accuracies(2, tmp_path), "by itself it draws others"


def test_rules_of_atoll_cannot_be_paired(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="paired-with is for fedavg"):
        accuracies(2, tmp_path, **{"paired-with": "a b", "strategy": "atoll.scaffold"})
