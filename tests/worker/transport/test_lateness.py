"""Acknowledgements that wait behind the other direction's data, by the clock of the peer that sends them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.transport.lateness import HORIZON_S, MOST_LATE_S, Lateness, Least
from worker.transport.window import Window


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_the_least_is_that_of_the_last_half_minute_at_most(values: list[float], every_s: float) -> None:
    least, noted = Least(), [(100.0 + every_s * n, value) for n, value in enumerate(values)]
    for now_s, value in noted:
        found = least.note(now_s, value)
        recent = [past for at_s, past in noted if now_s - HORIZON_S / 2 <= at_s <= now_s]
        within = [past for at_s, past in noted if now_s - HORIZON_S <= at_s <= now_s]
        assert min(within) <= found <= min(recent)


def test_late_is_what_took_longer_than_the_quickest_whatever_the_clocks_show() -> None:
    for apart_s in (-1e6, 0.0, 1e6):
        lateness = Lateness()
        late = [
            lateness.note(now_s, now_s - took_s + apart_s)
            for now_s, took_s in ((1, 0.3), (2, 0.1), (3, 0.15))
        ]
        assert late == pytest.approx([0.0, 0.0, 0.05], abs=1e-6)


def test_a_peer_whose_clock_is_set_back_is_late_by_a_bound_and_not_for_ever() -> None:
    lateness = Lateness()
    lateness.note(0.0, 0.0)
    late = [lateness.note(float(now_s), now_s - 1e4) for now_s in range(1, 40)]
    assert max(late) == MOST_LATE_S
    assert late[-1] == 0.0


def both_ways(mbit: float, rtt_s: float, seconds: float, *, told: bool) -> list[float]:
    """Shares of a line's two directions while both ends send all the time, an acknowledgement waiting behind
    what its end has sent; ``told``: the senders learn when it left. The second end begins a second later."""
    rate, numbers = mbit * 125_000, itertools.count()
    windows, lateness = (Window(), Window()), (Lateness(), Lateness())
    free_s, begun_s, clock_s = [0.0, 0.0], (0.0, 1.0), (0.0, 77.0)
    events: list[tuple[float, int, Callable[[float], None]]] = []

    def later(at_s: float, do: Callable[[float], None]) -> None:
        heapq.heappush(events, (at_s, next(numbers), do))

    def fill(end: int, now_s: float) -> None:
        while windows[end].open:
            nbytes = windows[end].chunk
            asks = windows[end].sent(now_s, nbytes, last=False)
            free_s[end] = max(now_s, free_s[end]) + nbytes / rate
            if asks:
                later(free_s[end] + rtt_s / 2, partial(arrived, 1 - end, windows[end].sent_bytes))

    def arrived(end: int, received: int, now_s: float) -> None:
        through_s = max(now_s, free_s[end])
        later(through_s + rtt_s / 2, partial(acknowledged, 1 - end, received, now_s + clock_s[end]))

    def acknowledged(end: int, received: int, left_s: float, now_s: float) -> None:
        late_s = lateness[end].note(now_s, left_s) if told else 0.0
        windows[end].late(late_s)
        windows[end].acked(now_s - late_s, received)
        fill(end, now_s)

    for end in (0, 1):
        later(begun_s[end], partial(fill, end))
    while events[0][0] <= seconds:
        now_s, _, do = heapq.heappop(events)
        do(now_s)
    return [windows[end].acked_bytes / (rate * (seconds - begun_s[end])) for end in (0, 1)]


@pytest.mark.parametrize(("mbit", "rtt_s"), [(11.4, 0.014), (8, 0.08), (20, 0.04), (4, 0.2)])
def test_neither_end_gives_way_where_both_send_over_one_queue(mbit: float, rtt_s: float) -> None:
    told, untold = (both_ways(mbit, rtt_s, 20.0, told=told) for told in (True, False))
    assert min(told) > 0.75
    assert max(told) - min(told) < 0.05
    assert min(untold) < 0.5
