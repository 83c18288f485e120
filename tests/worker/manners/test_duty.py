"""The duty cycle on a clock of its own: the share is held, whatever ops take, and waits are rest."""

from __future__ import annotations

import random

import pytest

from worker.cancel import Cancel
from worker.manners.duty import BURST_S, DutyCycle


class World:
    """A clock that computing, waiting and resting move."""

    def __init__(self) -> None:
        self.now_s = 5.0
        self.used_s = 3.0
        self.rests_s = 0.0
        self.duty = DutyCycle(lambda: self.used_s, self.rested, lambda: self.now_s, self.wait)

    def rested(self, seconds: float) -> None:
        self.rests_s += seconds

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def op(self, seconds: float) -> None:
        self.duty.rest()
        self.now_s += seconds
        self.used_s += seconds


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 0.9])
def test_ops_of_any_length_take_their_share_of_the_time(share: float) -> None:
    world, rng = World(), random.Random(4711)
    world.duty.limit(share)
    began_s, used_s = world.now_s, world.used_s
    while world.now_s - began_s < 200.0:
        world.op(rng.choice((0.0001, 0.003, 0.02, 0.3)))
        if rng.random() < 0.1:
            world.wait(rng.random() * 0.05)  # for a message
    assert (world.used_s - used_s) / (world.now_s - began_s) == pytest.approx(share, rel=0.05)


def test_who_waits_more_than_it_computes_rests_no_more() -> None:
    world = World()
    world.duty.limit(0.5)
    for _ in range(100):
        world.op(0.01)
        world.wait(0.02)
    assert world.rests_s == 0.0


def test_a_long_wait_allows_a_short_burst_alone() -> None:
    world = World()
    world.duty.limit(0.5)
    world.wait(1000.0)
    before_s = world.now_s
    for _ in range(1000):
        world.op(0.001)
    assert 0.99 - 2 * BURST_S <= world.rests_s <= 1.0
    assert world.now_s - before_s == pytest.approx(1.0 + world.rests_s)


def test_without_a_limit_nobody_rests_and_a_new_one_bills_nothing_of_before() -> None:
    world = World()
    for _ in range(100):
        world.op(1.0)
    assert world.rests_s == 0.0
    world.duty.limit(0.1)
    world.op(0.01)
    assert world.rests_s == 0.0
    world.op(0.01)
    assert world.rests_s == pytest.approx(0.1, rel=0.2)
    world.duty.limit(1.0)
    world.op(10.0)
    world.op(10.0)
    assert world.rests_s == pytest.approx(0.1, rel=0.2)


def test_work_that_is_cancelled_rests_no_longer() -> None:
    world, cancel = World(), Cancel()
    world.duty.limit(0.01)
    world.op(1.0)
    world.duty.stop = cancel
    cancel.set("the step is discarded")
    world.duty.rest()
    assert world.rests_s == 0.0
    world.duty.stop = Cancel()
    world.duty.rest()
    assert world.rests_s == pytest.approx(99.0, rel=0.01)
