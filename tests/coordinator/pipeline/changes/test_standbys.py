"""Idle workers stand by for a running job's stages, take them at once, and cost the job nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from coordinator.config import CoordinatorConfig
from coordinator.membership import member
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages import jobs
from coordinator.messages.events import Held
from coordinator.messages.jobs import Phase, Standby
from coordinator.pipeline.changes import standbys
from coordinator.pipeline.changes.standbys import repeated_bytes, standby_words
from coordinator.pipeline.history import sources
from coordinator.services.blobs.rights import StageRole, role_of
from coordinator.services.owners.views import job_update
from tests.coordinator.pipeline.changes.test_reconfigure import JOB, commits, leave, moves, spec, step, store
from tests.coordinator.pipeline.test_restart import back
from tests.coordinator.pipeline.tuning.test_relink import COARSE, pipeline
from tests.sim.scripted import Scripted

if TYPE_CHECKING:
    from coordinator.storage.graph_store import GraphStore

NO_GRAPHS = cast("GraphStore", None)


def standing(
    *workers: str, stages: int = 3, steps: int = 4, standbys: int | None = 1, **changes: Any
) -> Scripted:
    """A job on the first workers after so many steps, and who stands by for it."""
    world = Scripted(stages=stages, fewest=stages)
    world.join(*workers)
    world.submit(what=replace(spec(stages, **changes), standbys=standbys))
    world.load()
    for _ in range(steps):
        step(world)
    passes(world, 1.5)
    return world


def passes(world: Scripted, seconds: float) -> None:
    """Let time pass; whoever is connected says that it is where it was, and ranks that they compute."""
    until_s = world.clock.now_s + seconds
    while world.clock.now_s < until_s:
        world.settle(min(0.25, until_s - world.clock.now_s))
        for worker, stream in world.streams.items():
            known = world.scheduler.roster.workers[worker]
            job, state = known.member.job, world.state()
            standby = state.standby_of(worker)
            step, progress = (standby.step, 0) if standby else (state.step, int(10 * world.clock.now_s))
            at = (job, state.version, step, progress, 0) if job else ("", 0, 0, 0, 0)
            stream.send(1, ev.Heartbeat(world.clock.now_s, *at))
        world.settle()


def only(world: Scripted) -> Standby:
    (found,) = world.state().standbys.values()
    return found


def has_repeated(world: Scripted, steps: int, *, loaded: bool = True) -> None:
    """The standby is loaded, and reports so many steps."""
    standby, state = only(world), world.state()
    if loaded:
        world.says(standby.worker, ev.Loaded(JOB, state.run.assigned))
    world.says(standby.worker, ev.Heartbeat(world.clock.now_s, JOB, state.version, steps, 0, 0))
    world.handle(ev.Tick())


def test_an_idle_worker_repeats_all_steps_and_its_neighbours_let_it_ask() -> None:
    world = standing("a", "b", "c", "d")
    (assign,) = world.to("d", do.Assign)
    rank = only(world).rank
    assert (assign.rank, assign.first_step, assign.plan.version) == (rank, 4, 1)
    assert assign.plan.places[rank].worker == "d"
    role = role_of(world.scheduler, NO_GRAPHS, "d")
    assert isinstance(role, StageRole)
    assert (role.rank, role.state.run.source) == (rank, world.state().checkpoint), "it may load its tensors"
    assert (assign.replay.standby, assign.replay.first_step, len(assign.replay.scales)) == (True, 0, 4)
    told = {worker: [p.link.peer for p in m.peers] for worker, m in world.messages(do.StandbysHere)}
    assert told == {peer.link.peer: ["d"] for peer in assign.peers}
    world.done.clear()
    step(world)
    (commit,) = world.to("d", do.StepCommit)
    assert (commit.step, commit.store, commit.evaluate) == (4, False, False)
    assert world.scheduler.spec_of(JOB, "d") is not None, "it may fetch the job's data"


def stored(world: Scripted, done: int) -> set[str]:
    """Blobs of a checkpoint, each rank's other ones."""
    blobs = {f"{done}{rank}" * 32 for rank in range(3)}
    world.folder.blobs |= blobs
    for rank, worker in enumerate(world.holders()):
        world.says(worker, ev.StateStored(JOB, 1, done - 1, {f"w{rank}": f"{done}{rank}" * 32}))
    return blobs


def test_what_a_standby_loads_stays_while_it_takes_its_place() -> None:
    world = standing("a", "b", "c", standbys=1, checkpoint_every=1)
    loaded = stored(world, 1)  # asked for first; the next once it is whole
    world.join("d", "e")
    passes(world, 3.0)
    (standby,) = world.state().standbys.values()
    for done in (5, 6):
        step(world)
        stored(world, done)
    leave(world, world.holders()[standby.rank])
    state = world.state()
    assert (state.standbys, state.plan and state.plan.places[standby.rank].worker) == ({}, standby.worker)
    assert standby.source in sources(state, standby.rank)
    assert standby.source not in sources(state, (standby.rank + 1) % 3)
    assert loaded <= world.scheduler.blobs_in_flight()
    world.load()
    step(world)
    assert not loaded & world.scheduler.blobs_in_flight()


def test_what_a_standby_loads_stays_until_it_has_loaded() -> None:
    """Newer checkpoints are stored meanwhile, and another standby comes and goes."""
    world = standing("a", "b", "c", standbys=2, checkpoint_every=1)
    loaded = stored(world, 1)  # asked for first; the next once it is whole
    world.join("d", "e")
    passes(world, 3.0)
    first, second = world.state().standbys.values()
    assert {first.worker, second.worker} == {"d", "e"}
    for done in (5, 6):
        step(world)
        stored(world, done)
    world.says(second.worker, ev.StageFailed(JOB, 1, 6, "its disk is full"))
    assert list(world.state().standbys) == [first.rank]
    assert loaded <= world.folder.blobs
    world.says(first.worker, ev.Loaded(JOB, 1))
    assert not loaded & world.folder.blobs


@pytest.mark.parametrize("how", ["leaves", "starts anew", "is kicked", "breaks"])
def test_the_standby_takes_the_place_of_who_is_lost_without_being_given_anything(how: str) -> None:
    world = standing("a", "b", "c", "d", "e")
    has_repeated(world, 4)
    rank, state = only(world).rank, world.state()
    lost = world.holders()[rank]
    others = [worker for worker in world.holders() if worker != lost]
    world.done.clear()
    if how == "leaves":
        leave(world, lost)
        assert world.scheduler.roster.workers[lost].member.phase is member.Phase.LEFT
    elif how == "starts anew":
        world.join(lost, incarnation=2)
    elif how == "is kicked":
        world.handle(ev.KickAsked(lost, "", for_good=False))
    else:
        world.says(lost, ev.StageFailed(JOB, state.version, state.step, "its process was killed"))
    assert world.holders()[rank] == "d"
    assert world.messages(do.Assign) == []
    (moved,) = world.to("d", do.Reconfigure)
    assert (moved.standby, moved.step, moved.plan.version) == (False, 4, 2)
    (fact,) = moves(world)
    assert (fact.newcomers, fact.workers[rank]) == ((), "d")
    assert all(len(world.to(worker, do.Reconfigure)) == 1 for worker in others)
    assert world.state().standbys == {}
    world.load()
    step(world)
    assert [fact.step for fact in commits(world)] == [0, 1, 2, 3, 4]


def test_a_standby_of_one_stage_goes_on_when_another_is_taken_over() -> None:
    world = standing("a", "b", "c", "d", "e")
    standby = only(world)
    spare = next(worker for worker in "de" if worker != standby.worker)
    other = next(rank for rank in range(3) if rank != standby.rank)
    has_repeated(world, 4)
    world.done.clear()
    leave(world, world.holders()[other])
    assert world.holders()[other] == spare, "who is idle goes first"
    (moved,) = world.to(standby.worker, do.Reconfigure)
    assert (moved.standby, moved.step, moved.plan.places[standby.rank].worker) == (True, 4, standby.worker)
    assert moved.plan.places[other].worker == spare
    world.load()
    world.done.clear()
    step(world)
    assert [m.version for m in world.to(standby.worker, do.StepCommit)] == [2]


def test_a_standby_that_is_behind_is_given_up_where_a_neighbour_is_replaced() -> None:
    """What the neighbour sent of the steps that it has not done is gone."""
    world = standing("a", "b", "c", "d", "e")
    has_repeated(world, 3)
    standby = only(world)
    spare = next(worker for worker in "de" if worker != standby.worker)
    world.done.clear()
    leave(world, world.holders()[1 if standby.rank != 1 else 0])
    assert spare in world.holders()
    assert world.to(standby.worker, do.Reconfigure) == []
    (release,) = world.to(standby.worker, do.Release)
    assert release.reason == "its neighbour is replaced"


def test_where_nobody_is_idle_a_standby_takes_another_stage_from_the_checkpoint() -> None:
    world = standing("a", "b", "c", "d")
    other = next(rank for rank in range(3) if rank != only(world).rank)
    world.done.clear()
    leave(world, world.holders()[other])
    (assign,) = world.to("d", do.Assign)
    assert (assign.rank, assign.replay.standby) == (other, False)
    assert world.state().standbys == {}
    assert [m.standby for m in world.to("d", do.Reconfigure)] == []


def test_links_that_are_announced_are_said_to_who_comes_then() -> None:
    world = standing("a", "b", "c", stages=2, steps=2, standbys=1)
    assert world.state().standbys == {}, "three step times are needed"
    driver = pipeline(world)
    driver._step(JOB, jobs.Relinked(COARSE, "slower"))
    step(world)
    passes(world, 1.5)
    (assign,) = world.to("c", do.Assign)
    assert [(era.version, era.first_step) for era in assign.replay.eras] == [(1, 0), (2, 4)]
    assert assign.plan.version == 1


@pytest.mark.parametrize("ends", ["fails", "dies", "stalls"])
def test_a_standby_that_fails_dies_or_lags_costs_the_job_nothing(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = standing("a", "b", "c", "d")
    version = world.state().version
    if ends == "fails":
        world.says("d", ev.StageFailed(JOB, 1, 4, "a message has left the send log"))
    elif ends == "dies":
        world.join("d", incarnation=2)
    else:
        monkeypatch.setattr(standbys, "STALLED_S", 0.5)
        step(world)
        passes(world, 1.0)
    assert world.state().standbys == {}
    assert (world.state().version, world.state().phase) == (version, Phase.TRAINING)
    if ends != "dies":
        assert world.to("d", do.Release)
        assert world.scheduler.roster.is_idle("d")
    world.done.clear()
    passes(world, 1.5)
    assert world.messages(do.Assign) == [], "it rests"
    step(world)


def test_logs_reach_back_to_what_the_slowest_standby_has() -> None:
    world = standing("a", "b", "c", "d", checkpoint_every=4)
    has_repeated(world, 3)
    world.done.clear()
    store(world, 4)
    step(world)
    assert [m.replay_from for m in world.to("a", do.StepCommit)] == [3]
    has_repeated(world, 5, loaded=False)
    step(world)
    assert [m.replay_from for m in world.to("a", do.StepCommit)] == [3, 4]


def test_a_checkpoint_that_would_lack_the_part_of_who_is_lost_is_asked_for_anew() -> None:
    world = standing("a", "b", "c", "d", checkpoint_every=4)
    has_repeated(world, 4)
    rank = only(world).rank
    assert list(world.state().storing.parts) == [4]
    leave(world, world.holders()[rank])
    assert world.state().storing.parts == {}
    assert world.scheduler.ledger.jobs[JOB].storing == ()
    world.load()
    world.done.clear()
    step(world)
    assert [m.store for m in world.to("d", do.StepCommit)] == [True]


def test_after_the_last_step_who_stands_by_has_to_repeat_what_it_is_to_store() -> None:
    world = standing("a", "b", "c", "d", checkpoint_every=100)
    pipeline(world).jobs[JOB] = replace(
        world.state(), spec=replace(spec(3, steps=8, checkpoint_every=100), standbys=1)
    )
    rank = only(world).rank
    for _ in range(4):
        step(world)
    assert world.state().phase is Phase.STORING
    has_repeated(world, 8)
    world.done.clear()
    leave(world, world.holders()[rank])
    (assign,) = world.to("d", do.Assign)
    assert assign.replay.stores == (8,)


def test_where_a_loss_costs_little_nobody_is_asked_unless_the_owner_wants_it() -> None:
    assert standing("a", "b", "c", "d", standbys=None).state().standbys == {}
    assert standing("a", "b", "c", "d", standbys=0).state().standbys == {}
    two = standing("a", "b", "c", "d", "e", "f", standbys=2)
    passes(two, 1.0)
    assert len(two.state().standbys) == 2
    dear = Scripted(stages=2, fewest=2)
    dear.join("a", "b", "c", "d")
    dear.submit(what=replace(spec(2), standbys=None))
    for worker, took_s in zip(dear.holders(), (10.0, 60.0), strict=True):
        dear.says(worker, ev.Loaded(JOB, 1, took_s))
    for _ in range(4):
        passes(dear, 1.0)
        step(dear)
    passes(dear, 2.5)
    assigns = [assign for _, assign in dear.messages(do.Assign) if assign.replay is not None]
    assert [assign.rank for assign in assigns] == [1, 0], "the dearest first"


def test_a_neighbours_uplink_has_to_carry_the_stages_messages_twice() -> None:
    for rate_bps, asked in ((30e6, True), (15e6, False)):
        world = Scripted(stages=2, fewest=2, bandwidth_bps=1e9)
        world.join("a", "b", "c")
        world.submit(what=replace(spec(2), standbys=None))
        for worker in world.holders():
            world.says(worker, ev.Loaded(JOB, 1, 30.0))
        table = world.scheduler.roster.links.table
        for pair in (("a", "b"), ("b", "a"), ("a", "c"), ("b", "c")):
            table.believe(pair, rate_bps)
        for _ in range(4):
            passes(world, 1.0)
            for worker, peer in (("a", "b"), ("b", "a")):
                link = ev.Goodput(peer, 1_000_000, 8e6 / rate_bps, 0.0, 1_000_000)
                world.ready(worker, square_norms=(1.0,), forward_s=0.1, links=(link,))
        passes(world, 1.2)
        assert bool(world.state().standbys) is asked
        assert repeated_bytes(world.state(), 0) == 1_000_000


def test_who_keeps_up_with_the_steps_stands_by_before_who_would_be_faster_in_the_place() -> None:
    for at_most, last in ((None, ""), (2, "c")):
        world = Scripted(stages=2, fewest=2, bandwidth_bps=1e9)
        world.join("a", "b", "c", "d")
        world.submit(what=replace(spec(2), standbys=at_most))
        for worker in world.holders():
            world.says(worker, ev.Loaded(JOB, 1, 30.0))
        table = world.scheduler.roster.links.table
        for peer in ("a", "b"):
            table.believe((peer, "c"), 4e6)  # 2 s for what a step of 1 s sends
            table.believe(("d", peer), 1e5)
        for _ in range(4):
            passes(world, 1.0)
            for worker, peer in (("a", "b"), ("b", "a")):
                link = ev.Goodput(peer, 1_000_000, 0.01, 0.0, 1_000_000)
                world.ready(worker, square_norms=(1.0,), forward_s=0.1, links=(link,))
        passes(world, 1.2)
        first = [standby.worker for standby in world.state().standbys.values()]
        assert first[0] == "d"
        passes(world, 2.5)
        assert [s.worker for s in world.state().standbys.values() if s.worker != "d"] == [last] * bool(last)


def test_another_job_that_waits_for_workers_has_them() -> None:
    config = CoordinatorConfig(state_dir=Path("/nowhere"), concurrent_jobs=2)
    world = Scripted(stages=2, fewest=2, config=config)
    world.join("a", "b", "c", "d")
    world.submit(what=replace(spec(2), standbys=2))
    world.load()
    for _ in range(4):
        step(world)
    passes(world, 2.5)
    assert len(world.state().standbys) == 2
    world.submit("job-2", replace(spec(2), standbys=0))
    passes(world, 1.0)
    assert world.state().standbys == {}
    assert sorted(world.holders("job-2")) == ["c", "d"]


def test_a_session_that_breaks_for_a_moment_keeps_its_standby_and_hears_the_commit_again() -> None:
    world = standing("a", "b", "c", "d")
    has_repeated(world, 4)
    world.lose("d")
    step(world)
    world.done.clear()
    introduced = world.introduced
    world.introduced = lambda name, incarnation: replace(  # type: ignore[method-assign]
        introduced(name, incarnation), held=Held(JOB, 1, 4)
    )
    world.join("d")
    assert [m.step for m in world.to("d", do.StepCommit)] == [4]
    world.lose("d")
    step(world)
    step(world)
    world.join("d")
    assert world.to("d", do.Release), "two commits are missing"
    assert world.state().standbys == {}


def test_after_a_restart_standbys_are_released_and_chosen_anew() -> None:
    world = standing("a", "b", "c", "d")
    world.restart()
    assert world.state().standbys == {}
    back(world, "d", Held(JOB, 1, 4))
    assert world.to("d", do.Release)
    for worker in "abc":
        back(world, worker, Held(JOB, 1, 4))
    assert world.state().phase is Phase.TRAINING
    for _ in range(4):
        step(world)
    passes(world, 1.5)
    assert only(world).worker == "d"


def test_a_standby_that_took_a_stage_holds_it_after_a_restart() -> None:
    world = standing("a", "b", "c", "d")
    has_repeated(world, 4)
    rank = only(world).rank
    lost = world.holders()[rank]
    leave(world, lost)
    world.restart()
    for worker in world.holders():
        back(world, worker, Held(JOB, 1, 4))
    assert [m.plan.version for m in world.to("d", do.Reconfigure)] == [2]
    world.load()
    step(world)
    assert [fact.step for fact in commits(world)] == [0, 1, 2, 3, 4]


def test_status_and_watch_say_what_a_standby_does_and_what_it_costs() -> None:
    world = standing("a", "b", "c", "d")
    has_repeated(world, 4)
    standby = only(world)
    update = job_update(world.scheduler, JOB, 0.0)
    stage = update.stages[standby.rank]
    assert (stage.standby, stage.standby_why) == ("d", standby_words(world.state(), standby))
    assert "0 steps behind; takes 0 MB a step" in stage.standby_why
    assert f"{standby.worker} stands by, 0 steps behind" in stage.replace_why
    assert stage.replace_s <= min(s.replace_s for s in update.stages if s.stage != stage.stage)
