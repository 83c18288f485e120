"""Who joins while a job runs is judged, stands by for the place in which it gains most, and takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.events import Held
from coordinator.messages.jobs import JobState, Phase, Price
from coordinator.pipeline.changes import newcomers, standbys
from coordinator.pipeline.changes.newcomers import TIMED_WITHIN_S
from coordinator.pipeline.changes.standbys import Chosen
from coordinator.services.owners.views import job_update
from tests.coordinator.pipeline.changes.test_reconfigure import JOB, commits, leave, moves, spec, step
from tests.coordinator.pipeline.changes.test_standbys import has_repeated, only, passes, standing
from tests.coordinator.pipeline.test_restart import back
from tests.coordinator.pipeline.tuning.test_relink import pipeline
from tests.sim.scripted import Scripted


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have newcomers judged after five seconds."""
    monkeypatch.setattr(newcomers, "SETTLED_S", 5.0)


def training(share: float, steps: int = 200, **changes: Any) -> Scripted:
    """A step takes a second; with who joins in rank 1 it is predicted to take so much of it."""
    world = Scripted(stages=2, fewest=2)
    world.step_s = lambda workers: share if workers[1] == "j" else 1.0 + 0.1 * ("j" in workers)
    world.join("a", "b")
    world.submit(what=replace(spec(2, steps=steps, **changes), standbys=None))
    for worker in world.holders():
        world.says(worker, ev.Loaded(JOB, 1, 4.0))
    for _ in range(4):
        seconds(world, 1)
    world.done.clear()
    world.join("j")
    passes(world, 5.5)
    return world


def seconds(world: Scripted, count: int) -> None:
    for _ in range(count):
        passes(world, 1.0)
        step(world)


def test_who_joins_takes_the_place_in_which_it_gains_most_once_it_has_caught_up() -> None:
    world = training(0.5)
    standby = only(world)
    assert (standby.worker, standby.rank) == ("j", 1)
    assert "a step of 0.5 s, not 1 s, saves 98 s in 196 steps" in standby.swap
    assert standby.swap in job_update(world.scheduler, JOB, 0.0).stages[1].standby_why
    seconds(world, 1)
    assert moves(world) == [], "it has not caught up"
    has_repeated(world, 5)
    world.done.clear()
    seconds(world, 1)
    (fact,) = moves(world)
    assert (fact.step, fact.workers, fact.newcomers) == (6, ("a", "j"), ())
    said = [type(m) for m in world.to("j", do.StepCommit | do.Reconfigure)]
    assert (said[0], said[-1]) == (do.StepCommit, do.Reconfigure)
    assert world.to("b", do.Release)
    assert world.scheduler.roster.is_idle("b")
    assert world.state().failures == 0
    world.load()
    step(world)
    assert [fact.step for fact in commits(world)] == list(range(7)), "no step twice, none left out"


@pytest.fixture
def far_behind(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Who joined is to take a place, and has so much to repeat that it does that beside training."""
    monkeypatch.setattr(standbys, "repeated_s", lambda *_: 1.0)
    world = training(0.5)
    seconds(world, 16)
    assert world.state().step - world.state().checkpoint.step > standbys.CLOSE_S
    return world


@pytest.mark.parametrize("gains", [0, 1, 2])
def test_who_comes_no_nearer_beside_training_takes_the_place_and_training_waits(
    far_behind: Scripted, gains: int
) -> None:
    """On long lines that training keeps busy it repeats a step more slowly than training makes one."""
    world = far_behind
    done = world.state().checkpoint.step
    for _ in range(15):
        if moves(world):
            break
        done += gains
        has_repeated(world, done, loaded=False)
        seconds(world, 1)
    if gains == 0:
        assert moves(world) == [], "its state is on the way"
        return
    (fact,) = moves(world)
    assert (fact.workers, fact.newcomers) == (("a", "j"), ())
    assert (fact.step - done > standbys.CLOSE_S + 1) == (gains == 1), "who comes nearer is waited for"
    world.load()
    step(world)
    assert [fact.step for fact in commits(world)] == list(range(world.state().step))


def test_who_stands_still_beside_training_is_given_no_place(far_behind: Scripted) -> None:
    world = far_behind
    has_repeated(world, 1, loaded=False)
    passes(world, standbys.MOVES_S)
    seconds(world, 8)
    assert moves(world) == [], "it may be frozen"


def test_where_too_few_steps_are_left_when_it_is_ready_nobody_takes_a_place(far_behind: Scripted) -> None:
    """Its state took long to arrive: what is to be repeated now takes longer than the rest would save."""
    world = far_behind
    state = world.state()
    pipeline(world).jobs[JOB] = replace(state, spec=replace(spec(2, steps=state.step + 40), standbys=None))
    for done in range(1, 8):
        if world.state().standbys:
            has_repeated(world, done, loaded=False)
        seconds(world, 1)
    assert moves(world) == []
    assert any("too few steps" in release.reason for release in world.to("j", do.Release))


def test_what_a_worker_said_of_another_rank_is_not_taken_for_what_it_has_repeated() -> None:
    """Its newest heartbeat is of the rank that it stood by for until then."""
    world = training(0.5)
    standby, state = only(world), world.state()
    pipeline(world).beside.standbys.drop(state, standby, "makes way", rest_s=0.0)
    world.says("j", ev.Heartbeat(world.clock.now_s, JOB, state.version, state.step, 7, 0))
    chosen = Chosen("j", 0, "")
    pipeline(world).beside.standbys.begin(world.state(), chosen, "instead of a", saved_s=0.5)
    world.handle(ev.Tick())
    assert only(world).step == state.checkpoint.step
    seconds(world, 2)
    assert moves(world) == [], "it holds no state"
    has_repeated(world, 0, loaded=False)
    has_repeated(world, 2, loaded=False)
    assert only(world).step == 2


def test_who_gains_on_training_is_not_given_up_for_how_far_behind_it_is(
    far_behind: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = far_behind
    monkeypatch.setattr(standbys, "MOST_BEHIND", 4)
    has_repeated(world, 2)
    seconds(world, 1)
    has_repeated(world, 4, loaded=False)
    assert only(world).worker == "j"


def silent(world: Scripted, name: str) -> None:
    """Have a worker never answer what ops take."""
    answered = world._heard
    world._heard = lambda worker, message: (  # type: ignore[method-assign]
        None if isinstance(message, do.ProbeOps) and worker == name else answered(worker, message)
    )


def test_who_joins_while_another_is_about_to_take_a_place_is_timed_meanwhile() -> None:
    world = training(0.5)
    assert only(world).swap
    world.done.clear()
    world.join("k")
    passes(world, 1.0)
    assert any(probe.signatures for probe in world.to("k", do.ProbeOps))
    assert world.to("k", do.Assign) == []


def test_who_times_no_ops_does_not_keep_others_from_being_judged() -> None:
    world = training(1.0)
    silent(world, "mute")
    world.join("mute")
    passes(world, 6.0)
    world.done.clear()
    world.join("k")
    passes(world, TIMED_WITHIN_S - 10.0)
    assert world.all(do.JudgeFleet) == []
    passes(world, 10.0)
    tried = {worker for judged in world.all(do.JudgeFleet) for _, worker in judged.swaps}
    assert tried == {"j", "k"}


def test_of_more_pairs_than_one_look_may_try_those_of_who_was_not_judged_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(newcomers, "MOST_SWAPS", 2)
    world = training(1.0)
    world.done.clear()
    world.join("k", "l")
    passes(world, 2 * newcomers.LOOK_S)
    tried = {worker for judged in world.all(do.JudgeFleet) for _, worker in judged.swaps}
    assert tried >= {"k", "l"}


@pytest.mark.parametrize(("share", "steps"), [(0.97, 200), (0.5, 12), (1.2, 200)])
def test_who_gains_too_little_or_too_late_stays_in_the_pool(share: float, steps: int) -> None:
    world = training(share, steps)
    assert world.all(do.JudgeFleet)
    assert not any(standby.swap for standby in world.state().standbys.values())


def test_a_job_that_wants_no_standbys_is_not_looked_at() -> None:
    world = Scripted(stages=2, fewest=2)
    world.join("a", "b")
    world.submit(what=replace(spec(2), standbys=0))
    world.load()
    for _ in range(4):
        seconds(world, 1)
    world.join("j")
    passes(world, 70.0)
    assert world.all(do.JudgeFleet) == []


def slow_to_load(state: JobState) -> JobState:
    return replace(state, run=replace(state.run, load_s={0: 30.0, 1: 60.0}))


def test_who_stands_by_already_is_the_one_that_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomers, "LOOK_S", 6.0)
    world = training(1.0)
    pipeline(world).jobs[JOB] = slow_to_load(world.state())
    seconds(world, 2)
    passes(world, 1.5)
    assert (only(world).rank, only(world).swap) == (1, "")
    world.step_s = lambda workers: 0.5 if workers[1] == "j" else 1.0
    has_repeated(world, 6)
    passes(world, 6.0)
    assert only(world).swap
    assert len(world.to("j", do.Assign)) == 1


def asked(world: Scripted, worker: str) -> list[type]:
    """Kinds of what a newcomer is asked for, and of what is asked about it, in order, each once."""
    found: list[type] = []
    for instruction in world.done:
        match instruction:
            case do.JudgeFleet():
                found.append(do.JudgeFleet)
            case do.SendTo(to, do.ProbeOps() | do.Assign() as message) if to == worker:
                found.append(type(message))
    return list(dict.fromkeys(found))


def test_who_joins_times_ops_before_it_stands_by_for_a_loss_and_is_judged_all_the_same() -> None:
    """Who stands by times nothing: it would be taken for a machine of unknown speed ever after."""
    world = standing("a", "b", "c", standbys=3)
    world.done.clear()
    world.join("j")
    passes(world, 8.0)
    assert asked(world, "j") == [do.ProbeOps, do.Assign, do.JudgeFleet]


def test_who_times_no_ops_stands_by_all_the_same() -> None:
    world = standing("a", "b", "c", standbys=3)
    silent(world, "j")
    world.join("j")
    passes(world, TIMED_WITHIN_S - 1.0)
    assert world.state().standbys == {}
    passes(world, 2.0)
    assert only(world).worker == "j"


def test_after_a_restart_the_job_is_read_again_to_judge_who_joins() -> None:
    world = standing("a", "b", "c", standbys=3)
    world.restart()
    for worker in "abc":
        back(world, worker, Held(JOB, 1, 4))
    for _ in range(4):
        step(world)
    back(world, "j", None)
    passes(world, 8.0)
    assert len(world.all(do.ReadJob)) == 1
    assert asked(world, "j") == [do.ProbeOps, do.Assign, do.JudgeFleet]


def test_a_job_that_cannot_be_read_while_it_trains_trains_on() -> None:
    world = standing("a", "b", "c", standbys=3)
    world.handle(ev.JobUnreadable(JOB, "its graph is torn", hopeless=True))
    step(world)
    assert world.state().phase is Phase.TRAINING
    assert world.state().step == 5


def test_a_wish_for_another_plan_ends_where_the_plan_that_it_was_compared_with_does() -> None:
    world = standing("a", "b", "c", "d")
    has_repeated(world, 4)
    wishes = pipeline(world).beside.newcomers
    price = Price(1.0, usual_s=1.0, saved_s=0.5, left=100)
    wish = newcomers._Wish(price, "a larger fleet", frozenset(), world.state().run.assigned)
    wishes._looks[JOB].wish = wish
    assert [change.reason for change in wishes.candidates(world.state())] == ["a larger fleet"]
    leave(world, world.holders()[only(world).rank])
    world.load()
    assert list(wishes.candidates(world.state())) == []
    assert wishes._looks[JOB].wish is None
