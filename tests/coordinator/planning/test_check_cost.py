"""What a plan says of its spot checks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.job import TrainingSpec
from atoll.plan import LinkPrediction, Prediction, StagePrediction
from coordinator.planning.check_cost import check_cost

TRAINING = TrainingSpec(10_000, 4, checkpoint_every=99, spot_checks=0.01)
STAGES = tuple(StagePrediction(worker, 1.0, 0.5, 1, 1) for worker in "ab")
LINKS = (LinkPrediction("a", "b", 1_000_000, 0.1), LinkPrediction("b", "a", 3_000_000, 0.1))
PREDICTION = Prediction(2.0, 1.0, "stage 0 on a", "", STAGES, LINKS)


def test_a_check_repeats_half_of_what_lies_between_two_checkpoints() -> None:
    cost = check_cost(TRAINING, PREDICTION)
    assert cost is not None
    assert (cost.every, cost.steps) == (100, 50.0)
    assert cost.compute_share == pytest.approx(0.5 * 1.0 / 2.0)
    assert cost.n_bytes == pytest.approx(0.5 * 2_000_000)
    assert "1 in 100 steps" in cost.words
    assert "25.0% of its time" in cost.words
    assert "1 MB per step" in cost.words


def test_checkpoints_by_the_clock_are_as_far_apart_as_steps_fit_between() -> None:
    cost = check_cost(replace(TRAINING, checkpoint_every=0), PREDICTION)
    assert cost is not None
    assert cost.steps == (300.0 / 2.0 + 1) / 2


def test_one_check_at_a_time_takes_no_more_than_a_worker_has() -> None:
    cost = check_cost(replace(TRAINING, spot_checks=1.0), PREDICTION)
    assert cost is not None
    assert cost.compute_share == pytest.approx(1.0)


def test_no_checks_cost_nothing() -> None:
    assert check_cost(replace(TRAINING, spot_checks=0.0), PREDICTION) is None
    assert check_cost(TRAINING, replace(PREDICTION, stages=())) is None
