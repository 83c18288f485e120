"""Limits that workers' owners set: plans, speeds and deadlines count on them before a step shows them."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from coordinator.membership.guests import slower, within_limits
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.events import UNLIMITED, Guest
from coordinator.messages.jobs import Phase
from coordinator.pipeline.health.deadlines import deadlines
from coordinator.planning.costs.fleet import Device, Fleet
from tests.sim.scripted import Scripted

PAUSED = Guest(paused="on battery")


def beat(job: str = "", guest: Guest = UNLIMITED) -> ev.Heartbeat:
    return ev.Heartbeat(0.0, job, 1 if job else 0, 0, 0, 0, guest=guest)


def test_a_paused_worker_leaves_its_job_stays_a_member_and_is_planned_when_it_resumes() -> None:
    world = Scripted().training("a", "b")
    world.done.clear()
    world.says("b", beat(guest=PAUSED))
    known = world.scheduler.roster.workers["b"]
    assert (known.member.phase, known.idle, known.reason) == ("pool", False, "paused: on battery")
    assert world.state().phase is Phase.PAUSED
    released = {worker: message.reason for worker, message in world.messages(do.Release)}
    assert released.keys() == {"a", "b"}
    assert all(reason.startswith("b is paused: on battery") for reason in released.values())
    world.says("b", beat())
    assert world.state().phase is Phase.LOADING


def test_where_another_can_take_over_a_pause_costs_no_committed_step() -> None:
    world = Scripted().training()
    world.step()
    world.done.clear()
    world.says("b", beat(guest=PAUSED))
    known = world.scheduler.roster.workers["b"]
    assert (known.member.phase, known.member.job, known.idle) == ("pool", "", False)
    assert "b" not in {place.worker for place in world.state().plan.places}  # type: ignore[union-attr]
    assert [worker for worker, _ in world.messages(do.Release)] == ["b"]
    assert world.state().step == 1


def test_a_paused_worker_is_never_quarantined_and_no_plan_counts_on_it() -> None:
    world = Scripted()
    world.join("a", "b")
    world.says("b", beat(guest=PAUSED))
    world.submit()
    assert world.state().phase is Phase.QUEUED
    assert not world.scheduler.roster.workers["b"].quarantined
    world.says("b", beat())
    assert world.state().phase is Phase.LOADING


def test_a_share_divides_a_devices_speed_before_any_step_shows_it() -> None:
    world = Scripted()
    world.join("a", "b")
    roster = world.scheduler.roster
    before = roster.fleet(["a", "b"], "fp32")
    fingerprint = roster.fingerprint()
    world.says("b", beat(guest=Guest(compute_share=0.25, memory_limit_bytes=1 << 30)))
    after = roster.fleet(["a", "b"], "fp32")
    assert after.devices[0] == before.devices[0]
    assert after.devices[1].scale == 4 * before.devices[1].scale
    assert after.devices[1].memory_limit_bytes == 1 << 30
    assert roster.fingerprint() != fingerprint


def test_steps_under_another_share_than_planned_teach_the_devices_own_speed() -> None:
    world = Scripted()
    world.join("a", "b")
    roster = world.scheduler.roster
    roster.fleet_for("j", ["a", "b"], "fp32")
    roster.limit("b", Guest(compute_share=0.5))
    for _ in range(20):
        roster.computed("j", "b", 1.0, 2.0)  # predicted at full speed, measured at half of it
    assert roster.workers["b"].computing.value == pytest.approx(1.0)
    assert roster.slowdown("j", ["a", "b"]) == 2.0
    assert roster.slowdown("j", ["a"]) == 1.0
    roster.fleet_for("j", ["a", "b"], "fp32")
    assert roster.slowdown("j", ["a", "b"]) == 1.0
    roster.computed("j", "b", 2.0, 2.0)
    assert roster.workers["b"].computing.value == pytest.approx(1.0)


def test_deadlines_of_a_running_job_are_longer_by_what_its_slowest_worker_was_slowed() -> None:
    world = Scripted().training()
    state, usual = world.state(), deadlines(world.state())
    slow = deadlines(state, 4.0)
    assert (slow.still_s, slow.silent_s) == (4 * usual.still_s, 4 * usual.silent_s)
    world.guests["b"] = Guest(compute_share=0.1)
    world.says("b", beat(guest=world.guests["b"]))
    world.wait(0.9 * 10 * usual.still_s)
    assert (world.state().phase, world.state().version) == (Phase.TRAINING, 1)
    world.wait(0.3 * 10 * usual.still_s)  # that is no honest work any more
    assert world.state().version == 2 or world.state().phase is not Phase.TRAINING


@pytest.mark.parametrize(
    ("before", "now", "best_bps", "factor"),
    [
        (UNLIMITED, UNLIMITED, 1e8, 1.0),
        (UNLIMITED, Guest(compute_share=0.2), None, 5.0),
        (Guest(compute_share=0.2), UNLIMITED, None, 1.0),
        (UNLIMITED, Guest(upload_bps=1e6), 1e8, 100.0),
        (Guest(download_bps=1e7), Guest(download_bps=1e6), 1e8, 10.0),
        (UNLIMITED, Guest(upload_bps=1e9), 1e8, 1.0),
        (UNLIMITED, Guest(upload_bps=1e6), None, 20.0),
    ],
)
def test_how_much_slower_a_limit_makes_a_worker(
    before: Guest, now: Guest, best_bps: float | None, factor: float
) -> None:
    assert slower(before, now, best_bps) == pytest.approx(factor)


def test_links_have_at_most_the_rates_of_both_ends_and_share_them() -> None:
    devices = tuple(Device(name, 1 << 30) for name in "abc")
    rates = np.full((3, 3), 1e8)
    np.fill_diagonal(rates, inf)
    fleet = Fleet(devices, rates, np.zeros((3, 3)))
    assert within_limits(fleet, {}) is fleet
    found = within_limits(fleet, {"a": Guest(upload_bps=1e6), "b": Guest(download_bps=5e5)})
    assert found.bandwidth_bps[0].tolist() == [inf, 5e5, 1e6]
    assert found.bandwidth_bps[2].tolist() == [1e8, 5e5, inf]
    assert found.bandwidth_bps[1].tolist() == [1e8, inf, 1e8]
    assert ("limit of a up", 1e6) in found.path(0, 2)
    assert ("limit of b down", 5e5) in found.path(2, 1)


def test_who_takes_flower_apps_only_is_free_for_them_and_no_plan_counts_on_it() -> None:
    world = Scripted()
    world.join("a", "b", "c")
    roster = world.scheduler.roster
    world.says("a", beat(guest=Guest(apps_only=True)))
    assert (roster.idle(), roster.free()) == (["b", "c"], ["a", "b", "c"])
    assert roster.workers["a"].reason == "takes Flower apps only"
    world.submit()
    assert world.state().phase is Phase.LOADING
    assert world.state().plan is not None
    assert "a" not in {place.worker for place in world.state().plan.places}  # type: ignore[union-attr]
    assert roster.free() == ["a"]
    world.says("a", beat(guest=Guest(apps_only=True, paused="on battery")))
    assert roster.free() == []
    world.says("a", beat())
    assert roster.free() == roster.idle() == ["a"]
