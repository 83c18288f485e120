"""Who is to blame, from what workers claim and what is known without them."""

from __future__ import annotations

from coordinator.messages.events import Waits
from coordinator.pipeline.health.evidence import Culprit
from coordinator.pipeline.health.stuck import Seat, culprit


def seats(**waits: str | None) -> dict[str, Seat]:
    """Return seats by whom each waits for: None nobody, "done" has done its part."""
    return {
        worker: Seat(worker, peer == "done", 5.0, Waits(peer, "forward", 6, 5.0) if peer else None)
        for worker, peer in waits.items()
    }


def blamed(found: dict[str, Seat], **trouble: int) -> Culprit:
    culprit_ = culprit(found, 10.0, trouble)
    assert culprit_ is not None
    return culprit_


def test_whoever_waits_for_nobody_at_the_end_of_all_waits_is_hung() -> None:
    found = blamed(seats(a="b", b="c", c=None))
    assert (found.worker, found.other) == ("c", "")
    assert "c waits for nobody" in found.reason


def test_of_two_that_wait_for_each_other_the_one_that_was_in_trouble_before_goes() -> None:
    assert blamed(seats(a="b", b="a")).worker in {"a", "b"}
    assert blamed(seats(a="b", b="a"), a=1).worker == "a"
    assert blamed(seats(a="b", b="a"), b=1).worker == "b"


def test_a_wait_for_one_that_has_done_its_part_is_between_the_two() -> None:
    found = blamed(seats(a="done", b="a"))
    assert (found.worker, found.other) == ("b", "a")
    assert "which has done its part" in found.reason
    assert blamed(seats(a="done", b="a"), a=1).worker == "a"


def test_a_claim_counts_for_no_longer_than_the_job_stands_still() -> None:
    liar = Seat("a", False, 5.0, Waits("b", "forward", 0, 1e9))
    found = culprit({"a": liar, "b": seats(b="a")["b"]}, 7.0, {})
    assert found is not None
    assert "a waits 7 s for a forward message of step 1 from b" in found.reason


def test_waiting_for_oneself_or_for_a_stranger_is_waiting_for_nobody() -> None:
    assert blamed(seats(a="a", b="a")).worker == "a"
    assert blamed(seats(a="nobody-here", b="a")).worker == "a"


def test_a_cycle_loses_an_end_of_its_longest_wait() -> None:
    circle = seats(a="b", b="c", c="a")
    circle["b"] = Seat("b", False, 5.0, Waits("c", "room", 6, 8.0))
    found = blamed(circle)
    assert (found.worker, found.other) == ("b", "c")
    assert "in a cycle of waits" in found.reason


def test_nobody_is_to_blame_where_all_have_done_their_part() -> None:
    assert culprit(seats(a="done", b="done"), 10.0, {}) is None
