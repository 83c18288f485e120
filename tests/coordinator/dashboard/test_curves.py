"""Curves keep their extremes when they are thinned, and lose what was done again."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from coordinator.dashboard.curves import MAX_CURVES, MAX_POINTS, Curves, thinned
from protos import atoll_control_pb2 as pb

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400)


@given(VALUES, st.integers(4, 60))
def test_a_thinned_curve_keeps_ends_and_extremes_in_order(values: list[float], most: int) -> None:
    steps, kept = thinned(range(len(values)), values, most)
    assert len(steps) <= most
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, len(values) - 1)
    assert all(values[step] == value for step, value in zip(steps, kept, strict=True))
    assert (min(kept), max(kept)) == (min(values), max(values))


def test_a_long_run_stays_within_the_points_of_a_curve_and_shows_a_spike() -> None:
    draw, curves = random.Random(1), Curves()
    for step in range(5 * MAX_POINTS):
        curves.point(step, "loss", 99.0 if step == 7777 else draw.random())
    seen = curves.seen()["loss"]
    assert seen.length <= MAX_POINTS
    assert seen.steps[-1] == 5 * MAX_POINTS - 1
    assert 99.0 in seen.values


def test_steps_that_are_done_again_replace_those_before() -> None:
    curves = Curves()
    for step, value in ((1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5)):
        curves.point(step, "loss", value)
    seen = curves.seen()["loss"]
    assert (seen.steps, seen.values) == ([1, 2], [5.0, 4.5])
    curves.point(1, "rolled_back", 2.0)
    assert curves.seen()["loss"].steps == [1]


def test_points_that_the_file_held_are_not_taken_twice() -> None:
    curves = Curves()
    for line in ("step,name,value,time_s", "1,loss,5.0,10.000", "2,loss,nan,11.000", "torn,li"):
        curves.line(line)
    replayed = [
        pb.MetricPoint(step=s, name="loss", value=v, time_s=t) for s, v, t in ((1, 5, 10.0), (2, 4, 11.0004))
    ]
    curves.add([*replayed, pb.MetricPoint(step=3, name="loss", value=3.0, time_s=12.0)])
    seen = curves.seen()["loss"]
    assert (seen.generation, seen.steps) == (0, [1, 2, 3])


def test_metrics_beyond_the_bound_are_left_out() -> None:
    curves = Curves()
    for number in range(MAX_CURVES + 5):
        curves.point(1, f"client/{number}/loss", 1.0)
    assert len(curves.seen()) == MAX_CURVES
