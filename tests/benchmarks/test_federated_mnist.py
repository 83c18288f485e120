"""The comparison of federated rules: what it reports, and one small training of each kind."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import federated_mnist as bench
from benchmarks import federated_report as reporting
from experiments.datasets import download
from experiments.datasets.corpora import Mnist
from tests.inprocess.federation import RoundMetrics

DRAW = np.random.default_rng(0)
PATTERNS = DRAW.integers(0, 256, (10, 28, 28))
LABELS = np.arange(400) % 10


def made(labels: Any) -> Any:
    """Images that show their label."""
    noisy = PATTERNS[labels] * 0.7 + DRAW.integers(0, 77, (len(labels), 28, 28))
    return noisy.astype(np.uint8)


SMALL = Mnist(made(LABELS), LABELS.astype(np.uint8), made(LABELS[:100]), LABELS[:100].astype(np.uint8))
SETTING = bench.Setting(images=300, test_images=100, clients=4, chosen=2, beta=0.5, rounds=2, batch=16)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "read", lambda name: {})
    monkeypatch.setattr("experiments.datasets.corpora.mnist", lambda files: SMALL)


@pytest.mark.parametrize("name", ["fedavg", "fedimpro", "vhl", "feddyn"])
def test_a_training_gives_a_curve_with_its_cost_and_is_repeatable(small: None, name: str) -> None:
    torch.manual_seed(123)
    found = bench.train(SETTING, bench.Links(), bench.VARIANTS[name], seed=3)
    assert len(found["curve"]) == 2
    assert 0 <= found["curve"][0]["accuracy"] <= 1
    assert found["curve"][1]["bytes"] == 2 * found["curve"][0]["bytes"] > 4 * 2 * 2 * 44_426
    assert found["curve"][1]["lab_s"] > found["curve"][0]["lab_s"] > 0
    if name == "fedavg":
        torch.manual_seed(5)
        again = bench.train(SETTING, bench.Links(), bench.VARIANTS[name], seed=3)
        assert again["curve"] == found["curve"]
        assert again["split"] == found["split"]


def test_the_net_has_the_weights_that_the_setting_says() -> None:
    assert sum(p.numel() for p in bench.LeNet().parameters()) == 44_426


def test_the_slowest_participant_sets_the_rounds_time() -> None:
    links = bench.Links(slowest_up_bps=1e6, fastest_up_bps=4e6, down=2.0, latency_s=0.5, flops=1e6)
    run = RoundMetrics(0, ("a", "c"), 1.0, {"a": 3, "c": 30}, {"a": 125_000, "c": 125_000}, 250_000)
    slow = 1.0 + 1.0 + 3 * 0.1 + 1.0
    fast = 1.0 + 0.25 + 30 * 0.1 + 0.25
    assert links.round_s(run, ["c", "a", "b"], 1e5) == pytest.approx(max(slow, fast))


def run_of(variant: str, seed: int, accuracies: list[float]) -> dict[str, Any]:
    curve = [
        {"accuracy": value, "loss": 1.0, "bytes": 10 * at, "lab_s": 2.0 * at}
        for at, value in enumerate(accuracies, 1)
    ]
    return {"variant": variant, "seed": seed, "key": "k", "curve": curve}


def test_gains_are_paired_by_seed_with_students_interval() -> None:
    base = [run_of("fedavg", seed, [0.1, value]) for seed, value in enumerate([0.5, 0.6, 0.7])]
    other = [run_of("vhl", seed, [0.3, value]) for seed, value in enumerate([0.52, 0.61, 0.73])]
    row = reporting.report(base + other)["rules"]["vhl"]
    assert row["gain_best"]["by_seed"] == [2.0, 1.0, 3.0]
    assert row["gain_best"]["mean"] == 2.0
    assert row["gain_best"]["interval"] == pytest.approx([2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5], abs=1e-3)
    assert row["gain_last"]["by_seed"] == [11.0, 10.5, 11.5]
    assert row["promised"] is True
    assert row["to_base"] == {"reached": 3, "seeds": 3, "rounds": 2, "bytes": 20, "lab_s": 4.0}


def test_two_lost_seeds_of_five_do_not_keep_the_promise() -> None:
    base = [run_of("fedavg", seed, [0.5]) for seed in range(5)]
    lucky = [run_of("vhl", seed, [value]) for seed, value in enumerate([0.9, 0.6, 0.6, 0.4, 0.4])]
    assert reporting.report(base + lucky)["rules"]["vhl"]["promised"] is False


def test_a_single_seed_has_no_interval_and_an_unpaired_one_no_gain() -> None:
    found = reporting.report([run_of("fedavg", 0, [0.5]), run_of("vhl", 0, [0.6]), run_of("moon", 1, [0.6])])
    assert found["rules"]["vhl"]["gain_best"]["interval"] is None
    assert found["rules"]["moon"]["gain_best"] is None
    json.dumps(found, allow_nan=False)
    reporting.show(found)


def test_a_target_that_is_never_reached_costs_nothing_and_says_so() -> None:
    run = run_of("vhl", 0, [0.2, 0.4])
    assert reporting.cost_to(run, 30.0) == {"rounds": 2, "bytes": 20, "lab_s": 4.0}
    assert reporting.cost_to(run, inf) is None


def test_a_torn_line_of_the_state_file_is_left_out_and_the_setting_is_part_of_the_key(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    line = json.dumps(run_of("vhl", 0, [0.5]))
    path.write_text(line + "\n" + line[:-9] + "\n[]\n")
    assert [run["variant"] for run in bench.stored(path)] == ["vhl"]
    assert bench.stored(tmp_path / "none") == []
    vhl, links = bench.VARIANTS["vhl"], bench.Links()
    assert bench.key_of(SETTING, links, vhl) != bench.key_of(bench.Setting(), links, vhl)


def test_rules_of_ones_own_join_the_table() -> None:
    found = bench.variants(["avgm9=fedavgm:beta=0.9,lr=0.1", "far=fedimpro:ramp_rounds=50"])
    assert found["avgm9"].options == {"beta": 0.9}
    assert found["avgm9"].lr == 0.1
    assert found["far"].wrap is bench.WRAPPERS["fedimpro"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    runs = [run_of(name, seed, [0.1, 0.5]) for name in ("fedavg", "vhl") for seed in range(2)]
    reporting.plot(runs, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
