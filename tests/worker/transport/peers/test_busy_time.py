"""The link's own rate from acknowledgements, whoever sent how much and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.transport.peers.busy_time import BusyTime

RATE = 1e6  # bytes/s
RTT_S = 0.08


def carry(link: BusyTime, sends: list[tuple[float, int]], share: float = 1.0, late_s: float = 0.0) -> int:
    """Have a first-in-first-out link carry chunks of (s, bytes), each of which is acknowledged; returns the
    bytes. ``late_s``: how long the other end took to read."""
    free_s, events = 0.0, []
    for at_s, size in sends:
        free_s = max(free_s, at_s) + size / RATE
        events += [(at_s, 0, at_s, size), (free_s + RTT_S + late_s, 1, at_s, size)]
    under_way = 0
    for now_s, arrived, at_s, size in sorted(events):
        if arrived:
            under_way -= size
            link.acked(now_s, at_s, RTT_S, share, idle=not under_way)
        else:
            link.sent(now_s, size, idle=not under_way)
            under_way += size
    return sum(size for _, size in sends)


@given(st.lists(st.tuples(st.floats(0, 0.3), st.integers(20_000, 300_000)), min_size=1, max_size=30))
def test_pauses_of_the_sender_are_no_work_of_the_link(gaps: list[tuple[float, int]]) -> None:
    now_s, sends, link = 0.0, [], BusyTime()
    for gap_s, size in gaps:
        now_s += gap_s
        sends.append((now_s, size))
    n_bytes = carry(link, sends)
    assert abs(n_bytes / link.take() / RATE - 1) < 1e-6


def test_only_bytes_that_count_get_their_share_of_the_time() -> None:
    link = BusyTime()
    carry(link, [(0.0, 400_000)], share=0.25)
    assert link.take() == pytest.approx(0.1)
    carry(link, [(1.0, 100_000)], share=0.0)
    assert link.take() == 0.0


def test_a_message_far_shorter_than_the_round_trip_shows_a_bounded_rate() -> None:
    link = BusyTime()
    n_bytes = carry(link, [(0.0, 10)])
    busy_s = link.take()
    assert busy_s == pytest.approx(0.1 * (10 / RATE + RTT_S))
    assert n_bytes / busy_s < RATE


def test_what_is_taken_is_not_taken_again() -> None:
    link = BusyTime()
    carry(link, [(0.0, 100_000)])
    assert link.take() == pytest.approx(0.1)
    assert link.take() == 0.0


def bursts(*late_s: float) -> BusyTime:
    """Each of 100 kB, ten seconds apart, read so late."""
    link = BusyTime()
    for at, late in enumerate(late_s):
        carry(link, [(10.0 * at, 50_000), (10.0 * at + 0.001, 50_000)], late_s=late)
    return link


def test_the_quickest_quarter_of_the_bytes_tells_the_link_where_ends_read_late() -> None:
    link = bursts(0.9, 0.0, 0.9, 0.9)
    assert abs(link.take_quickest() / RATE - 1) < 1e-9
    assert link.take_quickest() == 0.0, "told once"
    assert link.take() > 2.5
    # One burst in eight is too few bytes: the next quickest counts, too.
    both = bursts(0.0, *[0.9] * 7).take_quickest()
    assert both == pytest.approx(200_000 / (0.1 + 1.0))


def test_a_link_that_never_rests_is_told_by_all_of_it() -> None:
    link = BusyTime()
    link.sent(0.0, 100_000, idle=True)
    for at in range(1, 50):
        link.sent(0.1 * at, 100_000, idle=False)
        link.acked(0.1 * at + 0.05, 0.1 * (at - 1), RTT_S, 1.0, idle=False)
    assert link.take_quickest() == 0.0, "no burst is over"
    link.acked(5.0 + RTT_S, 4.9, RTT_S, 1.0, idle=True)
    assert abs(link.take_quickest() / RATE - 1) < 1e-9


def test_what_a_broken_connection_held_shows_no_rate() -> None:
    link = BusyTime()
    link.sent(0.0, 1_000_000, idle=True)
    link.broke(0.01)
    assert (link.take(), link.take_quickest()) == (0.0, 0.0)
    link.sent(0.02, 1000, idle=False)
    link.acked(0.12, 0.02, RTT_S, 1.0, idle=True)
    assert link.take() == pytest.approx(0.02)
    assert link.take_quickest() == 0.0
