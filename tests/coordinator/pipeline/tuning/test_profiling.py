"""Plans of large fleets: made among some workers, and again once the pairs that they rest on are measured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from atoll.plan import Plan, one_replica
from coordinator.config import CoordinatorConfig, Probing
from coordinator.messages import instructions as do
from coordinator.messages.jobs import Phase
from coordinator.planning.costs.fleet import LOSS_HOURS, LinkEstimate
from tests.sim.scripted import Scripted


def placed(plan: Plan, first: str, second: str) -> Plan:
    stages = tuple(replace(s, worker=w) for s, w in zip(plan.stages, (first, second), strict=True))
    return replace(plan, replicas=one_replica(plan.n_micro, stages, plan.links))


def far_apart(plan: Plan, request: do.MakePlan) -> Plan:
    """Place the stages on workers whose link the survey leaves out."""
    devices = request.fleet.devices
    return placed(plan, devices[0].worker, devices[-1].worker)


@dataclass
class Large(Scripted):
    unanswered: bool = field(default=False, kw_only=True)

    def probed(self, worker: str, probe: do.ProbeLink) -> None:
        if not self.unanswered:
            super().probed(worker, probe)

    @property
    def asked(self) -> list[do.MakePlan]:
        return self.all(do.MakePlan)


def large(workers: int, **probing: int) -> Large:
    """Return a coordinator that so many have joined."""
    config = CoordinatorConfig(state_dir=Path("/nowhere"), probing=Probing(**probing))
    world = Large(config=config, altered=far_apart)
    world.join(*(f"w{at:02}" for at in range(workers)))
    return world


def test_a_plan_on_a_large_fleet_is_made_again_when_its_own_pairs_are_measured():
    world = large(40)
    links = world.scheduler.roster.links
    assert links.unmeasured(["w00", "w39"])
    world.submit()
    assert [request.attempt for request in world.asked] == [1, 2]
    assert not links.unmeasured(["w00", "w39"])
    assert world.asked[1].fleet.bandwidth_bps[0, 39] == 1e9
    assert world.state().phase is Phase.LOADING
    assert len(links.measured_s) <= 12 * 11 + 4 * 28 + 2  # all of the first twelve, few of those after them


def test_on_a_small_fleet_every_pair_is_measured_and_one_plan_is_made():
    world = large(12)
    world.submit()
    assert len(world.asked) == 1
    assert len(world.scheduler.roster.links.measured_s) == 12 * 11


def test_a_plan_that_always_wants_other_pairs_is_taken_after_two_more():
    world = large(40)

    def other(plan: Plan, request: do.MakePlan) -> Plan:
        return placed(plan, "w00", f"w{40 - request.attempt}")

    world.altered = other
    world.submit()
    assert len(world.asked) == 3
    assert world.state().phase is Phase.LOADING


def test_a_huge_fleet_is_planned_on_its_first_whose_links_are_known():
    world = large(40, planned_workers=15)
    world.submit()
    assert {len(request.fleet.devices) for request in world.asked} == {15}
    assert [device.worker for device in world.asked[0].fleet.devices] == [f"w{at:02}" for at in range(15)]
    assert {request.beyond for request in world.asked} == {25}


def test_a_huge_fleet_is_planned_on_those_with_the_best_links_and_the_most_memory():
    world = large(40, planned_workers=15)
    roster = world.scheduler.roster
    known = roster.workers["w39"]
    known.introduction = replace(known.introduction, memory_limit_bytes=2**40)
    for worker in ("w03", "w04"):
        for pair in roster.links.table.estimates.of(worker):
            roster.links.table.estimates[pair] = LinkEstimate(1e4, 0.01)
    world.submit()
    chosen = {device.worker for device in world.asked[0].fleet.devices}
    assert "w39" in chosen
    assert not {"w03", "w04"} & chosen


def test_a_job_waits_for_the_survey_no_longer_than_it_may():
    world = large(40, survey_within_s=5)
    world.unanswered = True
    world.join("w40")
    world.submit()
    world.wait(4.0)
    assert world.asked == []
    world.wait(2.0)
    assert world.asked


def test_a_plan_counts_with_the_losses_that_the_coordinator_has_seen() -> None:
    world = large(4)
    world.wait(600.0)
    for again in range(2, 12):  # one worker that always comes back as another process
        world.join("w03", incarnation=again)
    world.submit()
    rate = world.asked[0].fleet.losses_per_s
    assert rate == world.scheduler.roster.losses.per_s(world.clock.now_s)
    assert rate > 8.0 / (LOSS_HOURS * 3600.0)
