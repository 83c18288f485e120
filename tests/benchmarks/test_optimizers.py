"""The benchmark of optimizers: its variants, and how their rows become a table."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from atoll.errors import UsageError
from atoll.job import Optimizer, OptimizerName
from benchmarks import optimizers
from benchmarks.optimizers import Variant, summary


def row(seed: int, variant: str, *losses: float) -> dict[str, Any]:
    curve = {10 * (at + 1): loss for at, loss in enumerate(losses)}
    times = {"step_ms": 5.0 + seed, "update_ms": 1.0, "predicted_ms": 2.0}
    return {"seed": seed, "variant": variant, "loss": losses[-1], "curve": curve, **times}


def test_each_optimizer_counts_at_its_best_rate_and_by_the_slower_seed() -> None:
    rows = [
        *(row(0, "adamw:0.001", 4.0, 3.0, 2.0, 1.9), row(1, "adamw:0.001", 4.0, 3.0, 2.0, 2.1)),
        *(row(0, "adamw:0.01", 9.0, 9.0, 9.0, 9.0), row(1, "adamw:0.01", 9.0, 9.0, 9.0, 0.1)),
        *(row(0, "muon:0.01", 3.0, 1.8, 1.7, 1.5), row(1, "muon:0.01", 3.0, 2.2, 2.1, 1.5)),
        *(row(0, "lion:0.01", 3.0, 2.9, 2.8, 2.7), row(1, "lion:0.01", 3.0, 2.2, 2.0, 1.9)),
    ]
    muon, adamw, lion = summary(rows, 40)
    assert (muon["variant"], adamw["variant"], lion["variant"]) == ("muon:0.01", "adamw:0.001", "lion:0.01")
    assert (muon["share_of_steps"], adamw["share_of_steps"], lion["share_of_steps"]) == (0.75, 1.0, None)
    assert (adamw["loss"], adamw["spread"]) == pytest.approx((2.0, 0.2))
    assert adamw["step_ms"] == 5.5
    (alone,) = summary(rows[4:6], 40)
    assert alone["share_of_steps"] is None


def test_a_variant_is_an_optimizer_at_a_rate_and_leaves_the_rest_as_the_job_has_it() -> None:
    declared = Optimizer(weight_decay=0.1, clip_norm=1.0)
    found = Variant.parse("muon:4e-3").of(declared)
    assert (found.name, found.lr) == (OptimizerName.MUON, 4e-3)
    assert (found.weight_decay, found.clip_norm) == (0.1, 1.0)
    for wrong in ("muon", "kfac:0.1", "lion:fast"):
        with pytest.raises(UsageError, match=r"write NAME:RATE, of sgd, adamw, muon"):
            Variant.parse(wrong)


def test_a_short_run_trains_compares_bits_and_prints_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(optimizers, "HELD_OUT", 1)
    small = [part for knob in ("WIDTH=32", "LAYERS=1", "MICRO_BATCH=2") for part in ("--set", knob)]
    options = ["--steps", "2", "--seeds", "1", "--variants", "adamw:1e-3,muon:1e-3", "--plans", "1", *small]
    monkeypatch.setattr(sys, "argv", ["optimizers", *options, "--json"])
    assert optimizers.main() == 0
    said = capsys.readouterr().out
    assert "muon: 1 cuts, as many plans of replicas: max_abs_diff 0.0" in said
    assert '"max_abs_diff": 0.0' in said.splitlines()[-1]
