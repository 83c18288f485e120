"""How much may be under way to a peer, in simulations of a link with one queue a direction."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest

from worker.transport import TUNED
from worker.transport.peers.window import MOST_LATE_S, PROBE_SLACK_S, Recent, Sent, Window

MAXIMUM = 64 << 20


class Link:
    """Two ends that send all the time; an acknowledgement waits behind what its own end has sent.

    ``turn_s``: an end has the processor once in so long, and handles then all that has arrived.
    """

    def __init__(self, mbit: float, rtt_s: float, ends: int, turn_s: float = 0.0) -> None:
        self.rate, self.rtt_s, self.ends, self.turn_s = mbit * 125_000, rtt_s, ends, turn_s
        self.windows = [Window(MAXIMUM) for _ in range(2)]
        self.acked = [0, 0]
        self.longest_s = 0.0  # queue, once the windows are known
        self.quiet = False  # what is sent can wait
        self._free_s, self._clocks_s = [0.0, 0.0], (0.0, 77.0)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []

    def shares(self, seconds: float) -> list[float]:
        """Of the link's rate, of each end; the second one begins a second later. Before that both have
        sent a little, as workers do when they connect."""
        for end in range(self.ends):
            sent = self.windows[end].sent(-1.0, 64, backlogged=False)
            clock_s = -1.0 + self.rtt_s / 2 + self._clocks_s[1 - end]
            self.windows[end].acked(self.rtt_s - 1.0, clock_s, 64, sent)
            self._later(float(end), partial(self._fill, end))
        self.until(seconds)
        return [self.acked[end] / (self.rate * (seconds - end)) for end in range(self.ends)]

    def until(self, seconds: float) -> None:
        """Go on."""
        while self._events[0][0] <= seconds:
            now_s, _, do = heapq.heappop(self._events)
            do(now_s)

    def _later(self, at_s: float, do: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), do))

    def _fill(self, end: int, now_s: float) -> None:
        window = self.windows[end]
        while window.quiet if self.quiet else window.open:
            sent = window.sent(now_s, window.chunk, backlogged=not self.quiet)
            self._free_s[end] = max(now_s, self._free_s[end]) + sent.nbytes / self.rate
            self._later(self._free_s[end] + self.rtt_s / 2, partial(self._arrived, 1 - end, sent))
        if now_s > 5.0:
            self.longest_s = max(self.longest_s, self._free_s[end] - now_s)

    def _arrived(self, end: int, sent: Sent, now_s: float) -> None:
        if self.turn_s:
            now_s = math.ceil(now_s / self.turn_s) * self.turn_s
        through_s = max(now_s, self._free_s[end])
        clock_s = now_s + self._clocks_s[end]
        self._later(through_s + self.rtt_s / 2, partial(self._told, 1 - end, sent, clock_s))

    def _told(self, end: int, sent: Sent, clock_s: float, now_s: float) -> None:
        self.windows[end].acked(now_s, clock_s, sent.nbytes, sent)
        self.acked[end] += sent.nbytes
        self._fill(end, now_s)


@pytest.mark.parametrize(("mbit", "rtt_s"), [(8, 0.08), (100, 0.08), (1000, 0.01), (20, 0.03), (20, 0.2)])
def test_the_window_fills_a_link_and_keeps_its_queue_at_the_slack(mbit: float, rtt_s: float) -> None:
    link = Link(mbit, rtt_s, 1)
    assert link.shares(20.0)[0] > 0.95
    # What a gradient waits for at most: a probe's slack, and the chunk by which a window is exceeded.
    assert link.longest_s < 1.2 * PROBE_SLACK_S + link.windows[0].chunk / link.rate


@pytest.mark.parametrize(("mbit", "rtt_s"), [(8, 0.08), (50, 0.04), (100, 0.08), (1000, 0.01), (20, 0.2)])
def test_what_can_wait_fills_an_idle_link_and_hardly_holds_up_what_cannot(mbit: float, rtt_s: float) -> None:
    link = Link(mbit, rtt_s, 1)
    link.shares(10.0)
    link.quiet = True
    link.until(12.0)
    link.longest_s, before = 0.0, link.acked[0]
    link.until(22.0)
    assert link.acked[0] - before > 0.9 * 10.0 * link.rate
    assert link.longest_s < 1.2 * TUNED.quiet_share * TUNED.slack_s + link.windows[0].chunk / link.rate


def test_a_link_that_grew_is_found_though_the_peer_seldom_has_the_processor() -> None:
    link = Link(2, 0.004, 1, turn_s=0.1)
    link.shares(5.0)
    link.rate *= 100
    link.until(30.0)
    before = link.acked[0]
    link.until(40.0)
    assert link.acked[0] - before > 0.3 * 10.0 * link.rate


@pytest.mark.parametrize(
    ("mbit", "rtt_s", "least"),
    [(11.4, 0.014, 0.85), (20, 0.03, 0.8), (8, 0.08, 0.8), (100, 0.08, 0.7), (4, 0.2, 0.7)],
)
def test_neither_end_gives_way_where_both_send_over_one_queue(
    mbit: float, rtt_s: float, least: float
) -> None:
    shares = Link(mbit, rtt_s, 2).shares(20.0)
    assert min(shares) > least
    assert max(shares) - min(shares) < 0.06


def test_a_window_keeps_between_its_bounds_whatever_the_peer_says() -> None:
    window = Window(1 << 20)
    assert window.size == TUNED.first_window_bytes
    now_s = 1.0
    for clock_s in (5.0, 5.0, -1e9, 1e9, 0.0):
        sent = window.sent(now_s, 1 << 18, backlogged=True)
        now_s += 0.01
        window.acked(now_s, clock_s, sent.nbytes, sent)
        assert TUNED.least_window_bytes <= window.size <= 1 << 20
    assert window.in_flight == 0


def test_a_late_acknowledgement_widens_a_window_by_a_bound() -> None:
    window = Window(MAXIMUM)
    now_s = 100.0
    for late_s in (0.0, *[30.0] * 40):
        sent = window.sent(now_s, 1000, backlogged=True)
        now_s += 0.1 + late_s
        window.acked(now_s, now_s - late_s, sent.nbytes, sent)
    assert window.rate is not None
    assert window.rtt_s is not None
    assert window.size <= max(
        TUNED.least_window_bytes, window.rate * (window.rtt_s + TUNED.slack_s + MOST_LATE_S)
    )


def test_a_pause_of_the_sender_does_not_lower_the_rate() -> None:
    link = Link(20, 0.03, 1)
    link.shares(5.0)
    window, rate = link.windows[0], link.windows[0].rate
    now_s = 1000.0
    window.broke(window.in_flight)
    for _ in range(50):
        now_s += 1.0
        sent = window.sent(now_s, 1000, backlogged=False)
        window.acked(now_s + 0.03, now_s + 0.015, 1000, sent)
    assert window.rate == rate


def test_the_largest_is_that_of_the_horizon_at_most_and_of_its_half_at_least() -> None:
    recent = Recent(2.0)
    found = [recent.note(10.0 + at_s, value) for at_s, value in ((0.0, 9.0), (1.5, 1.0), (2.8, 2.0))]
    assert found == [9.0, 9.0, 2.0]
