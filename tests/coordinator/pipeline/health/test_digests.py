"""Which steps are checked, where two do not agree, and who of three is wrong."""

from __future__ import annotations

from itertools import pairwise

import pytest

from coordinator.pipeline.health.digests import Difference, Verdict, compare, drawn, judge


def said(*numbers: int, taken: int = 0) -> list[str]:
    """Return digests of steps whose gradients have these numbers."""
    return [f"{number:016x}{taken:016x}" for number in numbers]


def test_one_step_of_each_period_is_drawn_and_each_rank_once_in_as_many_draws() -> None:
    draws = [(step, rank) for step in range(6000) if (rank := drawn("secret", step, 0.01, 3)) is not None]
    assert [step // 100 for step, _ in draws] == list(range(60))
    assert len({step % 100 for step, _ in draws}) > 20
    for first in range(0, 60, 3):
        assert {rank for _, rank in draws[first : first + 3]} == {0, 1, 2}
    assert len({tuple(rank for _, rank in draws[first : first + 3]) for first in range(0, 60, 3)}) > 2


def test_who_computes_wrong_is_checked_within_twice_as_many_periods_as_there_are_ranks() -> None:
    steps = [step for step in range(10_000) if drawn("secret", step, 0.05, 4) == 2]
    assert max(later - earlier for earlier, later in pairwise(steps)) <= 2 * 4 * 20


def test_draws_depend_on_the_secret() -> None:
    one, other = ([drawn(name, step, 0.1, 3) for step in range(500)] for name in ("one", "other"))
    assert one != other


@pytest.mark.parametrize(("share", "ranks"), [(0.0, 3), (0.5, 0)])
def test_nothing_is_drawn_where_nothing_can_be_checked(share: float, ranks: int) -> None:
    assert {drawn("secret", step, share, ranks) for step in range(100)} == {None}


def test_every_step_is_drawn_of_a_share_of_one() -> None:
    assert None not in {drawn("secret", step, 1.0, 2) for step in range(20)}


def test_the_first_difference_is_named() -> None:
    assert compare(said(1, 2, 3, 4), said(1, 2, 9, 8), 10) == Difference(12, inputs=False)
    assert compare(said(1, 2), said(1, 2), 10) is None


def test_other_messages_are_no_difference_of_the_computation_alone() -> None:
    assert compare(said(1, 2), [*said(1), *said(9, taken=5)], 0) == Difference(1, inputs=True)


def test_steps_of_another_class_are_not_compared() -> None:
    assert compare([None, *said(2)], said(7, 2), 0) is None


def test_what_is_missing_differs() -> None:
    assert compare(said(1, 2), said(1), 0) == Difference(1, inputs=True)
    assert compare(["", *said(2)], said(1, 2), 0) == Difference(0, inputs=True)


def test_two_that_agree_outvote_who_computed() -> None:
    verdict = judge(said(1, 2, 3), said(1, 8, 9), said(1, 8, 9), 5)
    assert verdict == (Verdict.HOLDER, Difference(6, inputs=False))


def test_who_repeated_wrong_is_outvoted_by_who_computed_and_another() -> None:
    assert judge(said(1, 2, 3), said(1, 8, 9), said(1, 2, 3), 5)[0] is Verdict.FIRST


@pytest.mark.parametrize(
    "second",
    [said(1, 7, 7), said(1, 2, 4), said(9, 8, 9)],
    ids=["all differ", "differs later", "differs earlier"],
)
def test_three_that_differ_decide_nothing(second: list[str]) -> None:
    assert judge(said(1, 2, 3), said(1, 8, 9), second, 5)[0] is Verdict.OPEN


def test_a_neighbour_that_sends_other_messages_again_frames_nobody() -> None:
    """Both who repeat are sent the same lie: they agree, and that shows nothing of who was sent the truth."""
    forged = [*said(1), *said(8, 9, taken=5)]
    assert judge(said(1, 2, 3), forged, forged, 5)[0] is Verdict.OPEN


def test_who_agrees_is_not_judged() -> None:
    with pytest.raises(ValueError, match="not judged"):
        judge(said(1), said(1), said(1), 0)
