"""GPT-2 across a fleet of the lab: its job, the one process beside it, and what is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.large import JOB, SIZES, alone, figures
from benchmarks.large_job import SIZES as MODELS
from coordinator.client.job_file import load_job

MIB = 1 << 20


def run(loss: list[float]) -> dict[str, Any]:
    """A run of two stages, as a fleet of the lab reports it."""
    stages = [{"memory_bytes": 100 * MIB}, {"memory_bytes": 80 * MIB}]
    prediction = {"step_s": 2.0, "lower_bound_s": 1.0, "bottleneck": "stage 0", "stages": stages}
    return {
        "plan": {"stages": [{"start": 0}, {"start": 9}], "schedule": "1f1b", "prediction": prediction},
        "loss": loss,
        "step_s": [9.0, 2.2, 2.0, 2.2],
        "stages": [{"stage": 1, "measured_bytes": 60 * MIB}, {"stage": 0, "measured_bytes": 110 * MIB}],
        "in_all_s": 60.0,
    }


ONE = {"loss": [3.0, 2.0], "step_s": [1.0, 0.5, 0.7, 0.6], "peak_mib": 500.0}


def test_a_run_is_compared_with_its_plan_and_with_one_process() -> None:
    found = figures(run([3.0, 2.0]), ONE)
    assert found["most_relative_gap"] == 0.0
    assert (found["step_s"], found["over_plan"]) == (2.2, 1.1)  # without the first step
    assert [each["measured_mib"] for each in found["memory"]] == [110.0, 60.0]
    assert found["most_over_memory"] == pytest.approx(1.1)
    assert found["one_process_s"] == 0.6


def test_other_losses_or_fewer_of_them_are_noticed() -> None:
    assert figures(run([3.0, 2.002]), ONE)["most_relative_gap"] == pytest.approx(1e-3)
    with pytest.raises(ValueError, match="longer"):
        figures(run([3.0]), ONE)


def test_every_size_has_a_model_with_a_tied_head() -> None:
    assert set(SIZES) == set(MODELS)
    module = load_job(Path(JOB), ["SIZE=tiny"]).module
    assert module.get_parameter("lm_head.weight") is module.get_parameter("transformer.wte.weight")


@pytest.mark.slow
def test_one_process_trains_the_same_twice_and_another_seed_otherwise() -> None:
    settings = ["SIZE=tiny", "LENGTH=8", "N_MICRO=2", "steps=2"]
    first, again, other = (alone([*settings, f"SEED={seed}"], 2)["loss"] for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len(first) == 2
