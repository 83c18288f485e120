"""How long a job stands still, as the benchmark reads it from the points of a run."""

from __future__ import annotations

import pytest

from benchmarks.recovery import times


@pytest.mark.parametrize(("tenth_s", "eleventh_s"), [(20.0, 27.0), (25.0, 27.0)])
def test_a_loss_shows_in_the_step_in_flight_or_in_the_next_one(tenth_s: float, eleventh_s: float) -> None:
    """The stage that is lost may have done its part of the step in flight."""
    points = [(step, 1.0, 2.0 * step) for step in range(1, 10)] + [(10, 1.0, tenth_s), (11, 1.0, eleventh_s)]
    assert times(points, 19.0) == {"step_s": 2.0, "downtime_s": 5.0, "repeated_steps": 0}


def test_steps_that_are_done_again_count() -> None:
    points = [(step, 1.0, 2.0 * step) for step in range(1, 10)]
    again = [(8, 1.0, 30.0), (9, 1.0, 32.0), (10, 1.0, 34.0), (11, 1.0, 36.0)]
    assert times(points + again, 19.0) == {"step_s": 2.0, "downtime_s": 14.0, "repeated_steps": 2}
