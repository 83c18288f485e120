"""What a worker's steps teach of its speed."""

from __future__ import annotations

import pytest

from coordinator.membership.roster import Ratio


def taught(ratio: Ratio, *measured_s: float) -> float:
    """The ratio after steps for which a plan at ratio 2.0 predicted 2.0 s."""
    for seconds in measured_s:
        ratio.refine(2.0, 2.0, seconds)
    return ratio.value


def test_a_change_of_speed_is_followed_over_some_ten_steps() -> None:
    ratio = Ratio()
    assert taught(ratio, *[1.0] * 20) == pytest.approx(1.0)
    assert 1.2 < taught(ratio, *[1.4] * 10) < 1.3
    assert taught(ratio, *[1.4] * 30) == pytest.approx(1.4, rel=0.02)


def test_impossible_figures_teach_nothing() -> None:
    ratio = Ratio()
    taught(ratio, 1.0)
    assert taught(ratio, *[float("nan"), float("inf"), -1.0, 0.0] * 3) == 1.0
    ratio.refine(2.0, 0.0, 5.0)
    ratio.refine(None, 2.0, 5.0)
    assert ratio.value == 1.0
