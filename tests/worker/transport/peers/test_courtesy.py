"""Copies beside training's messages on one simulated link: what they delay, and what they get."""

from __future__ import annotations

from random import Random

import pytest

from atoll.spare import DELAY_SHARE, piece_bytes, spare_share
from worker.transport.peers.courtesy import Courtesy

LONG_S = 4000.0


class Link:
    """A link that carries one thing after the other; training's next, then copies."""

    def __init__(self, bytes_per_s: float) -> None:
        self.now_s = self.free_s = self.delayed_s = self.copied_s = 0.0
        self.bytes_per_s = bytes_per_s
        self.courtesy = Courtesy(clock=lambda: self.now_s)
        self.piece_s = piece_bytes(bytes_per_s) / bytes_per_s

    def copy_until(self, end_s: float) -> None:
        """Let a piece leave whenever it may."""
        while self.now_s < end_s:
            wait_s = self.courtesy.copy(self.piece_s)
            if wait_s > 0.0:
                self.now_s += max(1e-6, min(wait_s, end_s - self.now_s))
                continue
            self.free_s = max(self.free_s, self.now_s) + self.piece_s
            self.copied_s += self.piece_s

    def message(self, seconds: float, unconfirmed_s: float) -> None:
        """Send one of training's, which is confirmed so long after it has left."""
        self.courtesy.count(1)
        self.delayed_s += max(0.0, self.free_s - self.now_s)
        left_s = max(self.free_s, self.now_s) + seconds
        self.free_s = left_s
        self.copy_until(left_s + unconfirmed_s)
        self.courtesy.count(-1)


@pytest.mark.parametrize(
    ("mbit", "step_s", "message_s", "rtt_s"),
    [
        (1.0, 0.62, 0.033, 0.02),  # a narrow cut
        (8.0, 3.0, 0.3, 0.05),
        (8.0, 1.0, 0.24, 0.05),  # a link that is nearly full
        (1000.0, 1.0, 0.01, 0.001),
    ],
)
def test_copies_delay_training_by_their_share_and_get_what_is_predicted(
    mbit: float, step_s: float, message_s: float, rtt_s: float
) -> None:
    link, random, n_micro = Link(mbit * 1e6 / 8.0), Random(1), 4
    while link.now_s < LONG_S:
        for _ in range(n_micro):
            link.copy_until(
                link.now_s + max(0.0, step_s / n_micro - message_s - rtt_s) * 2.0 * random.random()
            )
            link.message(message_s, rtt_s)
    took_s = link.now_s
    assert link.delayed_s <= 1.1 * DELAY_SHARE * took_s + link.piece_s
    busy = n_micro * (message_s + rtt_s) / step_s
    predicted = spare_share(link.bytes_per_s, busy, n_micro / step_s)
    assert predicted == pytest.approx(link.copied_s / took_s, rel=0.35)


def test_a_link_that_carries_nothing_else_is_used_whole() -> None:
    link = Link(1e6)
    link.copy_until(10.0)
    assert link.copied_s == pytest.approx(10.0, rel=0.01)
    assert spare_share(1e6, 0.0, 0.0) == 1.0


def test_a_link_that_is_never_idle_carries_a_piece_in_its_turn() -> None:
    link = Link(125_000.0)
    link.courtesy.count(1)
    link.copy_until(1000.0)
    assert link.copied_s == pytest.approx(DELAY_SHARE * 1000.0, rel=0.05)
    assert spare_share(125_000.0, 1.0, 4.0) == DELAY_SHARE
