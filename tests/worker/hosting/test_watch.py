"""An op that runs far beyond what is honest is named; slowness and a busy machine are not."""

from __future__ import annotations

import itertools
import math

import pytest

from worker.hosting import TUNED
from worker.hosting.watch import OpWatch
from worker.pipe.status import Mark, Running

PRODUCT = Running(5, Mark("op 'aten.mm.default' (product)", 61.0))


def never() -> float:
    raise AssertionError("a short op costs no look at the process")


def trained(step_s: float) -> OpWatch:
    """A watch that has seen a stage train."""
    watch = OpWatch()
    for step in range(TUNED.steps_known):
        watch.step_begins(100.0 * step)
        watch.step_done(100.0 * step + step_s)
    return watch


def test_an_op_beyond_its_allowance_is_named() -> None:
    watch = OpWatch()
    assert watch.overdue(PRODUCT, 0.0, never) is None
    assert watch.overdue(PRODUCT, 2.0, lambda: 7.0) is None
    assert watch.overdue(PRODUCT, 61.0, lambda: 66.0) is None
    assert "'aten.mm.default' (product) has run for 62 s" in str(watch.overdue(PRODUCT, 62.0, lambda: 67.0))


def test_ops_that_follow_each_other_and_rest_between_steps_are_fine() -> None:
    watch, marks = OpWatch(), itertools.cycle("ab")
    for second in range(500):
        running = Running(second, Mark(next(marks), 60.0))
        assert watch.overdue(running, float(second), never) is None
    for second in (500.0, 10_000.0):
        assert watch.overdue(Running(500, None), second, never) is None


def test_a_process_that_is_given_no_time_is_late_only_after_patience() -> None:
    watch = OpWatch()
    for now_s in (0.0, 1.0, 62.0, 61.0 * TUNED.patience):
        assert watch.overdue(PRODUCT, now_s, lambda: 3.0) is None
    assert watch.overdue(PRODUCT, 61.0 * TUNED.patience + 1, lambda: 3.0) is not None


def test_work_counts_from_the_ops_begin_and_not_from_the_processs() -> None:
    watch = OpWatch()
    watch.overdue(PRODUCT, 0.0, never)
    watch.overdue(PRODUCT, 1.0, lambda: 1000.0)
    assert watch.overdue(PRODUCT, 62.0, lambda: 1000.0 + 30.0) is None  # 30 s of 61
    assert watch.overdue(PRODUCT, 62.0, lambda: 1000.0 + 31.0) is not None


@pytest.mark.parametrize("step_s", [0.5, 40.0])
def test_after_some_steps_the_longest_bounds_every_op(step_s: float) -> None:
    allowed_s = max(TUNED.least_deadline_s, TUNED.longest_steps * step_s)
    watch = trained(step_s)
    watch.overdue(PRODUCT, 1000.0, never)
    watch.overdue(PRODUCT, 1001.0, lambda: 0.0)
    assert watch.overdue(PRODUCT, 1000.0 + allowed_s, lambda: allowed_s) is None
    assert watch.overdue(PRODUCT, 1000.5 + allowed_s, lambda: allowed_s) is not None


@pytest.mark.parametrize(
    ("claimed_s", "allowed_s"),
    [
        (math.nan, TUNED.unknown_deadline_s),
        (math.inf, TUNED.unknown_deadline_s),
        (-1.0, TUNED.unknown_deadline_s),
        (0.0, TUNED.unknown_deadline_s),
        (1e30, TUNED.most_deadline_s),
    ],
)
def test_a_bound_that_the_process_made_up_counts_for_little(claimed_s: float, allowed_s: float) -> None:
    watch, running = OpWatch(), Running(1, Mark("op", claimed_s))
    watch.overdue(running, 0.0, never)
    watch.overdue(running, 1.0, lambda: 0.0)
    assert watch.overdue(running, allowed_s, lambda: allowed_s) is None
    assert watch.overdue(running, allowed_s + 1, lambda: allowed_s) is not None


def test_time_in_which_the_whole_machine_stood_still_does_not_count() -> None:
    watch = OpWatch()
    watch.overdue(PRODUCT, 0.0, never)
    watch.overdue(PRODUCT, 60.0, lambda: 0.0)
    watch.forget()
    assert watch.overdue(PRODUCT, 5000.0, never) is None
    assert watch.overdue(PRODUCT, 5060.0, lambda: 0.0) is None
    assert watch.overdue(PRODUCT, 5062.0, lambda: 40.0) is not None


def test_of_a_period_of_steps_each_counts_its_share() -> None:
    watch = OpWatch(period=50)
    for order in range(TUNED.steps_known):
        watch.step_begins(1000.0 * order)
        watch.step_done(1000.0 * order + 500.0)  # 10 s a step
    watch.overdue(PRODUCT, 5000.0, never)
    assert watch.overdue(PRODUCT, 5000.0 + TUNED.longest_steps * 10.0, lambda: 40.0) is None
    assert watch.overdue(PRODUCT, 5001.0 + TUNED.longest_steps * 10.0, lambda: 80.0) is not None
