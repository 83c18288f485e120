"""What a worker's steps teach of its speed."""

from __future__ import annotations

from random import Random

import pytest

from coordinator.membership.roster import Ratio


def taught(ratio: Ratio, *measured_s: float) -> float:
    """The ratio after steps for which a plan at ratio 2.0 foretold 2.0 s."""
    for seconds in measured_s:
        ratio.refine(2.0, 2.0, seconds)
    return ratio.value


@pytest.mark.parametrize("changed_s", [0.7, 1.4])
def test_a_machine_whose_speed_changes_is_believed_after_three_steps(changed_s: float) -> None:
    ratio = Ratio(leaps=True)
    assert taught(ratio, *[1.0] * 20) == pytest.approx(1.0)
    assert abs(taught(ratio, changed_s, changed_s) - changed_s) > 0.2
    assert taught(ratio, changed_s) == pytest.approx(changed_s)
    assert taught(ratio, 1.1 * changed_s) == pytest.approx(1.025 * changed_s)  # one of four again


def test_steps_apart_that_are_not_in_a_row_or_not_on_one_side_change_it_slowly() -> None:
    for steps in ([1.5, 1.5, 1.0], [1.5, 0.5], [1.14]):
        ratio, slow = Ratio(leaps=True), Ratio()
        assert taught(ratio, *[1.0] * 20, *steps * 5) == taught(slow, *[1.0] * 20, *steps * 5)


def test_what_differs_by_a_tenth_is_noise() -> None:
    rng = Random(1)
    steps = [rng.gauss(1.0, 0.07) for _ in range(300)]
    assert taught(Ratio(leaps=True), *steps) == taught(Ratio(), *steps)


def test_impossible_figures_teach_nothing() -> None:
    ratio = Ratio(leaps=True)
    taught(ratio, 1.0)
    assert taught(ratio, *[float("nan"), float("inf"), -1.0, 0.0] * 3) == 1.0
    ratio.refine(2.0, 0.0, 5.0)
    ratio.refine(None, 2.0, 5.0)
    assert ratio.value == 1.0
