"""A stage that is killed for memory is a fact about the plan: what is trained stays, and the next plan counts
on what it took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.plan import Plan, Prediction, StagePrediction
from coordinator.membership.memory_learnt import KILLED_MARGIN, LEAST_RAISE, MOST
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import PlanAdopted
from coordinator.messages.jobs import Cause, Phase, moved
from coordinator.pipeline import machine
from coordinator.pipeline.tuning.memory import measured_bytes
from tests.coordinator.pipeline.changes.test_reconfigure import (
    JOB,
    commits,
    moves,
    running,
    spec,
    step,
    store,
)
from tests.sim.scripted import Scripted
from tests.sim.worker import MEMORY

MIB = 1 << 20
PLANNED = 100 * MIB  # of a stage, by the model


def predicted(plan: Plan, asked: do.MakePlan) -> Plan:
    """The plan with what its stages take, as the model and what was learnt say."""
    devices = {device.worker: device for device in asked.fleet.devices}
    stages = tuple(
        StagePrediction(
            place.worker, 1.0, 0.5,
            round(PLANNED * devices[place.worker].memory_scale), MEMORY,
            memory_scale=devices[place.worker].memory_scale,
        )
        for place in plan.places
    )  # fmt: skip
    return replace(plan, prediction=Prediction(1.0, 1.0, "latency", "", stages))


def kill(world: Scripted, worker: str, at_bytes: int = 200 * MIB) -> None:
    state = world.state()
    failed = ev.StageFailed(JOB, state.version, state.step, "killed", memory_bytes=at_bytes)
    world.says(worker, failed)


def measure(world: Scripted, worker: str, peak_bytes: int) -> None:
    """Train a step on three workers, of which one says what its stage takes at most."""
    world.join("a", "b", "c")
    world.submit(what=spec(3))
    world.load()
    version, now_s = world.state().version, world.clock.now_s
    world.says(worker, ev.Heartbeat(now_s, JOB, version, 0, 1, 0, memory_peak_bytes=peak_bytes))
    step(world)
    world.wait(0.5)


def scale(world: Scripted) -> float:
    introduced = world.introduced("a", 1)
    return world.scheduler.roster.memory.factor(JOB, introduced.device_class)


def plans(world: Scripted) -> list[PlanAdopted]:
    return [fact for fact in world.facts if isinstance(fact, PlanAdopted)]


def test_with_room_elsewhere_another_worker_repeats_the_steps_and_nobody_is_blamed() -> None:
    world = running("a", "b", "c", "d", altered=predicted)
    kill(world, "b")
    (fact,) = moves(world)
    assert (fact.workers, fact.newcomers, fact.step) == (("a", "d", "c"), (1,), 2)
    assert not world.scheduler.roster.workers["b"].quarantined
    assert world.scheduler.roster.is_idle("b")
    assert (world.state().failed, world.state().broken) == ((), 0)
    assert scale(world) == pytest.approx(2 * KILLED_MARGIN)
    (killed,) = [log for log in world.all(do.Log) if log.event == "stage.killed"]
    assert "killed for memory on b at 200 MiB, 100 were planned" in killed.fields["reason"]


def test_nobody_takes_over_who_has_less_than_was_learnt() -> None:
    world = running("a", "b", "c", "d", altered=predicted)
    world.guests["d"] = ev.Guest(memory_limit_bytes=150 * MIB)  # enough for the model's figure alone
    world.wait(1.0)
    kill(world, "b")
    (fact,) = moves(world)
    assert (fact.workers, fact.newcomers) == (("a", "b", "c"), (1,)), "its own worker repeats them"


def test_with_nobody_idle_its_own_worker_repeats_the_steps_and_the_job_is_planned_from_there() -> None:
    world = running("a", "b", "c", altered=predicted)
    kill(world, "b")
    (fact,) = moves(world)
    assert (fact.workers, fact.newcomers, fact.step) == (("a", "b", "c"), (1,), 2)
    (assign,) = world.to("b", do.Assign)
    assert (assign.replay.first_step, assign.first_step, assign.replay.stores) == (0, 2, (2,))
    assert [message.store for message in world.to("a", do.Reconfigure)] == [True]
    world.load()
    assert world.state().phase is Phase.STORING
    assert not world.messages(do.StepStart), "no step begins that would be killed again"
    store(world, 2)
    world.wait(2.0)
    first, second = plans(world)
    assert second.plan.version > first.plan.version
    assert second.plan.prediction is not None
    assert {told.memory_bytes for told in second.plan.prediction.stages} == {round(PLANNED * scale(world))}
    world.load()
    for _ in range(2):
        step(world)
    assert [fact.step for fact in commits(world)] == [0, 1, 2, 3], "no step is committed twice"
    assert world.state().failures == 0


def test_one_that_is_killed_again_while_it_repeats_goes_back_to_the_checkpoint_and_is_planned_anew() -> None:
    world = running("a", "b", "c", altered=predicted)
    kill(world, "b")
    once = scale(world)
    kill(world, "b")
    assert scale(world) >= LEAST_RAISE * once
    reasons = [log.fields["reason"] for log in world.all(do.Log) if log.event == "job.state"]
    assert any("killed before, while it repeated steps" in str(reason) for reason in reasons)
    assert (world.state().failures, world.state().broken) == (0, 0)
    world.wait(2.0)
    assert world.state().phase is Phase.LOADING
    assert len(plans(world)) == 2


def test_a_stage_that_is_killed_while_it_loads_is_planned_anew_however_often() -> None:
    world = Scripted(stages=3, fewest=3, altered=predicted)
    world.join("a", "b", "c")
    world.submit(what=spec(3))
    before = 1.0
    for _ in range(20):
        kill(world, "b")
        assert scale(world) > before or scale(world) == MOST
        before = scale(world)
        world.wait(2.0)
        assert world.state().phase is Phase.LOADING
    assert world.state().failures == 0


def test_what_heartbeats_measure_raises_the_next_plans_figures_and_nothing_lowers_them() -> None:
    world = running("a", "b", "c", altered=predicted)
    state = world.state()

    def beats(peak_bytes: int, job: str = JOB) -> None:
        beat = ev.Heartbeat(world.clock.now_s, job, state.version, state.step, 1, 0)
        world.says("b", replace(beat, memory_peak_bytes=peak_bytes))
        step(world)
        world.wait(0.5)

    beats(150 * MIB)
    assert measured_bytes(world.scheduler.roster, world.state(), 0) == 0
    assert scale(world) == 1.5
    beats(50 * MIB)
    assert scale(world) == 1.5


def test_what_was_learnt_is_in_the_plan_and_so_survives_the_coordinator() -> None:
    world = running("a", "b", "c", altered=predicted)
    kill(world, "b")
    world.load()
    store(world, 2)
    world.wait(2.0)
    learnt = scale(world)
    world.restart()
    world.join("a", "b", "c")
    assert scale(world) == 1.0
    world.load()
    step(world)
    world.wait(0.5)
    assert scale(world) == pytest.approx(learnt, rel=1e-6)


def test_a_stage_that_is_killed_while_the_result_is_stored_stores_it_once_it_has_repeated_the_steps() -> None:
    """Its neighbours' parts are kept: only who was killed does anything again."""
    world = running("a", "b", "c", steps=20, altered=predicted)
    assert world.state().phase is Phase.STORING
    store(world, 20, "a")
    world.done.clear()
    kill(world, "b")
    (assign,) = world.to("b", do.Assign)
    assert (assign.first_step, assign.replay.stores) == (20, (20,))
    assert [message.store for message in world.to("a", do.Reconfigure)] == [False]
    assert [message.store for message in world.to("c", do.Reconfigure)] == [True]
    world.load()
    store(world, 20, "b", "c")
    assert world.state().phase is Phase.FINISHED
    assert [fact.step for fact in commits(world)] == list(range(20))


def test_a_small_stage_tells_no_factor_for_large_ones() -> None:
    """What it takes is mostly what a process grows by when it first computes."""

    def uneven(plan: Plan, asked: do.MakePlan) -> Plan:
        made = predicted(plan, asked)
        assert made.prediction is not None
        first, *rest = made.prediction.stages
        stages = (replace(first, memory_bytes=first.memory_bytes // 25), *rest)
        return replace(made, prediction=replace(made.prediction, stages=stages))

    world = Scripted(stages=3, fewest=3, altered=uneven)
    measure(world, "a", 80 * MIB)
    assert scale(world) == 1.0
    kill(world, "a")
    assert scale(world) == LEAST_RAISE


def test_a_limit_in_the_planners_figures_is_compared_with_the_models() -> None:
    """Nothing holds a stage to it: in a laboratory a small model is cut as a large one would be."""

    class Laboratory(Scripted):
        def introduced(self, worker: str, incarnation: int) -> ev.Introduction:
            return replace(super().introduced(worker, incarnation), memory_in_figures=True)

    world = Laboratory(stages=3, fewest=3, altered=predicted)
    measure(world, "b", 900 * MIB)
    assert scale(world) == world.scheduler.roster.memory_factor(JOB, "b") == 1.0


def test_where_a_part_will_not_come_the_job_trains_on_instead_of_waiting_for_it() -> None:
    """Who stood by for a rank has stored nothing of the step that another plan was to begin with."""
    state = running("a", "b", "c", altered=predicted).state()
    unfit = replace(
        state,
        phase=Phase.LOADING,
        run=replace(state.run, unfit=True, moving=True),
        storing=replace(state.storing, parts={2: {}}),
    )
    workers = ("a", "b", "d")  # ... and is no newcomer
    after, _ = machine.step(unfit, moved(unfit, workers, (), Cause.LOST, "c is lost"), 0.0)
    assert (dict(after.storing.parts), after.run.unfit, after.storing.owed) == ({}, False, True)
    kept, _ = machine.step(unfit, moved(unfit, workers, {2}, Cause.LOST, "c is lost"), 0.0)
    assert (set(kept.storing.parts), kept.run.unfit) == ({2}, True)
