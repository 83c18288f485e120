"""What a worker's steps teach of its speed, and how much of what it says of itself is kept."""

from __future__ import annotations

import pytest

from atoll.federated import DatasetFacts, FieldFacts
from coordinator.config import Liveness, Probing
from coordinator.membership import member as members
from coordinator.membership.roster import MOST_CODECS, Ratio, Roster
from coordinator.messages.events import Introduction


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


def introduction(*datasets: str) -> Introduction:
    facts = tuple(DatasetFacts(name, 7, (FieldFacts("x", "float32", (3,)),)) for name in datasets)
    return Introduction("w", 1, "cpu", "none", 1, 1 << 30, 1 << 30, datasets=facts)


def test_a_session_begins_with_no_clock_as_a_computer_that_was_started_anew_counts_from_nothing() -> None:
    roster = Roster(Liveness(), Probing())
    roster.open("w", 1, introduction(), 0.0)
    for worker_time_s, now_s in ((5000.0, 10.0), (5001.0, 11.2)):
        roster.heard("w", worker_time_s, now_s)
    assert roster.workers["w"].clock_offset_s == pytest.approx(-4990.0, abs=0.5)  # of the least delayed one
    roster.open("w", 2, introduction(), 100.0)
    before_s = roster.workers["w"].clock_offset_s
    assert before_s == pytest.approx(-4990.0, abs=0.5), "spans may come before the first heartbeat"
    roster.heard("w", 3.0, 101.0)
    assert roster.workers["w"].clock_offset_s == pytest.approx(98.0, abs=0.5)


def test_names_of_data_sets_that_no_worker_has_any_more_are_forgotten() -> None:
    roster = Roster(Liveness(), Probing())
    for number in range(50):
        roster.open("w", number, introduction(f"a{number}", f"b{number}", "stays"), 0.1 * number)
        if number == 0:
            roster.move("w", members.Admitted(), 0.0)
    assert sorted(roster._idle_holders) == ["a49", "b49", "stays"]


def test_a_worker_that_invents_names_of_codecs_is_found_out_and_takes_little() -> None:
    roster = Roster(Liveness(), Probing())
    roster.open("w", 1, introduction(), 0.0)
    found = [roster.codecs_timed("w", {f"codec-{n}-{k}": (1e8, 1e8) for k in range(100)}) for n in range(5)]
    assert found[:2] == [None, None]
    assert all(f"at most {MOST_CODECS}" in str(why) for why in found[2:])
    assert len(roster.workers["w"].introduction.codec_speeds) == MOST_CODECS
