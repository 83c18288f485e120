"""What steps teach of a worker's speed: nothing where the plan's figures are another's."""

from __future__ import annotations

import pytest

from coordinator.pipeline.changes.successors import devices_of, seconds_of
from tests.coordinator.pipeline.changes.test_reconfigure import JOB, leave, predicted, spec
from tests.sim.scripted import Scripted


def test_who_takes_over_a_stage_is_not_judged_by_the_seconds_of_the_one_before() -> None:
    world = Scripted(altered=predicted)
    world.join("a", "b", "c")
    world.submit(what=spec(2, steps=40))
    world.load()
    leave(world, "b")
    assert world.holders() == ["a", "c"]
    world.load()
    seconds = {"a": 2.0, "c": 2.5}
    for _ in range(5):
        world.wait(3.0)
        for worker in world.holders():
            world.ready(worker, square_norms=(1.0,), forward_s=seconds[worker])
    workers = world.scheduler.roster.workers
    assert workers["a"].computing.value == pytest.approx(2.0)
    assert workers["c"].computing.samples == 0, "what it takes is held against what b would"


def test_a_stage_that_comes_back_to_its_worker_has_its_own_figures() -> None:
    world = Scripted(altered=predicted)
    world.join("a", "b")
    world.submit(what=spec(2))
    plan = world.state(JOB).plan
    assert plan is not None
    moved = plan.moved(2, ["a", "c"]).moved(3, ["a", "d"])
    assert [stage.figures_of for stage in moved.prediction.stages] == ["", "b"]  # type: ignore[union-attr]
    back = moved.moved(4, ["a", "b"])
    assert back.prediction == plan.prediction


def test_who_would_follow_is_compared_with_the_machine_that_the_figures_are_of() -> None:
    world = Scripted(altered=predicted)
    world.join("a", "b", "c", "d")
    world.submit(what=spec(2))
    world.load()
    leave(world, "b")
    assert world.holders() == ["a", "c"]
    roster, state = world.scheduler.roster, world.state(JOB)
    timings = roster.ops.timings
    timings["c", "fp32"] = {op: (2 * one_s, 2 * two_s) for op, (one_s, two_s) in timings["c", "fp32"].items()}
    fleet = devices_of(roster, ("a", "b", "c", "d"), "fp32")
    assert seconds_of(state, roster, 1, fleet, "d", {}) == pytest.approx(1.0), "as fast as b was"
    assert seconds_of(state, roster, 1, fleet, "c", {}) == pytest.approx(2.0)
