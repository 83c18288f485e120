"""Several jobs on one fleet: side by side, one before the other, and through every fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.job import Priority
from coordinator.messages import events as ev
from coordinator.messages.facts import JobEnded, PlanAdopted, StepCommitted
from tests.sim.faults import Crash, Fault, Freeze, KillCoordinator, Leave
from tests.sim.world import Scenario, World, pipeline_job

STEPS = 60
LOW = replace(pipeline_job(STEPS), priority=Priority.LOW)


def spans(world: World) -> dict[str, tuple[float, float]]:
    """Return by job the times of its first and last committed step."""
    found: dict[str, tuple[float, float]] = {}
    for fact in world.facts(StepCommitted):
        first_s = found.get(fact.job, (fact.at_s, 0.0))[0]
        found[fact.job] = first_s, fact.at_s
    return found


def together(world: World) -> bool:
    (one, ended), (other, done) = spans(world).values()
    return max(one, other) < min(ended, done)


def outcomes(world: World) -> dict[str, str]:
    return {fact.job: fact.outcome for fact in world.facts(JobEnded)}


def commits(world: World, job: str) -> list[int]:
    return [fact.step for fact in world.facts(StepCommitted) if fact.job == job]


@pytest.mark.parametrize(
    "faults",
    [
        (),
        (Crash(6.0, 5.0, "w1"),),
        (KillCoordinator(6.0, 2.0),),
        (Freeze(5.0, 6.0, "w2"), KillCoordinator(7.0, 2.0), Leave(9.0, 0.0, "w0")),
    ],
    ids=["undisturbed", "killed", "restarted", "all of it"],
)
def test_two_jobs_of_two_stages_train_at_once_and_each_is_as_if_alone(faults: tuple[Fault, ...]) -> None:
    """Every step's result is compared with the job's reference (``Checks``)."""
    world = World(Scenario(7, workers=4, pipeline=2, stages=2, steps=40, faults=faults))
    world.run()
    assert together(world)
    assert outcomes(world) == {"job-1": "finished", "job-2": "finished"}
    plans: dict[str, set[str]] = {}
    for fact in world.facts(PlanAdopted):
        plans.setdefault(fact.job, {place.worker for place in fact.plan.places})
    assert not plans["job-1"] & plans["job-2"]


def preempted(*faults: Fault, seed: int = 3) -> World:
    """Run a job of low priority on both workers, and one of high priority that comes later and needs both."""
    world = World(Scenario(seed, workers=2, pipeline=0, stages=2, faults=faults))
    world.coordinator.fewest = 2
    world.submit("low", LOW, 1.0)
    world.submit("high", replace(pipeline_job(12), priority=Priority.HIGH), 5.0)
    world.run()
    return world


def test_a_job_of_low_priority_makes_way_at_a_commit_and_goes_on_afterwards() -> None:
    world = preempted()
    assert commits(world, "low") == list(range(STEPS))
    low, high = spans(world)["low"], spans(world)["high"]
    assert low[0] < high[0] < high[1] < low[1]
    between = [f for f in world.facts(StepCommitted) if f.job == "low" and high[0] < f.at_s < high[1]]
    assert len(between) == 0
    told = [text for _, text in world.clock.story if "for high, of a higher priority" in text]
    assert len(told) > 0


@pytest.mark.parametrize("at_s", [5.6, 6.4, 7.5, 9.0])
@pytest.mark.parametrize("fault", ["killed", "restarted", "frozen"])
def test_nothing_is_lost_around_a_change_of_turns(fault: str, at_s: float) -> None:
    struck: dict[str, Fault] = {
        "killed": Crash(at_s, 3.0, "w1"),
        "restarted": KillCoordinator(at_s, 1.5),
        "frozen": Freeze(at_s, 4.0, "w0"),
    }
    world = preempted(struck[fault])
    assert outcomes(world) == {"low": "finished", "high": "finished"}
    assert set(commits(world, "low")) == set(range(STEPS))


def test_a_job_that_is_cancelled_while_another_makes_way_leaves_it_its_workers() -> None:
    world = World(Scenario(3, workers=2, pipeline=0, stages=2))
    world.coordinator.fewest = 2
    world.submit("low", LOW, 1.0)
    world.submit("high", replace(pipeline_job(12), priority=Priority.HIGH), 5.0)
    world.clock.after(5.05, lambda: world.coordinator.post(ev.CancelAsked("high", "changed my mind")))
    world.run()
    assert outcomes(world) == {"low": "finished", "high": "cancelled"}
    assert commits(world, "low") == list(range(STEPS))


def test_a_short_job_is_let_in_by_a_long_one_and_both_end() -> None:
    """Of one priority: the long job gives workers where the short one gains more than that costs."""
    world = World(Scenario(5, workers=2, pipeline=0, stages=2, standbys=None))
    world.coordinator.fewest = 2
    world.submit("long", replace(pipeline_job(400, standbys=None)), 1.0)
    world.submit("short", replace(pipeline_job(12, standbys=None)), 8.0)
    world.run()
    assert spans(world)["short"][1] < spans(world)["long"][1]
    assert commits(world, "long") == list(range(400))


def test_a_job_whose_cut_names_its_devices_is_planned_on_no_fewer() -> None:
    """Else it would try, find too few and wait again, while one behind it takes what is idle."""
    world = World(Scenario(3, workers=3, pipeline=0, stages=2))
    world.coordinator.fewest = 2
    for name in ("one", "two"):
        world.submit(name, replace(pipeline_job(12), partitioner="cut:1"), 1.0)
    world.run()
    assert outcomes(world) == {"one": "finished", "two": "finished"}
    assert not [text for _, text in world.clock.story if "lacks a worker" in text]
