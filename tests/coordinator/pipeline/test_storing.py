"""Parts of checkpoints that are late, or cannot be stored: nobody pays for another's."""

from __future__ import annotations

import pytest

from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.events import Held
from coordinator.messages.jobs import LogsShort, Phase, Price
from coordinator.pipeline.changes.newcomers import _Wish
from coordinator.pipeline.driver import PipelineDriver
from tests.coordinator.pipeline.changes.test_reconfigure import JOB, leave, moves, spec, step, store
from tests.coordinator.pipeline.test_restart import back
from tests.sim.scripted import Scripted

FULL = "cannot write /scratch: No space left on device; free some space"


def pipeline(world: Scripted) -> PipelineDriver:
    return next(driver for driver in world.scheduler.drivers if isinstance(driver, PipelineDriver))


def training(*workers: str, steps: int = 3000, **changes: object) -> Scripted:
    """Three stages, on a, b and c."""
    world = Scripted(stages=3, fewest=3)
    world.join(*workers)
    world.submit(what=spec(3, steps=steps, **changes))
    world.load()
    return world


def cannot_store(world: Scripted, worker: str, done: int) -> None:
    version = next(v for v, first in reversed(world.state().run.lineage) if first < done)
    world.says(worker, ev.StateStored(JOB, version, done - 1, {}, FULL))


def quarantined(world: Scripted) -> set[str]:
    return {name for name, known in world.scheduler.roster.workers.items() if known.quarantined}


def test_a_hang_is_noticed_while_what_was_stored_before_is_uploaded() -> None:
    world = training("a", "b", "c", "d", checkpoint_every=3)
    for _ in range(8):
        step(world)
    world.ready("a")
    world.ready("c")
    began_s = world.clock.now_s
    while not quarantined(world):
        world.handle(ev.Uploading("b"))
        world.wait(0.25)
        assert world.clock.now_s < began_s + 6.0
    assert quarantined(world) == {"b"}


def test_who_takes_over_a_late_part_has_its_own_time_for_it() -> None:
    world = training("a", "b", "c", "d", "e", checkpoint_every=3)
    for _ in range(3):
        step(world)
    store(world, 3, "a", "c")
    while not quarantined(world):
        world.wait(5.0)
        step(world)
    assert (quarantined(world), world.holders()) == ({"b"}, ["a", "d", "c"])
    (assign,) = world.to("d", do.Assign)
    assert assign.replay.stores == (3,)
    world.wait(60.0)  # it loads
    world.load()
    for _ in range(10):
        world.wait(5.0)
        step(world)
    store(world, 3, "d")
    assert (world.holders(), world.state().checkpoint.step) == (["a", "d", "c"], 3)


def test_a_part_that_a_seat_waits_for_has_its_time_too() -> None:
    world = training("a", "b", "c", "d")
    for _ in range(5):
        step(world)
    world.handle(ev.Tick())
    price = Price(1.0, usual_s=1.0, saved_s=0.5, left=100)
    wish = _Wish(price, "better", frozenset("abcd"), world.state().run.assigned)
    pipeline(world).beside.newcomers._looks[JOB].wish = wish
    world.wait(0.5)
    step(world)
    store(world, 6, "a", "c")
    step(world)  # all are ready, and wait for b's part
    assert world.state().run.seating
    for _ in range(80):
        if not quarantined(world):
            world.wait(5.0)
    assert quarantined(world) == {"b"}


def test_training_goes_on_without_a_checkpoint_that_one_worker_cannot_store() -> None:
    world = training("a", "b", "c", checkpoint_every=3)
    for _ in range(3):
        step(world)
    cannot_store(world, "b", 3)
    assert (world.state().phase, world.state().storing.parts) == (Phase.TRAINING, {})
    assert FULL in world.state().reason
    for _ in range(3):
        step(world)
    assert (world.state().step, list(world.state().storing.parts)) == (6, [6])
    store(world, 6)
    assert (world.state().checkpoint.step, world.state().storing.unstored) == (6, {})


def test_another_takes_over_from_who_cannot_store_twice() -> None:
    world = training("a", "b", "c", "d", checkpoint_every=3)
    for done in (3, 6):
        for _ in range(3):
            step(world)
        cannot_store(world, "b", done)
    assert (world.holders(), world.state().step) == (["a", "d", "c"], 6)
    (assign,) = world.to("d", do.Assign)
    assert assign.replay.stores == (6,)


def test_where_nobody_can_take_over_the_next_plan_leaves_it_out_once_and_then_training_goes_on() -> None:
    world = training("a", "b", "c", checkpoint_every=3)
    for done in (3, 6):
        for _ in range(3):
            step(world)
        cannot_store(world, "b", done)
    assert (world.state().version, world.state().step) == (2, 0)  # planned anew, from the checkpoint
    world.load()
    for _ in range(3):
        step(world)
    cannot_store(world, "b", 3)
    assert (world.state().phase, world.state().step) == (Phase.TRAINING, 3)


def test_a_store_that_refuses_everybody_is_nobodys_fault() -> None:
    world = training("a", "b", "c", "d", checkpoint_every=3)
    for done in (3, 6, 9):
        for _ in range(3):
            step(world)
        for worker in "ab":
            cannot_store(world, worker, done)
            cannot_store(world, worker, done)  # said twice is heard once
    assert (world.holders(), world.state().step) == (["a", "b", "c"], 9)


def test_a_word_about_a_checkpoint_that_nobody_asked_for_counts_for_nothing() -> None:
    world = training("a", "b", "c", "d")
    for _ in range(3):
        step(world)
    for _ in range(5):
        cannot_store(world, "b", 3)
    assert (world.holders(), world.state().step, world.state().phase) == (["a", "b", "c"], 3, Phase.TRAINING)


def test_the_result_is_stored_by_another_or_the_job_fails_with_the_reason_after_a_few_times() -> None:
    world = training("a", "b", "c", "d", steps=3)
    for _ in range(3):
        step(world)
    cannot_store(world, "b", 3)
    assert (world.holders(), world.state().step) == (["a", "d", "c"], 3)
    world = training("a", "b", "c", steps=3)
    for _ in range(4):
        assert world.state().phase is not Phase.FAILED
        if world.state().phase is Phase.LOADING:
            world.load()
        for _ in range(3):
            step(world)
        cannot_store(world, "b", 3)
    assert (world.state().phase, FULL in world.state().reason) == (Phase.FAILED, True)


def test_a_checkpoint_is_asked_for_once_the_one_before_is_whole() -> None:
    world = training("a", "b", "c", checkpoint_every=2)
    for _ in range(9):
        step(world)
        assert len(world.state().storing.parts) <= 1
    assert list(world.state().storing.parts) == [2]
    store(world, 2)
    step(world)
    assert list(world.state().storing.parts) == [10]


def test_losses_before_do_not_count_against_a_stage_that_breaks_once() -> None:
    world = training(*"abcdefgh")
    for _ in range(5):
        step(world)
    for worker in "abd":
        leave(world, worker)
    holder, state = world.holders()[0], world.state()
    world.says(holder, ev.StageFailed(JOB, state.version, state.step, "out of memory", ""))
    assert world.state().phase is Phase.LOADING
    assert holder not in world.holders()


@pytest.mark.parametrize("last", [False, True])
def test_after_a_restart_nobody_waits_for_a_part_whose_author_is_gone(last: bool) -> None:
    world = training("a", "b", "c", "d", "e", steps=3 if last else 3000, checkpoint_every=1000)
    for _ in range(2):
        step(world)
    pipeline(world)._step(JOB, LogsShort())
    step(world)
    store(world, 3, "b", "c")
    leave(world, "b")
    world.load()
    if not last:
        step(world)
    assert list(world.state().storing.parts) == [3]
    version, steps = world.state().run.assigned, world.state().step
    world.restart()
    for worker in world.holders():
        back(world, worker, Held(JOB, version, steps))
    if last:  # the result is waited for: who comes to lack it repeats it
        assert list(world.state().storing.parts) == [3]
        return
    assert (world.state().storing.parts, world.state().storing.owed) == ({}, True)
    step(world)
    assert list(world.state().storing.parts) == [world.state().step]


def test_after_a_restart_who_cannot_store_is_replaced_once_all_are_back() -> None:
    world = training("a", "b", "c", "d", steps=3)
    for _ in range(3):
        step(world)
    world.restart()
    back(world, "d", None)
    back(world, "a", Held(JOB, 1, 3))
    cannot_store(world, "a", 3)
    assert moves(world) == []
    for worker in ("b", "c"):
        back(world, worker, Held(JOB, 1, 3))
    assert (world.holders(), world.state().step) == (["d", "b", "c"], 3)
    roster = world.scheduler.roster
    assert roster.is_idle("a")
    assert [record.assigned for record in world.folder.fold().jobs.values()] == [world.state().run.assigned]
    world.load()
    store(world, 3)
    assert world.state().phase is Phase.FINISHED


def test_who_alone_fits_may_try_again_after_a_restart() -> None:
    world = training("a", "b", "c", steps=9)
    for _ in range(3):
        step(world)
    world.join("d")
    leave(world, "b")
    version = world.state().version
    assert (world.holders(), world.state().phase) == (["a", "d", "c"], Phase.LOADING)
    world.restart()
    for worker, held in (("d", Held(JOB, version, 0)), ("a", Held(JOB, 1, 3)), ("c", Held(JOB, 1, 3))):
        back(world, worker, held)
        if worker == "d":
            world.says("d", ev.StageFailed(JOB, version, 3, "could not fetch a blob", ""))
    assert (world.holders(), world.state().step) == (["a", "d", "c"], 3)
    (again,) = world.to("d", do.Assign)
    assert (again.first_step, again.replay.first_step) == (3, 0)
    world.load()
    assert (world.state().phase, world.state().step) == (Phase.TRAINING, 3)
