"""A lost rank is taken over by whoever fits best, and all others keep their stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll.dataset_spec import DataSpec
from atoll.job import JobSpec, Optimizer, TrainingSpec
from atoll.plan import LinkPrediction, Plan, Prediction, StagePrediction
from coordinator.membership import member
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages import jobs
from coordinator.messages.events import Held
from coordinator.messages.facts import MOST_REPLAYED, Reconfigured, StepCommitted
from coordinator.messages.jobs import Phase, PlanChange
from coordinator.pipeline.changes.recovery import choose
from coordinator.pipeline.history import logs_short
from tests.coordinator.pipeline.test_restart import back
from tests.coordinator.pipeline.tuning.test_relink import COARSE, pipeline
from tests.sim.scripted import HASH, Scripted

JOB = "job-1"


def spec(stages: int, **changes: Any) -> JobSpec:
    training = TrainingSpec(**{"steps": 20, "n_micro": 2, "optimizer": Optimizer(clip_norm=0.5), **changes})
    names = {f"w{at}": HASH for at in range(stages)}
    return JobSpec("job", training, HASH, "", names, DataSpec((), 8, 1), None)


def running(
    *workers: str, stages: int = 3, steps: int = 2, altered: Any = lambda plan, _: plan, **changes: Any
) -> Scripted:
    """A job of so many stages on the first workers, the others in the pool, after so many steps;
    ``altered``: the plan that is made."""
    world = Scripted(stages=stages, fewest=stages, altered=altered)
    world.join(*workers)
    world.submit(what=spec(stages, **changes))
    world.load()
    for _ in range(steps):
        step(world)
    world.done.clear()
    return world


def step(world: Scripted) -> None:
    for worker in world.holders():
        world.ready(worker, square_norms=(1.0 + world.state().step,))


def store(world: Scripted, done: int, *workers: str) -> None:
    for worker in workers or world.holders():
        version = next(v for v, first in reversed(world.state().run.lineage) if first < done)
        world.says(
            worker, ev.StateStored(JOB, version, done - 1, {f"w{world.holders().index(worker)}": HASH})
        )


def leave(world: Scripted, worker: str) -> None:
    world.says(worker, ev.Leaving("good night"))


def moves(world: Scripted) -> list[Reconfigured]:
    return [fact for fact in world.facts if isinstance(fact, Reconfigured)]


def commits(world: Scripted) -> list[StepCommitted]:
    return [fact for fact in world.facts if isinstance(fact, StepCommitted)]


def test_the_newcomer_repeats_what_the_journal_says_and_the_others_hear_the_commit_first() -> None:
    world = running("a", "b", "c", "d")
    leave(world, "b")
    (assign,) = world.to("d", do.Assign)
    scales = tuple(fact.scale for fact in commits(world))
    assert len(set(scales)) == 2
    (era,) = assign.replay.eras
    assert (assign.first_step, assign.rank, assign.plan.version) == (2, 1, 2)
    assert (assign.replay.first_step, assign.replay.scales, assign.replay.stores) == (0, scales, ())
    assert (era.version, era.first_step, era.links) == (1, 0, world.state().plan.links)
    assert {peer.link.peer for peer in assign.peers} == {"a", "c"}
    for worker in "ac":
        commit, moved = world.to(worker, do.StepCommit | do.Reconfigure)
        assert (commit.step, moved.step, moved.base, moved.plan.version) == (1, 2, 1, 2)
        assert {peer.link.peer for peer in moved.peers} == {"d"}
    (fact,) = moves(world)
    assert (fact.base, fact.version, fact.step, fact.workers, fact.newcomers) == (
        1,
        2,
        2,
        ("a", "d", "c"),
        (1,),
    )
    assert "d takes over rank 1, repeating 2 steps from step 0" in world.state().reason
    world.load()
    assert [(m.version, m.step) for m in world.to("d", do.StepStart)] == [(2, 2)]
    for _ in range(2):
        step(world)
    assert [(fact.version, fact.step) for fact in commits(world)] == [(1, 0), (1, 1), (2, 2), (2, 3)]


def test_who_leaves_is_let_go_at_once() -> None:
    world = running("a", "b", "c", "d")
    leave(world, "b")
    assert world.scheduler.roster.workers["b"].member.phase is member.Phase.LEFT
    assert [type(m) for m in world.to("b", object)] == [do.Release]


def test_steps_in_front_of_the_newest_checkpoint_are_not_repeated() -> None:
    world = running("a", "b", "c", "d", steps=3, checkpoint_every=2)
    store(world, 2)
    step(world)
    leave(world, "c")
    (assign,) = world.to("d", do.Assign)
    assert (assign.replay.first_step, assign.first_step, len(assign.replay.scales)) == (2, 4, 2)
    assert assign.replay.stores == (4,), "the checkpoint under way is stored by who comes"
    store(world, 4, "a", "b")
    world.load()
    store(world, 4, "d")
    assert world.state().checkpoint.step == 4
    step(world)
    leave(world, "a")
    why = "no idle worker can take over stage 0; continues from step 4"
    assert any(why in str(i.fields) for i in world.all(do.Log))


def test_right_after_a_checkpoint_nothing_is_repeated() -> None:
    world = running("a", "b", "c", "d", checkpoint_every=2)
    store(world, 2)
    leave(world, "b")
    (assign,) = world.to("d", do.Assign)
    assert (assign.first_step, assign.replay) == (2, None)


def test_commits_say_from_where_on_messages_may_be_wanted() -> None:
    world = running("a", "b", steps=2, stages=2, checkpoint_every=2)
    assert [m.replay_from for m in world.to("a", do.StepCommit)] == []
    store(world, 2)
    step(world)
    assert [m.replay_from for m in world.to("a", do.StepCommit)] == [2]


def test_links_that_changed_meanwhile_are_named_by_step_and_those_announced_are_forgotten() -> None:
    world = running("a", "b", "c", stages=2, steps=1)
    driver = pipeline(world)
    driver._step(JOB, jobs.Relinked(COARSE, "slower"))
    for _ in range(3):
        step(world)
    driver._step(JOB, jobs.Relinked((), "faster"))
    step(world)
    assert world.state().run.relink is not None
    leave(world, "b")
    (assign,) = world.to("c", do.Assign)
    assert [(era.version, era.first_step) for era in assign.replay.eras] == [(1, 0), (2, 3)]
    assert assign.replay.eras[1].links == COARSE
    state = world.state()
    assert (state.version, state.run.relink, state.run.lineage) == (4, None, ((1, 0), (2, 3), (4, 5)))


@pytest.mark.parametrize("lost", ["b", "d"])
def test_a_second_loss_while_the_first_is_being_replaced(lost: str) -> None:
    """The newcomer, or one that is none of its neighbours: who was loading begins anew."""
    world = running("a", "b", "c", "d", "e", "f", stages=4)
    leave(world, "a")
    assert world.holders() == ["e", "b", "c", "d"]
    lost = "e" if lost == "b" else lost
    leave(world, lost)
    at = ["e", "b", "c", "d"].index(lost)
    assert world.holders()[at] == "f"
    assert [fact.newcomers for fact in moves(world)] == [(0,), tuple(sorted({0, at}))]
    assert all(m.base == 1 for m in world.to("b", do.Reconfigure))
    world.load()
    step(world)
    assert [fact.step for fact in commits(world)] == [0, 1, 2]


def test_a_newcomer_that_is_loaded_is_one_of_those_who_stay() -> None:
    world = running("a", "b", "c", "d", "e")
    leave(world, "b")
    world.load()
    world.done.clear()
    leave(world, "c")
    assert world.holders() == ["a", "d", "e"]
    (moved,) = world.to("d", do.Reconfigure)
    assert (moved.base, moved.plan.version) == (2, 3)
    assert [m.base for m in world.to("a", do.Reconfigure)] == [1]


def test_neighbours_that_are_lost_together_repeat_together_from_one_state() -> None:
    """Whoever was loading begins anew, beside who has just been given the stage next to it."""
    world = running("a", "b", "c", "d", "e", "f", stages=4)
    leave(world, "b")
    leave(world, "c")
    assert world.holders() == ["a", "e", "f", "d"]
    assert [fact.newcomers for fact in moves(world)] == [(1,), (1, 2)]
    state, first = world.state(), world.to("e", do.Assign)[-1]
    (second,) = world.to("f", do.Assign)
    assert first.replay == second.replay
    assert (first.replay.first_step, len(first.replay.scales)) == (0, 2)
    assert first.plan.version == second.plan.version == state.version
    assert {p.link.peer for p in first.peers} == {"a", "f"}
    assert {p.link.peer for p in second.peers} == {"e", "d"}
    assert [m.base for m in world.to("a", do.Reconfigure)] == [1, 1]
    assert [worker for worker, _ in world.messages(do.Release)] == ["b", "c"]
    world.load()
    step(world)
    assert [fact.step for fact in commits(world)] == [0, 1, 2]


@pytest.mark.parametrize("spare", [("d",), ("d", "e")])
def test_who_has_no_stage_with_newer_state_beside_it_goes_back(spare: tuple[str, ...]) -> None:
    """All stages of the plan, or more of them than idle workers can take over."""
    world = running("a", "b", *spare, stages=2)
    leave(world, "a")
    leave(world, "b")
    found = "all stages are lost at once"
    assert any(found in str(i.fields) for i in world.all(do.Log))
    assert len(moves(world)) == 1
    assert world.messages(do.Release)
    world = running("a", "b", "c", "d")
    leave(world, "a")
    leave(world, "b")
    assert any("no idle worker can take over stage 1" in str(i.fields) for i in world.all(do.Log))


def test_who_fits_fewer_of_the_lost_stages_is_not_taken_for_one_that_others_fit() -> None:
    """d fits both stages and would be the first choice for either; e has the memory for stage 0 alone."""

    def tight(plan: Plan, asked: do.MakePlan) -> Plan:
        made = predicted(plan, asked)
        assert made.prediction is not None
        small, large, rest = made.prediction.stages
        stages = (replace(small, memory_bytes=2**20), replace(large, memory_bytes=2**22), rest)
        return replace(made, prediction=replace(made.prediction, stages=stages))

    world = Scripted(altered=tight, stages=3, fewest=3)
    honest = world.introduced
    world.introduced = lambda name, incarnation: replace(  # type: ignore[method-assign]
        honest(name, incarnation), memory_limit_bytes=2**21 if name == "e" else 2**30
    )
    world.join("a", "b", "c", "d", "e")
    world.submit(what=spec(3))
    world.load()
    state, roster = world.state(), world.scheduler.roster
    record = world.scheduler.ledger.jobs[JOB]
    chosen = choose(state, record, roster, {0, 1})
    assert isinstance(chosen, PlanChange)
    assert chosen.workers == ("e", "d", "c")
    roster.quarantine("e", "for the test")
    refused = choose(state, record, roster, {0, 1})
    assert (refused.plan, refused.for_now) == (None, True)
    assert refused.reason == "too few idle workers can take over stages 0 and 1"


def test_a_log_that_is_too_short_makes_the_next_commit_store() -> None:
    world = running("a", "b", "c", "d", steps=3)
    beat = ev.Heartbeat(world.clock.now_s, JOB, 1, 3, 0, 0, logged_from=2)
    world.says("b", beat)
    world.handle(ev.Tick())
    assert not logs_short(world.state(), world.scheduler.roster), "it is owed already"
    leave(world, "a")
    assert any("stage 1 has its messages from step 2 on only" in str(i.fields) for i in world.all(do.Log))
    world = running("a", "b", "c", "d", steps=3)
    world.says("b", beat)
    world.handle(ev.Tick())
    step(world)
    assert [m.store for m in world.to("a", do.StepCommit)] == [True]
    step(world)
    assert [m.store for m in world.to("a", do.StepCommit)] == [True, False]


def test_who_logs_nothing_has_nobody_store_more_often() -> None:
    world = running("a", "b", "c", "d", steps=3)
    world.says("b", ev.Heartbeat(world.clock.now_s, JOB, 1, 3, 0, 0, logged_from=2**63 - 1))
    world.handle(ev.Tick())
    assert not world.state().storing.owed
    step(world)
    assert [m.store for m in world.to("a", do.StepCommit)] == [False]


def test_a_stage_that_broke_by_itself_goes_to_another_worker_or_once_more_to_its_own() -> None:
    for workers, holder in ((("a", "b", "c"), "c"), (("a", "b"), "b")):
        world = running(*workers, stages=2)
        world.says("b", ev.StageFailed(JOB, 1, 2, "its process was killed"))
        assert world.holders() == ["a", holder]
        (assign,) = world.to(holder, do.Assign)
        assert assign.replay.first_step == 0
        world.load()
        step(world)
        assert [fact.step for fact in commits(world)] == [0, 1, 2]


def test_a_stage_that_breaks_again_and_again_goes_back_to_the_checkpoint_and_then_fails() -> None:
    world = running("a", "b", stages=2)
    seen = []
    for _ in range(12):
        state = world.state()
        if state.phase is Phase.FAILED:
            break
        world.says("b", ev.StageFailed(JOB, state.version, state.step, "out of memory"))
        seen.append(world.state().phase)
        world.wait(0.5)
        world.load()
    assert len(moves(world)) == 2
    assert world.state().phase is Phase.FAILED
    assert "gave up" in world.state().reason


def test_a_step_that_fails_on_every_worker_ends_the_job_although_steps_before_it_are_repeated() -> None:
    """Commits of steps that are done again are no sign that the one that fails has been overcome."""
    world = running("a", "b", "c", stages=2)
    back = 0
    for _ in range(20):
        if world.state().phase is Phase.FAILED:
            break
        back += world.state().step < 2
        while world.state().step < 2:
            step(world)
        worker = world.holders()[1]
        world.says(worker, ev.StageFailed(JOB, world.state().version, 2, "input 'y' holds the index 9"))
        world.wait(0.5)
        world.load()
    assert back, "the job went back to its checkpoint in between"
    assert world.state().phase is Phase.FAILED
    assert "input 'y' holds the index 9" in world.state().reason
    assert "gave up after 4 such failures at step 2, on whatever worker" in world.state().reason


def test_failures_at_other_steps_do_not_add_up() -> None:
    world = running("a", "b", "c", stages=2)
    for at in range(2, 14, 2):
        world.says(
            world.holders()[1], ev.StageFailed(JOB, world.state().version, at, "its process was killed")
        )
        world.load()
        step(world)
        step(world)
    assert world.state().step == 14


def test_a_repeat_that_cannot_be_is_another_workers_turn_first() -> None:
    world = running("a", "b", "c", "d", stages=2)
    leave(world, "b")
    world.says("c", ev.StageFailed(JOB, 2, 2, "a message has left the send log"))
    assert world.holders() == ["a", "d"]


def test_an_evaluation_that_was_dropped_is_asked_for_with_the_next_commit() -> None:
    job = spec(2, eval_every=2, eval_batches=1)
    world = Scripted(stages=2, fewest=2)
    world.join("a", "b", "c")
    world.submit(what=replace(job, eval_data=job.data, eval_dag_hash=HASH))
    world.load()
    step(world)
    step(world)
    assert world.state().phase is Phase.EVALUATING
    leave(world, "b")
    world.load()
    assert world.state().phase is Phase.TRAINING
    step(world)
    assert [m.evaluate for m in world.to("c", do.StepCommit)] == [True]


def test_a_result_that_is_stored_meanwhile_ends_the_job_without_the_newcomer() -> None:
    """The part of who is lost was stored, the others' come while somebody loads: nobody is waited for."""
    world = running("a", "b", "c", "d", stages=2, steps=19)
    step(world)
    store(world, 20, "b")
    leave(world, "b")
    assert world.state().phase is Phase.LOADING
    assert world.holders() == ["a", "c"]
    store(world, 20, "a")
    assert world.state().phase is Phase.FINISHED
    assert "20 steps done" in world.state().reason
    assert world.to("c", do.Release)
    assert [fact.step for fact in commits(world)] == list(range(20))


def predicted(plan: Plan, asked: do.MakePlan, need: int = 100) -> Plan:
    workers = [stage.worker for stage in plan.stages]
    stages = tuple(StagePrediction(worker, 1.0, 1.0, need, 1000) for worker in workers)
    links = tuple(LinkPrediction(a, b, 10**6, 0.1) for a in workers for b in workers if a != b)
    return replace(plan, prediction=Prediction(1.0, 1.0, "", "", stages, links))


@pytest.mark.parametrize(("memory", "chosen"), [(2**30, "c"), (2**21, "d")])
def test_memory_has_to_suffice(memory: int, chosen: str) -> None:
    world = Scripted(altered=lambda plan, asked: predicted(plan, asked, 2**22))
    honest = world.introduced
    world.introduced = lambda name, incarnation: replace(  # type: ignore[method-assign]
        honest(name, incarnation), memory_limit_bytes=memory if name == "c" else 2**30
    )
    world.join("a", "b", "c", "d")
    world.submit(what=spec(2))
    world.load()
    leave(world, "b")
    assert world.holders() == ["a", chosen]
    prediction = world.state().plan.prediction  # type: ignore[union-attr]
    assert prediction is not None
    assert [stage.worker for stage in prediction.stages] == ["a", chosen]


def test_the_fastest_of_the_same_class_that_reaches_its_neighbours_takes_over() -> None:
    world = Scripted(altered=predicted)
    honest = world.introduced

    def introduced(name: str, incarnation: int) -> ev.Introduction:
        found = honest(name, incarnation)
        return replace(found, model="another", kind="cuda") if name == "c" else found

    world.introduced = introduced  # type: ignore[method-assign]
    world.join("a", "b", "c", "d", "e")
    world.submit(what=spec(2))
    world.load()
    table = world.scheduler.roster.links.table
    table.believe(("a", "d"), 1e6)
    leave(world, "b")
    assert world.holders() == ["a", "e"], "c has other bits, d a slow link"


def test_more_steps_than_are_remembered_are_not_repeated() -> None:
    world = running("a", "b", "c", stages=2, steps=1)
    record = world.scheduler.ledger.jobs[JOB]
    assert record.scales == [commits(world)[0].scale]
    for at in range(1, 2 * MOST_REPLAYED + 5):
        world.scheduler.ledger.apply(StepCommitted(JOB, 1, at, 1.0, 0.0, 1.0))
    assert MOST_REPLAYED <= len(record.scales) < 2 * MOST_REPLAYED
    world.scheduler.ledger.apply(StepCommitted(JOB, 1, 2 * MOST_REPLAYED + 5, 1.0, 0.0, None))
    assert record.scales == [], "of an older journal"


# ---------------------------------------------------------------- restarts of the coordinator


def reconfiguring(*loaded: str) -> Scripted:
    """b's place goes to d; so many had loaded when the coordinator was killed."""
    world = running("a", "b", "c", "d", "e")
    leave(world, "b")
    for worker in loaded:
        world.says(worker, ev.Loaded(JOB, 2))
    world.restart()
    world.done.clear()
    assert (world.state().phase, world.state().version, world.state().step) == (Phase.LOADING, 2, 2)
    return world


def test_who_had_not_heard_of_a_reconfiguration_hears_it_after_a_restart() -> None:
    world = reconfiguring()
    back(world, "a", Held(JOB, 1, 2))
    back(world, "c", Held(JOB, 1, 1, ready=True))
    assert world.messages(do.Reconfigure) == []
    back(world, "d", None)
    (assign,) = world.to("d", do.Assign)
    assert (assign.plan.version, assign.replay.first_step, len(assign.replay.scales)) == (2, 0, 2)
    for worker in "ac":
        assert [type(m) for m in world.to(worker, do.StepCommit | do.Reconfigure)] == [
            do.StepCommit,
            do.Reconfigure,
        ]
    world.load()
    assert [(m.version, m.step) for m in world.to("a", do.StepStart)] == [(2, 2)]


def test_who_had_heard_of_it_counts_as_loaded() -> None:
    world = reconfiguring("a", "c", "d")
    for worker in "acd":
        back(world, worker, Held(JOB, 2, 2))
    assert world.state().phase is Phase.TRAINING
    assert world.messages(do.Assign | do.Reconfigure) == []  # type: ignore[arg-type]


def test_a_newcomer_that_comes_back_empty_where_others_were_connected_with_it_is_replaced() -> None:
    world = reconfiguring("a")
    back(world, "d", None)
    back(world, "a", Held(JOB, 2, 2))
    back(world, "e", None)
    back(world, "c", Held(JOB, 1, 2))
    assert world.state().version == 3
    assert world.holders()[0] == "a"
    assert world.holders()[1] in "de"
    assert [m.base for m in world.to("c", do.Reconfigure)] == [1]


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (Held(JOB, 1, 1), "after 1 steps, 2 are committed"),
        (Held(JOB, 3, 2), "of plan 3"),
        (Held(JOB, 0, 2), "of plan 0"),
        (None, "without its stage"),
    ],
)
def test_who_stays_has_to_hold_the_committed_state(held: Held | None, why: str) -> None:
    world = reconfiguring()
    back(world, "d", Held(JOB, 2, 2, loaded=False))
    back(world, "e", None)
    back(world, "a", Held(JOB, 1, 2))
    back(world, "c", held)
    assert any(why in str(i.fields.get("reason")) for i in world.all(do.Log))


def test_after_a_commit_under_the_new_version_the_old_one_is_too_old() -> None:
    world = running("a", "b", "c", "d", "e")
    leave(world, "b")
    world.load()
    step(world)
    world.restart()
    world.done.clear()
    assert world.state().phase is Phase.TRAINING
    back(world, "a", Held(JOB, 1, 3))
    back(world, "c", Held(JOB, 2, 3))
    back(world, "d", Held(JOB, 2, 2, ready=True))
    assert any("of plan 1, awaited is that of plan 2" in str(i.fields) for i in world.all(do.Log))
    assert world.state().version == 3
    assert [m.base for m in world.to("d", do.Reconfigure)] == [2]


def test_a_place_of_a_worker_that_is_lost_with_the_coordinator_goes_to_one_that_comes_later() -> None:
    world = running("a", "b", "c", "d")
    world.restart()
    world.done.clear()
    back(world, "a", Held(JOB, 1, 2))
    back(world, "c", Held(JOB, 1, 2))
    world.wait(14.0)
    assert world.state().phase is Phase.TRAINING
    world.wait(2.0)
    assert world.state().phase is Phase.PAUSED
    world = running("a", "b", "c", "d")
    world.restart()
    for worker in "acd":
        back(world, worker, None if worker == "d" else Held(JOB, 1, 2))
    world.wait(3.0)
    assert world.state().version == 1
    world.wait(1.5)
    assert (world.state().version, world.holders()) == (2, ["a", "d", "c"])
