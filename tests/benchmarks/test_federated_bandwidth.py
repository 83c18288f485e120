"""The comparison on unlike uplinks: its time model, its ratios, its table, and one small training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.opdag import TensorMeta
from benchmarks import bandwidth_lab
from benchmarks import bandwidth_report as reporting
from benchmarks import federated_bandwidth as bench
from benchmarks.bandwidth_report import Line
from benchmarks.federated_mnist import Setting
from compressors.model_file import Coding, write_update
from coordinator.federated.selection import BASE, by_uplink, update_bytes
from lab.reader import read_scenario
from strategies.bcrs import spread

UP = [TensorMeta((200, 784), "float32"), TensorMeta((200,), "float32")]
LINES = {"a": Line(1e6, 4e6, 0.02), "b": Line(2e6, 8e6, 0.01), "c": Line(20e6, 80e6, 0.03)}
STEPS = {"a": 3, "b": 10, "c": 1}


def test_a_round_is_download_steps_upload_and_two_latencies() -> None:
    found = reporting.finish_s(LINES, STEPS, {"a": 125_000.0, "b": 250_000.0}, 500_000.0, 0.1)
    assert found == pytest.approx({"a": 1.0 + 0.3 + 1.0 + 0.04, "b": 0.5 + 1.0 + 1.0 + 0.02})


def test_bcrs_is_told_all_that_comes_before_the_upload() -> None:
    uplink = LINES["a"].uplink(500_000.0, 0.3)
    whole = reporting.finish_s(LINES, {"a": 3}, {"a": 125_000.0}, 500_000.0, 0.1)["a"]
    assert uplink.finish_s(125_000.0) == pytest.approx(whole)


def test_the_shipped_lines_are_those_that_the_promise_names() -> None:
    known = reporting.lines(read_scenario("federated_homes"))
    ups = sorted(line.up_bps for line in known.values())
    assert len(ups) == 10
    assert (ups[0], ups[-1]) == (1e6, 20e6)
    assert {line.down_bps for line in known.values()} == {50e6}
    assert all(0.015 <= line.latency_s <= 0.060 for line in known.values())
    for name, line in reporting.lines(read_scenario("federated_dsl")).items():
        assert line == Line(known[name].up_bps, pytest.approx(4 * line.up_bps), known[name].latency_s)


def test_own_ratios_are_the_coordinators_and_the_slowest_has_the_base() -> None:
    conditions = bench.Conditions(LINES, base=20.0, step_s=0.01)
    found = bench.ratios_of(conditions, "own", STEPS, UP)
    dense = sum(meta.nbytes for meta in UP)
    uplinks = {name: line.uplink(dense, 0.01 * STEPS[name]) for name, line in LINES.items()}
    assert found == dict(by_uplink(UP, uplinks, 20.0).ratios)
    assert found["a"] == 20.0 > found["b"] > found["c"] >= 1.0
    finish = [uplinks[name].finish_s(update_bytes(UP, found[name])) for name in ("a", "b")]
    assert spread(finish) < 0.02


@pytest.mark.parametrize("ratio", [1.0, 2.0, 5.0, 20.0, 100.0])
def test_planned_bytes_are_those_of_the_files_but_for_their_directory(tmp_path: Path, ratio: float) -> None:
    draw = np.random.default_rng(4711)
    up = [*UP, TensorMeta((200, 200), "float32"), TensorMeta((10, 200), "float32")]
    arrays = {f"w{at}": draw.normal(size=meta.shape).astype(np.float32) for at, meta in enumerate(up)}
    made = write_update(tmp_path / "update", arrays, Coding("topk", ratio, frozenset(arrays)))
    directory = 512
    assert made.size - directory <= update_bytes(up, ratio) * 1.002
    assert made.size >= update_bytes(up, ratio) * 0.998


def test_uniform_ratios_have_the_mean_the_bytes_or_the_base_of_those_by_uplink() -> None:
    conditions = bench.Conditions(LINES, base=20.0)
    own = bench.ratios_of(conditions, "own", STEPS, UP)
    sent = [update_bytes(UP, ratio) for ratio in own.values()]
    dense = sum(meta.nbytes for meta in UP)
    mean = bench.ratios_of(conditions, "mean", STEPS, UP)
    assert len(set(mean.values())) == 1
    assert mean["a"] == pytest.approx(sum(dense / s for s in sent) / 3)
    same = bench.ratios_of(conditions, "bytes", STEPS, UP)
    assert 3 * update_bytes(UP, same["a"]) == pytest.approx(sum(sent), rel=0.01)
    assert mean["a"] > same["a"]
    assert set(bench.ratios_of(conditions, "base", STEPS, UP).values()) == {20.0}
    assert bench.ratios_of(conditions, "", STEPS, UP) == {}


def test_an_even_base_has_all_end_within_15_percent_where_one_can() -> None:
    wide = {name: Line(line.up_bps, 100e6, line.latency_s) for name, line in LINES.items()}
    steps = dict.fromkeys(wide, 2)
    found = bench.ratios_of(bench.Conditions(wide, base=0.0), "own", steps, UP)
    sent = {name: update_bytes(UP, ratio) for name, ratio in found.items()}
    dense = sum(meta.nbytes for meta in UP)
    finish = reporting.finish_s(wide, steps, sent, dense, bench.STEP_S)
    assert spread(list(finish.values())) <= 0.15
    assert bench.ratios_of(bench.Conditions(wide, base=0.0), "base", steps, UP)["a"] == found["a"] > 2.0
    assert bench.ratios_of(bench.Conditions(LINES, base=0.0), "own", steps, UP)["a"] == BASE
    assert bench.options().parse_args(["--base", "even"]).base == 0.0


@given(st.floats(1.0, 500.0))
def test_the_ratio_for_some_bytes_gives_those_bytes(ratio: float) -> None:
    assert reporting.ratio_for(lambda r: 1e6 / r, 1e6 / ratio) == pytest.approx(ratio, rel=1e-6)


def run_of(variant: str, seed: int, accuracies: list[float], up: dict[str, int]) -> dict[str, Any]:
    down = {"off": 500_000, "lossless": 400_000, "delta": 300_000}
    curve = [{"accuracy": value, "loss": 1.0, "up": up, "down": down} for value in accuracies]
    facts = {"steps": STEPS, "ratios": {}, "dense_bytes": 250_000, "full_bytes": 250_000, "key": "k"}
    return {"variant": variant, "seed": seed, "curve": curve, **facts}


DENSE_UP = dict.fromkeys(LINES, 250_000)
FEW_UP = {"a": 25_000, "b": 50_000, "c": 250_000}


def test_the_slowest_client_sets_a_rounds_time_and_who_sends_all_is_not_held_back() -> None:
    found = reporting.timed(run_of("bcrs_opwa", 0, [0.5, 0.6], FEW_UP), LINES, 0.1, "delta")
    a, b = 0.6 + 0.3 + 0.2 + 0.04, 0.3 + 1.0 + 0.2 + 0.02
    c = 0.03 + 0.1 + 0.1 + 0.06
    assert found["curve"][1]["lab_s"] == pytest.approx(2 * max(a, b))
    assert found["curve"][1]["up"] == 2 * 325_000
    assert found["curve"][1]["down"] == 2 * 3 * 300_000
    assert found["spread"] == pytest.approx(max(a, b) / c - 1)
    assert (found["held"], found["spread_held"]) == (2, pytest.approx(max(a, b) / min(a, b) - 1))
    assert found["ratio"] == pytest.approx((10 + 5 + 1) / 3)


def test_seconds_to_a_share_of_the_dense_runs_best_are_compared_by_seed() -> None:
    runs = [
        run_of("dense", 0, [0.2, 0.5, 0.8], DENSE_UP),
        run_of("dense", 1, [0.9, 0.9, 0.9], DENSE_UP),
        run_of("topk", 0, [0.1, 0.2, 0.3], FEW_UP),
        run_of("topk", 1, [0.3, 0.85, 0.9], FEW_UP),
        run_of("bcrs_opwa", 0, [0.2, 0.72, 0.8], FEW_UP),
        run_of("bcrs_opwa", 1, [0.85, 0.9, 0.9], FEW_UP),
    ]
    found = reporting.report([reporting.timed(run, LINES, 0.1, "off") for run in runs], 0.9)
    assert found["targets"] == {"0": 72.0, "1": 81.0}
    rows = found["variants"]
    assert rows["topk"]["rounds"] == {"0": None, "1": 2}
    assert rows["topk"]["faster"] == {"0": None, "1": 2.0}
    assert rows["topk"]["faster_mean"] is None, "one seed never got there, so no mean is claimed"
    assert rows["bcrs_opwa"]["faster"] == {"0": 1.0, "1": 1.0}
    dense, ours = rows["dense"]["lab_s"], rows["bcrs_opwa"]["lab_s"]
    assert rows["dense"]["faster"]["0"] == pytest.approx(dense["0"] / ours["0"], rel=0.05)
    json.dumps(found, allow_nan=False)
    reporting.show(found)


def test_a_table_without_dense_or_proposed_runs_claims_nothing() -> None:
    alone = reporting.timed(run_of("topk", 0, [0.5], FEW_UP), LINES, 0.1, "off")
    assert reporting.report([alone], 0.9)["variants"]["topk"]["faster_mean"] is None


def test_another_line_is_another_key_and_a_childs_conditions_survive_the_way() -> None:
    known = bench.Conditions(LINES)
    proposed = bench.VARIANTS["bcrs_opwa"]
    slower = bench.Conditions({**LINES, "a": Line(1e5, 4e6, 0.02)})
    assert known.key(proposed) != slower.key(proposed)
    assert known.key(proposed) != known.key(bench.VARIANTS["bcrs_ef"])


def test_a_small_training_counts_the_files_that_would_travel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tests.benchmarks.test_federated_mnist import SMALL

    monkeypatch.setattr("experiments.datasets.download.read", lambda name: {})
    monkeypatch.setattr("experiments.datasets.corpora.mnist", lambda files: SMALL)
    setting = Setting(images=300, test_images=100, clients=3, chosen=3, beta=0.5, rounds=2, batch=16)
    conditions = bench.Conditions(LINES, setting=setting)
    dense = bench.train(conditions, bench.VARIANTS["dense"], 3)
    ours = bench.train(conditions, bench.VARIANTS["bcrs_opwa"], 3)
    assert dense["split"] == ours["split"]
    assert dense["steps"] == ours["steps"]
    assert set(dense["curve"][0]["up"].values()) == {4 * 199_210}
    up = ours["curve"][1]["up"]
    assert up["a"] < up["b"] < up["c"] <= ours["full_bytes"] * 1.02
    down = ours["curve"][1]["down"]
    assert down["delta"] < down["lossless"] < down["off"]


# ---------------------------------------------------------------- in the lab


def rows(rounds: int) -> list[dict[str, str]]:
    """Metrics of a job with two clients: "a" holds back three quarters and ends at 1.5 s, "b" nothing."""
    found = []
    for at in range(rounds):
        closed_s = 100.0 + 2.0 * at
        points = {"round_s": 1.5, "bytes_up": 1250.0, "bytes_down": 2000.0}
        for name, parts in {
            "a": (1.5, 0.5, 0.2, 0.7, 250.0, 4.0),
            "b": (1.25, 0.5, 0.1, 0.6, 1000.0, 1.0),
        }.items():
            figures = ("took_s", "download_s", "train_s", "upload_s", "bytes_up", "ratio")
            points |= {f"client/{name}/{f}": value for f, value in zip(figures, parts, strict=True)}
        found += [{"name": n, "value": repr(v), "time_s": f"{closed_s:.3f}"} for n, v in points.items()]
        found.append({"name": "eval_accuracy", "value": repr(0.1 * at), "time_s": f"{closed_s + 0.25:.3f}"})
    return found


def test_a_run_in_the_lab_is_told_by_its_jobs_metrics() -> None:
    found = bandwidth_lab.measured(rows(3), bench.VARIANTS["bcrs_opwa"], 1, dense=1000)
    assert [p["lab_s"] for p in found["curve"]] == pytest.approx([1.75, 3.75, 5.75])
    assert found["curve"][-1]["bytes"] == 3 * 3250.0
    assert found["spread"] == pytest.approx(0.2)
    assert (found["spread_held"], found["held"]) == (0.0, 1)
    assert found["ratio"] == pytest.approx((4.0 + 1.0) / 2)
    table = reporting.report([found | {"variant": "dense"}, found], 0.9)
    assert table["variants"]["bcrs_opwa"]["lab_s"] == {"1": 5.8}
    assert "download 0.50, train 0.15, upload 0.65" in bandwidth_lab.told(found)


def test_topk_in_the_lab_has_the_mean_of_the_measured_ratios_of_bcrs() -> None:
    conditions = bench.Conditions(LINES)
    settings = bandwidth_lab.settings(conditions, bench.VARIANTS["topk"], 0, [12.34567])
    assert (settings["UPLINK"], settings["STRATEGY"]) == ("topk:12.3457", "fedavg")
    assert bandwidth_lab.settings(conditions, bench.VARIANTS["bcrs_opwa"], 0, [])["UPLINK"] == "bcrs"
    with pytest.raises(SystemExit, match="mean of BCRS"):
        bandwidth_lab.refuse([bench.VARIANTS["topk"], bench.VARIANTS["dense"]])
    with pytest.raises(SystemExit, match="topk_base need"):
        bandwidth_lab.refuse([bench.VARIANTS["topk_base"], bench.VARIANTS["bcrs_opwa"]])
    bandwidth_lab.refuse([bench.VARIANTS[name] for name in bench.IN_LAB])
