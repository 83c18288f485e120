"""The arithmetic of the slow-link benchmark; the lab itself is tests/lab/test_lab.py's."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.adaptive_compression import (
    ADAPTIVE,
    CASES,
    CHOOSER,
    Series,
    aggregate,
    bytes_by_link,
    learns,
    same_losses,
    slowest_ratio,
    told_run,
)
from lab.scenario import shipped_names


def run_of(step_s: float, predicted_s: float = 0.0, losses: tuple[float, ...] = (4.0, 3.5, 3.0)) -> Series:
    series = Series()
    run: dict[str, Any] = {"step_s": [9.0, 9.0, step_s, step_s], "loss": list(losses)}
    if predicted_s:
        prediction = {"step_s": predicted_s, "lower_bound_s": predicted_s / 2, "bottleneck": "latency"}
        stages = [{"start": 0, "stop": 5, "workers": ["w1"]}]
        links = [{"ratio": 1.0}, {"ratio": 88.0}]
        run["plan"] = {
            "prediction": prediction,
            "stages": stages,
            "schedule": "1f1b",
            "links": links,
        }
        run["links"] = [
            {"source": "w1", "target": "w2", "bytes_per_step": 70, "codec": "topk", "ratio": 88.0}
        ]
    series.add(run)
    return series


def test_every_case_has_a_shipped_scenario() -> None:
    assert set(CASES) <= set(shipped_names())


def test_the_first_steps_of_a_run_are_not_counted() -> None:
    assert run_of(2.0).measured_s == 2.0


def test_speeds_errors_and_limits_are_those_of_the_medians() -> None:
    found = {
        "even_off": run_of(16.0, 14.0),
        "op_fence_off": run_of(6.0, 5.4),
        ADAPTIVE: run_of(2.0, 2.2),
        "torch_gpipe": run_of(8.0),
    }
    figures = aggregate(found, 16, {})
    assert figures["samples_per_s"] == {
        "even_off": 1.0,
        "op_fence_off": 2.6667,
        ADAPTIVE: 8.0,
        "torch_gpipe": 2.0,
    }
    assert figures["over"] == {"even_off": 8.0, "op_fence_off": 3.0, "torch_gpipe": 4.0}
    assert figures["prediction_error"] == {"even_off": -0.125, "op_fence_off": -0.1, ADAPTIVE: 0.1}
    assert figures["limit_ratio"][ADAPTIVE] == pytest.approx(2.0 / 1.1, abs=1e-4)
    assert figures["same_losses"]
    assert figures["learns"] == {ADAPTIVE: True}
    assert figures["chooser_over_off"] is None


def test_the_chooser_is_compared_with_off() -> None:
    figures = aggregate({"op_fence_off": run_of(2.0, 2.0), CHOOSER: run_of(1.6, 1.6)}, 8, {})
    assert figures["chooser_over_off"] == pytest.approx(1.25)


def test_losses_of_dense_variants_must_follow_the_reference() -> None:
    reference = run_of(1.0, 1.0)
    other = run_of(1.0, 1.0, losses=(4.0, 3.5, 3.1))
    assert same_losses({"op_fence_off": reference, "even_off": run_of(1.0, 1.0)}, "op_fence_off")
    assert not same_losses({"op_fence_off": reference, "torch_1f1b": other}, "op_fence_off")
    assert same_losses({"op_fence_off": reference, ADAPTIVE: other}, "op_fence_off")


def test_a_run_learns_when_its_losses_are_finite_and_fall() -> None:
    assert learns([5.0, 4.0, 3.0])
    assert not learns([3.0, 4.0, 5.0])
    assert not learns([5.0, float("nan"), 3.0])
    assert not learns([5.0])


def test_uniform_takes_the_ratio_of_the_slowest_link() -> None:
    assert slowest_ratio({"links": [{"ratio": 1.0}, {"ratio": 4.0}, {"ratio": 97.5}]}) == 97.5
    assert slowest_ratio({"links": []}) == 1.0


def test_a_run_is_told_with_each_stages_compute() -> None:
    series = run_of(2.0, 2.2)
    series.plan["prediction"]["stages"] = [{"worker": "w1", "compute_s": 0.5}]
    series.stages = [{"worker": "w1", "forward_s": 0.2, "backward_s": 0.25}]
    assert told_run(series, {"w1": "a1"}) == "   2.000 s a step, 2.200 predicted; compute a1 0.45/0.50"
    assert told_run(run_of(8.0), {}) == "   8.000 s a step"


def test_bytes_are_what_links_reported_under_the_hosts_names() -> None:
    reported = bytes_by_link(run_of(1.0, 1.0), {"w1": "a1", "w2": "b1"})
    assert reported == {"a1>b1": {"bytes": 70, "dense_bytes": 0, "codec": "topk", "ratio": 88.0}}
    silent = Series(plan={"prediction": {"links": [{"source": "w1", "target": "w2", "bytes_per_step": 5}]}})
    assert bytes_by_link(silent, {}) == {"w1>w2": {"bytes": 5}}
