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
from coordinator.pipeline import joining, replanning, standbys
from coordinator.pipeline.joining import JUDGED_WITHIN_S
from coordinator.pipeline.reconfigure import sources
from coordinator.pipeline.standby import Chosen, repeated_bytes, standby_words
from coordinator.services.blob_rights import StageRole, role_of
from coordinator.services.views import job_update
from tests.coordinator.pipeline.test_reconfigure import JOB, commits, leave, moves, spec, step, store
from tests.coordinator.pipeline.test_relink import COARSE, pipeline
from tests.coordinator.pipeline.test_restart import back
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
        world.says(standby.worker, ev.Loaded(JOB, state.assigned))
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
    assert (role.rank, role.state.source) == (rank, world.state().checkpoint), "it may load its tensors"
    assert (assign.replay.standby, assign.replay.first_step, len(assign.replay.scales)) == (True, 0, 4)
    told = {worker: [p.worker for p in m.peers] for worker, m in world.messages(do.StandbysHere)}
    assert told == {peer.worker: ["d"] for peer in assign.peers}
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
    assert list(world.state().stores) == [4]
    leave(world, world.holders()[rank])
    assert world.state().stores == {}
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
        assert first == ["d"]
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


# ---------------------------------------------------------------- joining while a job runs


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
    passes(world, JUDGED_WITHIN_S - 10.0)
    assert world.all(do.JudgeSwaps) == []
    passes(world, 10.0)
    tried = {worker for judged in world.all(do.JudgeSwaps) for _, worker in judged.swaps}
    assert tried == {"j", "k"}


def test_of_more_pairs_than_one_look_may_try_those_of_who_was_not_judged_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "MOST_SWAPS", 2)
    world = training(1.0)
    world.done.clear()
    world.join("k", "l")
    passes(world, 2 * joining.LOOK_S)
    tried = {worker for judged in world.all(do.JudgeSwaps) for _, worker in judged.swaps}
    assert tried >= {"k", "l"}


@pytest.mark.parametrize(("share", "steps"), [(0.97, 200), (0.5, 12), (1.2, 200)])
def test_who_gains_too_little_or_too_late_stays_in_the_pool(share: float, steps: int) -> None:
    world = training(share, steps)
    assert world.all(do.JudgeSwaps)
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
    assert world.all(do.JudgeSwaps) == []


def test_who_stands_by_already_is_the_one_that_replaces() -> None:
    world = training(1.0)
    pipeline(world).jobs[JOB] = replace(world.state(), load_s={0: 30.0, 1: 60.0})
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
            case do.JudgeSwaps():
                found.append(do.JudgeSwaps)
            case do.SendTo(to, do.ProbeOps() | do.Assign() as message) if to == worker:
                found.append(type(message))
    return list(dict.fromkeys(found))


def test_who_joins_is_judged_with_ops_that_it_has_timed_before_it_stands_by_for_a_loss() -> None:
    """Who stands by times nothing: it would be taken for a machine of unknown speed ever after."""
    world = standing("a", "b", "c", standbys=3)
    world.done.clear()
    world.join("j")
    passes(world, 8.0)
    assert asked(world, "j") == [do.ProbeOps, do.JudgeSwaps, do.Assign]


def test_who_times_no_ops_stands_by_all_the_same() -> None:
    world = standing("a", "b", "c", standbys=3)
    silent(world, "j")
    world.join("j")
    passes(world, JUDGED_WITHIN_S - 1.0)
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
    assert asked(world, "j") == [do.ProbeOps, do.JudgeSwaps, do.Assign]


def test_a_job_that_cannot_be_read_while_it_trains_trains_on() -> None:
    world = standing("a", "b", "c", standbys=3)
    world.handle(ev.JobUnreadable(JOB, "its graph is torn", hopeless=True))
    step(world)
    assert world.state().phase is Phase.TRAINING
    assert world.state().step == 5


def test_a_wish_for_another_plan_ends_where_the_plan_that_it_was_compared_with_does() -> None:
    world = standing("a", "b", "c", "d")
    has_repeated(world, 4)
    wishes = pipeline(world).beside.replanning
    wishes._wishes[JOB] = replanning._Wish("a larger fleet", frozenset(), world.state().assigned)
    assert wishes.due(world.state()) == "a larger fleet"
    leave(world, world.holders()[only(world).rank])
    world.load()
    assert (wishes.due(world.state()), wishes._wishes) == ("", {})
