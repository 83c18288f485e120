"""Rates by a clock of their own, and bytes by the day."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import date

import pytest

from worker.manners.traffic import Traffic

MBIT = 125_000


@dataclass
class World:
    """A clock and a calendar that a test moves."""

    now_s: float = 3.0
    day: date = date(2026, 11, 25)
    traffic: Traffic = field(init=False)

    def __post_init__(self) -> None:
        self.traffic = Traffic(lambda: self.now_s, lambda: self.day)


@pytest.mark.parametrize("mbit", [1.0, 7.5, 300.0])
def test_many_senders_together_get_the_rate_and_no_more(mbit: float) -> None:
    world, rng = World(), random.Random(4711)
    world.traffic.limit(mbit, 0.0)
    free_at_s = [world.now_s] * 5
    began_s, sent = world.now_s, 0
    while sent < 20 * mbit * MBIT:
        sender = min(range(5), key=free_at_s.__getitem__)
        world.now_s = max(world.now_s, free_at_s[sender])
        nbytes = rng.choice((100, 16 << 10, 32 << 10))
        free_at_s[sender] = world.now_s + world.traffic.sent(nbytes)
        sent += nbytes
    took_s = max(free_at_s) - began_s
    assert 8 * sent / took_s / 1e6 == pytest.approx(mbit, rel=0.02)


def test_a_pause_saves_nothing_up() -> None:
    world = World()
    world.traffic.limit(8.0, 0.0)
    world.now_s += 3600.0
    assert world.traffic.sent(1_000_000) == pytest.approx(1.0)
    assert world.traffic.sent(1_000_000) == pytest.approx(2.0)
    world.now_s += 1.5
    assert world.traffic.sent(500_000) == pytest.approx(1.0)


def test_both_directions_are_apart_and_a_new_rate_holds_at_once() -> None:
    world = World()
    world.traffic.limit(8.0, 80.0)
    assert world.traffic.sent(1_000_000) == pytest.approx(1.0)
    assert world.traffic.received(1_000_000) == pytest.approx(0.1)
    world.traffic.limit(80.0, 80.0)
    assert world.traffic.sent(1_000_000) == pytest.approx(0.1)
    world.traffic.limit(0.0, 0.0)
    assert world.traffic.sent(10**9) == world.traffic.received(10**9) == 0.0


def test_bytes_of_both_directions_count_until_midnight_and_over_a_restart() -> None:
    world = World()
    world.traffic.resume("2026-11-25", 7)
    world.traffic.resume("2026-11-24", 1000)
    world.traffic.sent(10)
    world.traffic.received(20)
    assert world.traffic.today == ("2026-11-25", 37)
    world.day = date(2026, 11, 26)
    assert world.traffic.today == ("2026-11-26", 0)
