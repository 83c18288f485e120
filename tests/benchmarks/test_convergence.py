"""The convergence benchmark: what it plans, what it keeps, and what it reports."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import convergence
from benchmarks.convergence import Experiment, Variant, key_of, options, stored, train, variants_of
from benchmarks.convergence_report import plot, points, report, show
from coordinator.client.job_file import load_job

ROOT = Path(__file__).resolve().parents[2]
TINY = ("MICRO_BATCH=4", "n_micro=2", "steps=3", "SEED=1")


def run_of(variant: str, seed: int, exported: float, coded: float | None = None) -> dict[str, Any]:
    curve = [
        {
            "step": s,
            "loss": 3.0,
            "slow_bytes": 10.0 * s,
            "held_out": exported + 1 / s,
            "coded": exported,
        }
        for s in (1, 2)
    ]
    return {
        "key": "k",
        "seed": seed,
        "variant": variant,
        "curve": curve,
        "exported": exported,
        "coded": coded or exported,
        "slow_bytes_per_step": 100.0,
        "dense_slow_bytes_per_step": 1000,
        "all_bytes_per_step": 2000.0,
        "lab_step_s": 2.0,
        "links": [],
    }


def arguments(*words: str) -> argparse.Namespace:
    return options().parse_args(list(words))


# ---------------------------------------------------------------- variants and state


def test_a_variant_is_a_name_what_links_do_and_how_long_they_stay_dense() -> None:
    assert Variant.parse("warm=adatopk:20@100") == Variant("warm", "adatopk:20", 100)
    assert Variant.parse("own=topk:8:independent") == Variant("own", "topk:8:independent", 0)
    with pytest.raises(SystemExit, match="NAME=COMPRESS"):
        Variant.parse("nothing")


def test_the_promised_variants_are_always_there() -> None:
    assert list(variants_of(10.0, ["x=bf16"])) == ["dense", "adatopk", "uniform", "x"]


def test_a_stored_line_counts_only_for_the_same_question() -> None:
    one = Variant("adatopk", "adatopk:10")
    asked = arguments("--steps", "800")
    assert key_of(asked, one) == key_of(arguments(), one)
    assert key_of(asked, one) != key_of(arguments("--steps", "200"), one)
    assert key_of(asked, one) != key_of(asked, Variant("adatopk", "adatopk:10", 50))


def test_a_torn_line_of_the_state_file_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    path.write_text(json.dumps(run_of("dense", 0, 2.0)) + '\n{"key": "k", "seed": 1, "var')
    assert [r["seed"] for r in stored(path)] == [0]
    assert list(stored(tmp_path / "none")) == []


def test_what_is_done_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state.jsonl"
    asked = arguments("--seeds", "2", "--state", str(state))
    dense = variants_of(10.0, [])["dense"]
    lines = [{**run_of("dense", seed, 2.0), "key": key_of(asked, dense)} for seed in (0, 1)]
    state.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(convergence, "_start", lambda *_: pytest.fail("started a training"))
    assert [r["seed"] for r in convergence.run_all(asked, [dense])] == [0, 1]


# ---------------------------------------------------------------- figures


def test_gaps_are_means_over_paired_seeds() -> None:
    results = [
        run_of("dense", 0, 2.0),
        run_of("dense", 1, 4.0),
        run_of("adatopk", 0, 2.02, coded=2.0),
        run_of("adatopk", 1, 4.12),
        run_of("uniform", 0, 2.2),
        run_of("uniform", 1, 4.4),
    ]
    found = report(results)
    assert found["adatopk_over_dense"] == pytest.approx(0.02)
    assert found["within_dense"]
    assert found["adatopk_over_uniform"] < 0
    assert found["variants"]["adatopk"]["gap"] == pytest.approx(0.005)
    assert found["variants"]["uniform"]["slow_shrunk"] == 10.0
    assert found["variants"]["uniform"]["over_dense"] == pytest.approx(0.1)


def test_a_broken_promise_is_told() -> None:
    found = report([run_of("dense", 0, 2.0), run_of("adatopk", 0, 2.1), run_of("uniform", 0, 2.0)])
    assert found["within_dense"] is False
    assert found["within_uniform"] is False


def test_the_curve_is_averaged_over_seeds_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [run_of(name, seed, 2.0 + seed) for name in ("dense", "adatopk") for seed in (0, 1)]
    curve = points({r["seed"]: r for r in results if r["variant"] == "dense"})
    assert [(p["step"], p["lab_s"], p["slow_bytes"]) for p in curve] == [(1, 2.0, 10.0), (2, 4.0, 20.0)]
    assert curve[0]["held_out"] == pytest.approx(3.5)
    assert (curve[0]["low"], curve[0]["high"]) == (3.0, 4.0)
    plot(results, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000
    show(report(results))
    assert "AdaTopK over dense" in capsys.readouterr().out


# ---------------------------------------------------------------- the trainings


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return Experiment(load_job(ROOT / "examples" / "gpt.py", TINY), "two_islands", 10.0)


def test_a_job_that_one_machine_holds_is_refused() -> None:
    job = load_job(ROOT / "examples" / "gpt.py", ("WIDTH=64", "MICRO_BATCH=1", "n_micro=2"))
    with pytest.raises(SystemExit, match="one stage only"):
        Experiment(job, "two_islands", 10.0)


def test_adatopk_shrinks_the_slow_link_and_leaves_fast_ones_dense(experiment: Experiment) -> None:
    specs = experiment.links(variants_of(10.0, [])["adatopk"])
    shrunk = {(s.source, s.target) for s in specs if s.codec != "none"}
    assert shrunk == experiment.slow
    uniform = experiment.links(variants_of(10.0, [])["uniform"])
    assert {s.codec for s in uniform} == {"topk"}
    assert len({s.ratio for s in uniform}) == 1


def test_uniform_sends_the_same_bytes_over_the_slow_link(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convergence, "CURVE_BATCHES", 1)
    monkeypatch.setattr(convergence, "FINAL_BATCHES", 4)
    known = variants_of(10.0, [])
    found = {name: train(experiment, known[name], every=4) for name in known}
    assert found["uniform"]["slow_bytes_per_step"] == pytest.approx(
        found["adatopk"]["slow_bytes_per_step"], rel=0.03
    )
    assert found["dense"]["slow_bytes_per_step"] == found["dense"]["dense_slow_bytes_per_step"]
    assert found["dense"]["all_bytes_per_step"] > found["adatopk"]["all_bytes_per_step"]
    # The plain module with the trained weights evaluates as the stages do.
    for run in found.values():
        assert run["exported"] == pytest.approx(run["plain"], rel=1e-5)
    assert found["dense"]["coded"] == pytest.approx(found["dense"]["plain"], rel=1e-6)
