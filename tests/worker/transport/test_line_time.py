"""The line's own rate from acknowledgements, whoever sent how much and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.transport.line_time import LineTime

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


def bursts(*took: tuple[float, int]) -> LineTime:
    """Each so long under way, a second apart."""
    line = LineTime()
    for at, (seconds, nbytes) in enumerate(took):
        line.sent(at, nbytes // 2)
        line.sent(at + 0.001, nbytes - nbytes // 2)
        line.settled(at + seconds - 0.001, nbytes // 2, RTT_S)
        line.settled(at + seconds, nbytes - nbytes // 2, RTT_S)
    return line


def test_the_quickest_quarter_of_the_bytes_tells_the_line_where_ends_read_late() -> None:
    quick, late = (RTT_S + 0.1, 100_000), (RTT_S + 0.9, 100_000)
    line = bursts(late, quick, late, late)
    assert abs(line.take_quickest() / RATE - 1) < 1e-9
    assert line.take_quickest() == 0.0, "told once"
    assert line.take() > 2.5
    # One burst in eight is too few bytes: the next quickest counts, too.
    assert abs(bursts(quick, *[late] * 7).take_quickest() / 200_000 - 1) < 1e-9


def test_a_line_that_never_rests_is_told_by_all_of_it() -> None:
    line = LineTime()
    line.sent(0.0, 100_000)
    for at in range(1, 50):
        line.sent(0.1 * at, 100_000)
        line.settled(0.1 * at + 0.05, 100_000, RTT_S)
    assert line.take_quickest() == 0.0, "no burst is over"
    line.settled(5.0 + RTT_S, 100_000, RTT_S)
    assert abs(line.take_quickest() / RATE - 1) < 1e-9


def test_what_a_broken_connection_held_shows_no_rate() -> None:
    line = LineTime()
    line.sent(0.0, 1_000_000)
    line.broke()
    line.settled(0.01, 1_000_000, 0.001, counted=0)
    assert line.take_quickest() == 0.0
