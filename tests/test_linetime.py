"""The line's own rate from acknowledgements, whoever sent how much and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.linetime import LineTime

RATE = 1e6  # bytes/s
RTT_S = 0.08


def carried(sends: list[tuple[float, int]]) -> tuple[int, float]:
    """(bytes, seconds at work) of a first-in-first-out line that acknowledges every chunk."""
    line = LineTime()
    free_s, events = 0.0, []
    for at_s, size in sends:
        free_s = max(free_s, at_s) + size / RATE
        events += [(at_s, 0, size), (free_s + RTT_S, 1, size)]
    for at_s, kind, size in sorted(events):
        if kind:
            line.settled(at_s, size, RTT_S)
        else:
            line.sent(at_s, size)
    return sum(size for _, size in sends), line.take()


@given(st.lists(st.tuples(st.floats(0, 0.3), st.integers(20_000, 300_000)), min_size=1, max_size=30))
def test_pauses_of_the_sender_are_no_work_of_the_line(gaps: list[tuple[float, int]]) -> None:
    now_s, sends = 0.0, []
    for gap_s, size in gaps:
        now_s += gap_s
        sends.append((now_s, size))
    n_bytes, busy_s = carried(sends)
    assert abs(n_bytes / busy_s / RATE - 1) < 1e-6


def test_only_bytes_that_count_get_their_share_of_the_time() -> None:
    line = LineTime()
    line.sent(0.0, 100_000)
    line.sent(0.0, 300_000)
    line.settled(0.5, 400_000, 0.1, counted=100_000)
    assert abs(line.take() - 0.1) < 1e-12
    line.sent(1.0, 100_000)
    line.settled(1.2, 100_000, 0.1, counted=0)
    assert line.take() == 0.0


def test_a_message_far_shorter_than_the_round_trip_shows_a_bounded_rate() -> None:
    n_bytes, busy_s = carried([(0.0, 10)])
    assert busy_s == 0.1 * (10 / RATE + RTT_S)
    assert n_bytes / busy_s < RATE


def test_what_is_taken_is_not_taken_again() -> None:
    line = LineTime()
    line.sent(0.0, 100_000)
    line.settled(0.2, 100_000, 0.1)
    assert line.take() == 0.1
    assert line.take() == 0.0
    line.settled(0.3, 0, 0.1)
    assert line.take() == 0.0
