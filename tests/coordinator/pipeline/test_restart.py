"""A job's machine made from the journal is the one that stopped; only workers that fit take a rank again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.job import Optimizer
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages import jobs
from coordinator.messages.events import Held
from coordinator.messages.facts import CheckpointStored, Evaluated, LinksChanged, StepCommitted
from coordinator.messages.jobs import JobState, Phase
from coordinator.pipeline.restart import Returning, running
from tests.coordinator.pipeline.tuning.test_relink import COARSE
from tests.sim.scripted import HASH, Scripted, spec


def back(world: Scripted, worker: str, held: Held | None) -> None:
    """Have a worker's process, alive all the time, open a session with the coordinator that was restarted."""
    world.introduced = lambda name, incarnation: replace(  # type: ignore[method-assign]
        Scripted.introduced(world, name, incarnation), held=held
    )
    world.join(worker)


def remade(world: Scripted) -> JobState:
    """The machine that a restarted coordinator makes of what is on the disk."""
    before = world.state()
    record = world.folder.fold().jobs["job-1"]
    waiting = JobState("job-1", before.spec, record.last_checkpoint, before.created_s, plan=record.plan)
    made = running(waiting, record, 0.0)
    assert made is not None
    return made


SAME = ("phase", "version", "step", "plan", "loaded", "last_commit", "awaiting_eval", "relink", "lineage")


def same(world: Scripted) -> dict[str, object]:
    """What of a machine has to be the same after a restart, with what it is."""
    now, made = world.state(), remade(world)
    found, wanted = (
        {name: getattr(s.run if hasattr(s.run, name) else s, name) for name in SAME} for s in (made, now)
    )
    assert found == wanted
    assert made.storing.parts.keys() == now.storing.parts.keys()
    return found


def test_the_machine_is_the_same_at_every_step_with_all_that_its_last_commit_said() -> None:
    world = Scripted().training(steps=9, checkpoint_every=3, optimizer=Optimizer(clip_norm=0.5))
    for at in range(9):
        for worker in world.holders():
            world.ready(worker, square_norms=(4.0 + at,))
        found = same(world)
        commit = found["last_commit"]
        assert isinstance(commit, do.StepCommit)
        assert (commit.step, commit.store, commit.last) == (at, (at + 1) % 3 == 0, at == 8)
        assert 0 < commit.gradient_scale < 1
        if commit.store and not commit.last:  # the next is asked for once this one is whole
            for rank, worker in enumerate(world.holders()):
                world.says(worker, ev.StateStored("job-1", 1, at, {f"w{rank}": HASH}))
    assert world.state().phase is Phase.STORING


def test_an_evaluation_that_is_awaited_and_one_that_is_over() -> None:
    world = evaluating()
    assert same(world)["awaiting_eval"] == 1
    world.says("b", ev.EvalReady("job-1", 1, 0, 0.5))
    assert same(world)["awaiting_eval"] is None
    assert world.folder.fold().jobs["job-1"].eval_loss == 0.5


def evaluating() -> Scripted:
    """After the first step, whose commit asked for an evaluation."""
    world = Scripted()
    world.join("a", "b")
    job = spec(eval_every=1, eval_batches=1)
    world.submit(what=replace(job, eval_data=job.data, eval_dag_hash=HASH))
    world.load()
    world.step()
    assert world.state().phase is Phase.EVALUATING
    return world


def test_new_links_are_said_again_with_the_commit_that_said_them_and_begin_when_they_did() -> None:
    world = Scripted().training(steps=9)
    world.step()
    driver = world.scheduler.drivers[0]
    driver._step("job-1", jobs.Relinked(COARSE, "slower"))  # type: ignore[attr-defined]
    world.step()
    commit = same(world)["last_commit"]
    assert isinstance(commit, do.StepCommit)
    assert commit.relink == do.Relink(2, 3, COARSE)
    world.step()
    found = same(world)
    assert isinstance(found["last_commit"], do.StepCommit)
    assert found["last_commit"].relink is None
    assert (found["version"], found["lineage"]) == (2, ((1, 0), (2, 3)))


def test_a_journal_of_before_says_too_little_and_its_job_goes_on_from_its_checkpoint() -> None:
    world = Scripted().training()
    record = world.folder.fold().jobs["job-1"]
    record.commit = StepCommitted("job-1", 1, 0, 1.0, 0.0)
    waiting = JobState("job-1", world.state().spec, record.last_checkpoint, 0.0, plan=record.plan)
    assert running(waiting, record, 0.0) is None


def test_workers_with_the_state_go_on_and_hear_the_last_commit_again() -> None:
    world = Scripted().training("a", "b", steps=5)
    world.step()
    world.step()
    world.restart()
    back(world, "a", Held("job-1", 1, 2))
    assert world.state().phase is Phase.TRAINING
    assert "waits for its workers" in world.state().reason
    back(world, "b", Held("job-1", 1, 1, ready=True))
    assert "goes on with plan 1" in world.state().reason
    (said,) = world.to("b", do.StepCommit)
    assert (said.step, said.version) == (1, 1)
    world.step()
    assert (world.state().step, world.state().version) == (3, 1)
    assert world.to("a", do.Release) == []


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (None, "without its stage"),
        (Held("job-1", 1, 1), "after 1 steps, 2 are committed"),
        (Held("job-1", 1, 3), "after 3 steps, 2 are committed"),
        (Held("job-1", 1, 0, ready=True), "after 0 steps"),
        (Held("job-1", 2, 2), "of plan 2, awaited is that of plan 1"),
        (Held("job-9", 1, 2), "with a stage of job-9"),
    ],
)
def test_one_worker_that_does_not_fit_is_given_its_stage_again(held: Held | None, why: str) -> None:
    world = Scripted().training("a", "b", steps=5)
    world.step()
    world.step()
    world.restart()
    back(world, "a", Held("job-1", 1, 2))
    back(world, "b", held)
    assert any(why in str(i.fields.get("reason")) for i in world.all(do.Log))
    said = [type(m) for m in world.to("b", object) if isinstance(m, do.Release | do.Assign)]
    assert said == [do.Release, do.Assign]
    (assign,) = world.to("b", do.Assign)
    assert (assign.first_step, assign.replay.first_step, assign.replay.scales) == (2, 0, (1.0, 1.0))
    (moved,) = world.to("a", do.Reconfigure)
    assert (moved.base, moved.step, moved.plan.version) == (1, 2, 2)
    world.load()
    assert (world.state().phase, world.state().version, world.state().step) == (Phase.TRAINING, 2, 2)


def test_reports_that_are_repeated_count_whatever_comes_first() -> None:
    """The first step may have begun, which no fact says: a rank that is at it counts as loaded."""
    world = Scripted().training("a", "b", steps=5)
    world.restart()
    assert world.state().phase is Phase.LOADING
    for worker in ("a", "b"):
        back(world, worker, Held("job-1", 1, 0, ready=True))
        world.ready(worker)
    assert (world.state().phase, world.state().step) == (Phase.TRAINING, 1)
    assert world.state().plan is not None
    assert world.to("a", do.Assign) == []


def test_where_only_some_have_loaded_the_plan_is_made_anew() -> None:
    world = Scripted().training("a", "b")
    world.restart()
    back(world, "a", Held("job-1", 1, 0))
    back(world, "b", None)
    assert any("only some have loaded" in str(i.fields.get("reason")) for i in world.all(do.Log))
    world.wait(0.5)
    assert world.state().version == 2


def test_who_has_not_heard_of_the_plan_is_given_its_stage_once_all_are_back() -> None:
    world = Scripted().training("a", "b")
    world.restart()
    back(world, "b", Held("job-1", 1, 0, loaded=False))
    world.lose("b")
    back(world, "b", Held("job-1", 1, 0, loaded=False))
    assert world.messages(do.Assign) == []
    back(world, "a", None)
    assert sorted(worker for worker, _ in world.messages(do.Assign)) == ["a", "b"]
    world.load()
    assert (world.state().phase, world.state().version) == (Phase.TRAINING, 1)


def test_a_worker_that_is_away_for_too_long_is_named() -> None:
    world = Scripted().training("a", "b", "c")
    world.step()
    world.restart()
    back(world, "a", Held("job-1", 1, 1))
    back(world, "c", None)
    world.wait(16.0)
    assert any("b did not come back" in str(i.fields.get("reason")) for i in world.all(do.Log))
    assert sorted(world.holders()) == ["a", "c"]


def test_a_returning_job_may_be_cancelled() -> None:
    world = Scripted().training("a", "b")
    world.step()
    world.restart()
    back(world, "a", Held("job-1", 1, 1))
    world.handle(ev.CancelAsked("job-1", "by the owner"))
    assert world.state().phase is Phase.CANCELLED
    assert [type(m) for m in world.to("a", do.Release)] == [do.Release]
    back(world, "b", Held("job-1", 1, 1))
    world.wait(20.0)
    assert world.state().phase is Phase.CANCELLED


def test_facts_of_a_plan_end_with_it() -> None:
    world = evaluating()
    ledger = world.folder.fold()
    ledger.apply(LinksChanged("job-1", 2, 9, COARSE, "slower"))
    ledger.apply(replace(StepCommitted("job-1", 1, 1, 1.0, 0.0, 1.0), store=True))
    record = ledger.jobs["job-1"]
    assert (record.storing, record.awaiting_eval, record.version) == ((2,), 1, 2)
    ledger.apply(Evaluated("job-1", 1, 0.5))
    ledger.apply(CheckpointStored("job-1", 2, {}))
    assert (record.storing, record.awaiting_eval) == ((), None)
    back_to = Returning(1, frozenset("ab"), {"b"}, 1.0)
    assert back_to.unfit(world.state(), "b", Held("job-1", 1, world.state().step)) == ""
