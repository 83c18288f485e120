"""A job whose held-out loss gets no better ends as finished, with a checkpoint of its best steps."""

from __future__ import annotations

from dataclasses import replace

from coordinator.messages import events as ev
from coordinator.messages.events import EvalReady, Held, Leaving
from coordinator.messages.facts import JobEnded
from coordinator.messages.held_out import Best
from coordinator.messages.jobs import Phase
from tests.coordinator.pipeline.test_restart import back
from tests.sim.scripted import HASH, Scripted, spec

JOB = "job-1"


def begun(**changes: object) -> Scripted:
    """Two stages that evaluate after every step."""
    world = Scripted()
    world.join("a", "b")
    job = spec(**{"steps": 20, "eval_every": 1, "eval_batches": 1, "patience": 2, **changes})
    world.submit(what=replace(job, eval_data=job.data, eval_dag_hash=HASH))
    world.load()
    return world


def store(world: Scripted, done: int) -> None:
    for rank, worker in enumerate(world.holders()):
        world.says(worker, ev.StateStored(JOB, world.state().version, done - 1, {f"w{rank}": HASH}))


def step(world: Scripted, loss: float, stored: bool = True) -> None:
    world.step()
    done = world.state().step
    assert world.state().phase is Phase.EVALUATING
    if stored and done in world.state().storing.parts:
        store(world, done)
    world.says("b", EvalReady(JOB, world.state().version, done - 1, loss))


def ended(world: Scripted) -> list[JobEnded]:
    return [fact for fact in world.facts if isinstance(fact, JobEnded)]


def test_training_ends_after_so_many_evaluations_without_a_better_loss() -> None:
    world = begun()
    for loss in (3.0, 2.0, 2.1, 1.9, 1.95):
        step(world, loss)
        assert world.state().phase is Phase.TRAINING
    step(world, 1.9)
    (fact,) = ended(world)
    assert (fact.outcome, world.state().step) == ("finished", 6)
    assert "stopped after 6 of 20 steps: 2 evaluations without a held-out loss below 1.9000" in fact.reason
    assert "of step 4; `atoll export job-1 --step best`" in fact.reason
    record = world.folder.fold().jobs[JOB]
    assert record.best is not None
    assert (record.best.step, record.last_checkpoint.step) == (4, 6)
    assert record.held_out == world.state().held_out


def test_without_patience_it_trains_to_its_last_step() -> None:
    world = begun(patience=0, steps=6)
    for _ in range(6):
        step(world, 1.0)
    store(world, 6)
    assert world.state().reason == "6 steps done"


def test_a_job_that_stores_as_often_as_it_evaluates_has_each_evaluated_state_stored() -> None:
    """A checkpoint that takes three steps to be stored; with another rhythm losses come as they are due."""
    for every, evaluated in ((2, [2, 5, 6]), (3, [2, 4, 6])):
        world = begun(patience=0, steps=6, eval_every=2, checkpoint_every=every)
        found = []
        for done in range(1, 7):
            world.step()
            assert world.state().step == done
            if world.state().phase is Phase.EVALUATING:
                found.append(done)
                assert every == 3 or done in world.state().storing.parts
                world.says("b", EvalReady(JOB, world.state().version, done - 1, 1.0 / done))
            if done == 4 and every == 2:
                store(world, 2)
        assert found == evaluated


def test_what_is_being_stored_is_waited_for() -> None:
    world = begun(patience=1)
    step(world, 1.0, stored=False)
    step(world, 2.0, stored=False)
    assert (world.state().phase, world.state().reason) == (Phase.STORING, "storing the result")
    world.ready("a")  # a step that began before: it is not committed any more
    store(world, 1)
    (fact,) = ended(world)
    assert (fact.outcome, world.state().checkpoint.step, world.state().step) == ("finished", 1, 2)


def test_a_worker_that_leaves_meanwhile_does_not_take_the_best_steps_with_it() -> None:
    world = begun(patience=1)
    step(world, 1.0)
    step(world, 2.0, stored=False)
    assert world.state().phase is Phase.STORING
    world.says("a", Leaving("good night"))
    (fact,) = ended(world)
    assert (fact.outcome, world.state().checkpoint.step) == ("finished", 1)


def test_without_a_checkpoint_of_the_best_steps_they_are_done_again() -> None:
    world = begun(patience=1)
    step(world, 1.0, stored=False)
    step(world, 2.0, stored=False)
    world.says("a", ev.StateStored(JOB, 1, 0, {}, "No space left on device"))
    assert ended(world) == []
    world.wait(60.0)
    assert (world.state().phase, world.state().step) == (Phase.LOADING, 0)
    world.load()
    step(world, 1.0)
    (fact,) = ended(world)
    assert (fact.outcome, world.state().checkpoint.step) == ("finished", 1)


def test_a_restarted_coordinator_counts_on() -> None:
    world = begun()
    step(world, 1.0)
    step(world, 2.0)
    before = world.state().held_out
    assert (before.best, before.since) == (Best(1, 1.0), 1)
    world.restart()
    assert world.state().held_out == before
    back(world, "a", Held(JOB, 1, 2))
    back(world, "b", Held(JOB, 1, 2))
    step(world, 2.0)
    assert ended(world)[0].outcome == "finished"
