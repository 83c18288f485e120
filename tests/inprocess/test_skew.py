"""Stragglers on simulated time: who waits for whom, by hand-computed times, and what becomes of the late."""

from __future__ import annotations

import pytest
import torch

from atoll.exchange import Exchange
from tests.inprocess.skew import (
    GradientRounds,
    ModelRounds,
    Seconds,
    Skewed,
    by_owners_s,
    drawn_delays,
    heavy_tailed,
    slower,
)

SIZE = 40
GOALS = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(1))


def bowl(rank: int, step: int, model: torch.Tensor) -> torch.Tensor:
    """Gradient of half the squared distance to the rank's goal."""
    return model - GOALS[rank]


def peers(ranks: int, seconds: Seconds, lr: float = 0.05) -> Skewed:
    return Skewed(ranks, torch.zeros(SIZE), bowl, lr, seconds)


def test_a_quorum_of_all_takes_the_slowest_ranks_time() -> None:
    found = GradientRounds(peers(4, slower(1.0, {3: 3.0})), Exchange("eager"), 0.5).run(20)
    assert (found.time_s, found.used, found.late) == (5 * 3.5, 20, 0)


def test_the_synchronous_eager_step_is_the_mean() -> None:
    seconds = slower(1.0, {3: 3.0})
    one = GradientRounds(peers(4, seconds), Exchange("eager"), 0.5).run(20)
    other = GradientRounds(peers(4, seconds), Exchange("mean"), 0.5).run(20)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one.models, other.models, strict=True))


def test_those_that_are_ready_go_and_the_late_gradient_counts_once() -> None:
    # Rounds start at 1, 2.5 and 4; the slow rank's first gradient comes at 3.
    found = GradientRounds(peers(4, slower(1.0, {3: 3.0})), Exchange("eager", quorum=0.5), 0.5).run(10)
    assert (found.time_s, found.used, found.late) == (4.5, 10, 1)
    model = torch.zeros(SIZE)
    for late in (False, False, True):
        step = sum(model - GOALS[rank] for rank in range(3))
        step = step + (0 - GOALS[3]) if late else step
        model = model - 0.05 * step / 4
    assert torch.allclose(found.models[0], model, atol=1e-6)


def test_models_do_not_drift_apart_whoever_is_late() -> None:
    found = GradientRounds(peers(8, heavy_tailed(1.0, 1.0, seed=3)), Exchange("eager", quorum=0.25), 0.1).run(
        200
    )
    assert found.late > 20
    assert all(torch.equal(found.models[0], model) for model in found.models)
    assert torch.allclose(found.models[0], GOALS.mean(0), atol=0.5)


def test_a_deadline_lets_stragglers_in() -> None:
    seconds = slower(1.0, {3: 1.2})
    patient = GradientRounds(peers(4, seconds), Exchange("eager", quorum=0.5, deadline_s=0.3), 0.5).run(40)
    hasty = GradientRounds(peers(4, seconds), Exchange("eager", quorum=0.5), 0.5).run(40)
    assert patient.late == 0
    assert patient.time_s == pytest.approx(10 * 1.7)
    assert hasty.late > 0


def test_groups_end_equal_when_nobody_is_late() -> None:
    def first_only(rank: int, step: int, model: torch.Tensor) -> torch.Tensor:
        return torch.zeros(SIZE) if step else bowl(rank, step, model)

    alike = Skewed(8, torch.zeros(SIZE), first_only, 0.05, slower(1.0, {}))
    found = ModelRounds(alike, Exchange("wagma"), by_owners_s(8.0, 8.0, 0.0)).run(2)
    assert all(torch.equal(found.models[0], model) for model in found.models)
    assert torch.allclose(found.models[0], 0.05 * GOALS.mean(0), atol=1e-6)
    assert (found.late, found.time_s) == (0, 2 * (1.0 + 2 * 3 / 4))


def test_a_late_model_delays_only_the_round_of_all() -> None:
    exchange = Exchange("wagma", quorum=0.5)
    seconds = slower(1.0, {3: 1.5})
    some = ModelRounds(peers(8, seconds), exchange, lambda ranks: 0.0).run(9)
    assert some.time_s == pytest.approx(13.5)  # the slow rank's own; the others are done at 9
    assert some.late > 0
    everybody = ModelRounds(peers(8, seconds), exchange, lambda ranks: 0.0).run(10)
    assert everybody.time_s == pytest.approx(15.0)
    assert all(torch.equal(everybody.models[0], model) for model in everybody.models)


def test_skewed_groups_still_learn_the_mean() -> None:
    found = ModelRounds(
        peers(8, drawn_delays(1.0, 1.0, 8, 2, seed=4)), Exchange("wagma", quorum=0.5), lambda ranks: 0.01
    ).run(100)
    assert found.late > 0
    assert torch.allclose(found.average(), GOALS.mean(0), atol=0.2)


def test_one_seed_draws_the_same_delays() -> None:
    one, other = (drawn_delays(1.0, 0.5, 8, 2, seed=1) for _ in range(2))
    for step in range(5):
        seconds = [one(rank, step) for rank in range(8)]
        assert seconds == [other(rank, step) for rank in range(8)]
        assert sorted(seconds) == [1.0] * 6 + [1.5] * 2
