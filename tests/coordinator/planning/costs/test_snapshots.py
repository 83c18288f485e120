"""How often snapshots are taken: as often as their cost, the links and the disks allow."""

from __future__ import annotations

import pytest

from coordinator.membership.loss_rate import HOUR_S, Losses
from coordinator.planning.costs.snapshots import EVERY_S, SLOWED, every_s

MIB = 2**20
USUAL = 3 / (4 * HOUR_S)


def test_what_costs_next_to_nothing_is_done_every_20_s() -> None:
    assert every_s(1.0, 10 * MIB, USUAL) == EVERY_S
    assert every_s(1.0, 10 * MIB, USUAL / 1000) == EVERY_S


def test_a_slow_link_carries_snapshots_half_of_the_time_at_most() -> None:
    """And where losses are rare, Young's interval is what it costs least at."""
    assert every_s(60.0, 10 * MIB, 1.0) == 120.0
    assert every_s(60.0, 10 * MIB, USUAL) == pytest.approx((2 * SLOWED * 60.0 / USUAL) ** 0.5)


def test_a_disk_is_not_worn_out() -> None:
    assert every_s(2.0, 1024 * MIB, USUAL) == pytest.approx(2 * 1024 * MIB / 8e6)


def test_workers_that_are_lost_often_have_snapshots_more_often() -> None:
    losses = Losses()
    for at in range(50):
        losses.came("w", 10.0 * at)  # another process each time
    assert losses.count == 49
    often = losses.per_s(500.0)
    assert often == pytest.approx(50 / (4 * HOUR_S + 500.0))
    assert every_s(1.0, MIB, 3 * often) < every_s(1.0, MIB, USUAL)
