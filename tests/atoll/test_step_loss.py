"""The loss of a step: means of means, sums over counts, and what is not finite."""

from __future__ import annotations

import math

import pytest

from atoll.job import Optimizer
from atoll.step_loss import StepLoss, step_loss

NAN = math.nan


def test_without_weights_it_is_the_sum_of_the_shares() -> None:
    assert step_loss((0.1, 0.2, 0.3)) == StepLoss((0.1 + 0.2) + 0.3, count=3)


def test_sums_are_divided_by_the_sum_of_their_weights() -> None:
    assert step_loss((6.0, 1.0), (3.0, 1.0)) == StepLoss(7.0 / 4.0, 4.0, count=2)


def test_what_is_not_finite_is_left_out_of_the_mean_and_counted() -> None:
    assert step_loss((NAN, 0.5, 0.25)) == StepLoss(0.75 * 3 / 2, odd=1, count=3)
    found = step_loss((math.inf, 6.0), (2.0, 3.0))
    assert (found.mean, found.weight, found.odd) == (2.0, 5.0, 1)
    assert found.words == "the loss of 1 of 2 micro-batches is not finite, the loss shown is of the other 1"
    assert math.isnan(step_loss((NAN, NAN)).mean)


def test_nothing_counted_is_no_update() -> None:
    found = step_loss((0.0, 0.0), (0.0, 0.0))
    assert found.empty
    assert "no update" in found.words
    assert Optimizer(clip_norm=1.0).gradient_scale((4.0,), found.weight) == 0.0


def test_as_many_weights_as_losses() -> None:
    with pytest.raises(ValueError, match="2 losses with 1 weights"):
        step_loss((1.0, 2.0), (1.0,))


def test_gradients_are_divided_by_the_weight_and_then_clipped() -> None:
    assert Optimizer().gradient_scale((9.0,), 4.0) == 0.25
    clipped = Optimizer(clip_norm=0.5).gradient_scale((16.0 * 9.0,), 4.0)  # a norm of 12 / 4
    assert clipped == pytest.approx(0.5 / 3.0 / 4.0, rel=1e-5)
    assert Optimizer(clip_norm=0.5).gradient_scale((9.0,)) == min(1.0, 0.5 / (3.0 + 1e-6))
