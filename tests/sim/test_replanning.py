"""A fleet that grows while a job trains, in simulated worlds: another plan where it pays, no step twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.messages.facts import PlanAdopted, StepCommitted, from_record
from coordinator.pipeline.changes import newcomers
from tests.parameters import each_once
from tests.sim.faults import Crash, Fault, Freeze, KillCoordinator, Leave
from tests.sim.world import Scenario, World, told

LATE_S = 4.0  # when the last worker comes: the job trains
STEPS = 70


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have jobs of a minute planned anew."""
    monkeypatch.setattr(newcomers, "SETTLED_S", 3.0)
    monkeypatch.setattr(newcomers, "PLANNED_WITHIN_S", 1.0)


def grown(*faults: Fault, gain: float = 2.0, seed: int = 1, **changes: Any) -> World:
    """Run a world whose third worker comes late; more workers are predicted to be so many times as fast."""
    away = Crash(0.25, LATE_S, "w2")
    chosen = {"steps": STEPS, "standbys": None, **changes}
    world = World(Scenario(seed, workers=3, faults=(away, *faults), **chosen))
    world.coordinator.grown_s = lambda own, everybody: 1.0 / gain if everybody > own else 1.0
    world.run()
    return world


def plans(world: World) -> list[tuple[int, int]]:
    """Return of each plan that was made how many workers it has, and the step that it began with."""
    found, step = [], 0
    for record in world.coordinator.folder.records:
        fact = from_record(record)
        if isinstance(fact, StepCommitted):
            step = fact.step + 1
        elif isinstance(fact, PlanAdopted):
            found.append((len(fact.plan.places), step))
    return found


def commits(world: World) -> list[int]:
    return [fact.step for fact in world.facts(StepCommitted)]


def test_a_fleet_that_has_grown_is_used_and_no_step_is_repeated() -> None:
    world = grown()
    (before, first), (after, begun) = plans(world)
    assert (before, first, after) == (2, 0, 3)
    assert 5 < begun < STEPS - 10
    assert commits(world) == list(range(STEPS))
    assert world.coordinator.shadow.jobs["job-1"].outcome == "finished"
    assert "3 workers on a fleet that has grown" in told(world)


@pytest.mark.parametrize(
    "changes",
    [{"gain": 1.05}, {"standbys": 0}, {"steps": 30, "gain": 1.2}],
    ids=["as fast", "the plan is to stay", "few steps left"],
)
def test_a_job_keeps_its_plan_where_another_is_not_worth_it(changes: dict[str, Any]) -> None:
    assert len(plans(grown(**changes))) == 1


@pytest.mark.parametrize("local_steps", [0, 3])
def test_what_becomes_possible_is_done(local_steps: int) -> None:
    """Three replicas, exact or with steps of their own, of a job that began on two workers."""
    world = grown(replicas=3, local_steps=local_steps)
    assert [workers for workers, _ in plans(world)] == [1 if local_steps else 2, 3]
    assert world.coordinator.shadow.jobs["job-1"].outcome == "finished"


@pytest.mark.parametrize(
    ("fault", "at_s"),
    each_once(
        [
            Crash(0, 3.0, "w0"),
            Crash(0, 3.0, "w2"),
            Freeze(0, 6.0, "w1"),
            Leave(0, 3.0, "w2"),
            KillCoordinator(0, 2.0),
        ],
        [8.7, 9.5],
    ),
)
def test_whatever_happens_meanwhile_no_step_is_lost_or_doubled(fault: Fault, at_s: float) -> None:
    world = grown(replace(fault, at_s=at_s))
    assert commits(world) == list(range(STEPS))
