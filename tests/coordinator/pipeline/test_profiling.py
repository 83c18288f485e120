"""Plans of large fleets: made among some workers, and again once the pairs that they rest on are measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from atoll.plan import Plan
from coordinator.config import CoordinatorConfig, Probing
from coordinator.messages import instructions as do
from coordinator.messages.jobs import Phase
from tests.coordinator.test_scheduler import World


def far_apart(plan: Plan, request: do.MakePlan) -> Plan:
    """Place the stages on workers whose link the survey leaves out."""
    first, second = request.fleet.devices[0].worker, request.fleet.devices[-1].worker
    stages = (
        replace(plan.stages[0], workers=(first,)),
        replace(plan.stages[1], workers=(second,)),
    )
    return replace(plan, stages=stages)


def large(workers: int, **probing: int) -> tuple[World, list[do.MakePlan]]:
    """Return a world in which so many have joined, and the list of plans that it will ask for."""
    world = World(
        config=CoordinatorConfig(state_dir=Path("/nowhere"), probing=Probing(**probing)), altered=far_apart
    )
    world.join(*(f"w{at:02}" for at in range(workers)))
    asked: list[do.MakePlan] = []
    made = world.plan

    def plan(request: do.MakePlan):
        asked.append(request)
        return made(request)

    world.plan = plan  # type: ignore[method-assign]
    return world, asked


def test_a_plan_on_a_large_fleet_is_made_again_when_its_own_pairs_are_measured():
    world, asked = large(40)
    links = world.scheduler.roster.links
    assert links.unmeasured(["w00", "w39"])
    world.submit()
    assert [request.attempt for request in asked] == [1, 2]
    assert not links.unmeasured(["w00", "w39"])
    assert asked[1].fleet.bandwidth_bps[0, 39] == 1e9
    assert world.state().phase is Phase.LOADING
    assert len(links.measured_s) <= 12 * 11 + 4 * 28 + 2  # all of the first twelve, few of those after them


def test_on_a_small_fleet_every_pair_is_measured_and_one_plan_is_made():
    world, asked = large(12)
    world.submit()
    assert len(asked) == 1
    assert len(world.scheduler.roster.links.measured_s) == 12 * 11


def test_a_plan_that_always_wants_other_pairs_is_taken_after_two_more():
    world, asked = large(40)

    def other(plan: Plan, request: do.MakePlan) -> Plan:
        stages = (plan.stages[0], replace(plan.stages[1], workers=(f"w{39 - len(asked)}",)))
        return replace(plan, stages=stages)

    world.altered = other
    world.submit()
    assert len(asked) == 3
    assert world.state().phase is Phase.LOADING


def test_a_huge_fleet_is_planned_on_its_first_whose_links_are_known():
    world, asked = large(40, planned_workers=15)
    world.submit()
    assert {len(request.fleet.devices) for request in asked} == {15}
    assert [device.worker for device in asked[0].fleet.devices] == [f"w{at:02}" for at in range(15)]


def test_a_job_waits_for_the_survey_no_longer_than_it_may():
    world, asked = large(40, survey_within_s=5)
    carry_out = world.carry_out

    def no_links(instruction: do.Instruction):
        lost = isinstance(instruction, do.SendTo) and isinstance(instruction.message, do.ProbeLink)
        return [] if lost else carry_out(instruction)

    world.carry_out = no_links  # type: ignore[method-assign]
    world.join("w40")
    alive = tuple(f"w{at:02}" for at in range(41))
    world.submit()
    world.wait(4.0, alive)
    assert asked == []
    world.wait(2.0, alive)
    assert asked
