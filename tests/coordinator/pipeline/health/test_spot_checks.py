"""Who repeats steps beside a plan: chosen, let go, compared; who takes over a rank is compared as well."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from atoll.device_class import DeviceClass
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import SpotChecked, StepCommitted, WorkRejected
from coordinator.messages.jobs import BESIDE, Phase
from coordinator.services.blobs.rights import StageRole, role_of
from tests.coordinator.pipeline.changes.test_reconfigure import JOB, leave, spec, store
from tests.sim.scripted import Scripted

if TYPE_CHECKING:
    from coordinator.storage.graph_store import GraphStore

STAGES = 3
NO_GRAPHS = cast("GraphStore", None)


def digest(rank: int, step: int, wrong: int = 0, taken: int = 0) -> ev.Digest:
    return ev.Digest(f"{wrong:08x}{rank:04x}{step:04x}", f"{taken:016x}")


def running(*workers: str, steps: int = 2, share: float = 1.0, **changes: Any) -> Scripted:
    """Return a job of three stages on the first workers after so many steps, the others in the pool."""
    world = Scripted(stages=STAGES, fewest=STAGES)
    world.join(*workers)
    world.submit(what=spec(STAGES, spot_checks=share, **changes))
    world.load()
    for _ in range(steps):
        step(world)
    return world


def step(world: Scripted) -> None:
    for rank, worker in enumerate(world.holders()):
        world.ready(worker, digest=digest(rank, world.state().step))
    world.wait(0.3)


def repeating(world: Scripted, worker: str) -> do.Assign:
    """Return the newest order that a worker has to repeat steps beside the plan."""
    orders: list[do.Assign] = world.to(worker, do.Assign)
    return [order for order in orders if order.plan.version >= BESIDE][-1]


def answer(world: Scripted, worker: str, wrong_from: int | None = None, **changes: int) -> None:
    """Have a worker say what it has arrived at, other gradients from a step on."""
    order = repeating(world, worker)
    assert order.replay is not None
    digests = tuple(
        digest(order.rank, at, int(wrong_from is not None and at >= wrong_from), **changes)
        for at in range(order.replay.first_step, order.first_step)
    )
    world.says(worker, ev.Loaded(JOB, order.plan.version, digests=digests))


def repeating_three(world: Scripted) -> do.Assign:
    """Have steps done until ``d`` is to repeat three or more, and return the order."""
    for _ in range(12):
        order = repeating(world, "d")
        released = [m.version for m in world.to("d", do.Release)]
        if order.plan.version not in released:
            if order.first_step >= 3:
                return order
            answer(world, "d")
        step(world)
    raise AssertionError("nobody repeats three steps")


def facts(world: Scripted, kind: type) -> list[Any]:
    return [fact for fact in world.facts if isinstance(fact, kind)]


def reason(world: Scripted, worker: str) -> str:
    return world.scheduler.roster.workers[worker].reason


def test_digests_of_all_ranks_are_journalled_with_their_step() -> None:
    world = running("a", "b", "c")
    said = [fact.digests for fact in facts(world, StepCommitted)]
    assert said == [
        tuple(d.gradients + d.inputs for d in (digest(rank, at) for rank in range(STAGES))) for at in (0, 1)
    ]


def test_an_idle_worker_repeats_a_rank_s_steps_and_the_neighbours_let_it_ask() -> None:
    world = running("a", "b", "c", "d")
    order = repeating(world, "d")
    assert order.replay is not None
    assert (order.replay.first_step, order.first_step, order.replay.stores) == (
        0,
        len(order.replay.scales),
        (),
    )
    assert order.plan.places[order.rank].worker == "d"
    role = role_of(world.scheduler, NO_GRAPHS, "d")
    assert isinstance(role, StageRole)
    assert (role.rank, role.state.run.source) == (order.rank, world.state().checkpoint), (
        "it may load its tensors"
    )
    for peer in order.peers:
        here = world.to(peer.link.peer, do.StandbysHere)[0]
        assert [(p.link.peer, p.rank) for p in here.peers] == [("d", order.rank)]
    answer(world, "d")
    agreed = facts(world, SpotChecked)[0]
    assert (agreed.rank, agreed.first_step, agreed.step, agreed.by) == (order.rank, 0, order.first_step, "d")
    assert [m.version for m in world.to("d", do.Release)] == [order.plan.version]


def test_logs_are_kept_while_somebody_repeats_and_no_longer() -> None:
    world = running("a", "b", "c", "d", steps=2, checkpoint_every=2)
    assert repeating(world, "d").replay is not None
    store(world, 2)
    step(world)
    assert (world.state().checkpoint.step, world.to("a", do.StepCommit)[-1].replay_from) == (2, 0)
    leave(world, "d")
    step(world)
    assert world.to("a", do.StepCommit)[-1].replay_from == 2


@pytest.mark.parametrize("agree", [True, False])
def test_what_is_loaded_for_a_check_stays_until_that_is_over(*, agree: bool) -> None:
    """Newer checkpoints are stored meanwhile; where two do not agree a third worker is to load it, too."""
    world = running("a", "b", "c", "d", steps=1, checkpoint_every=1)
    answer(world, "d")

    def stored(done: int) -> None:
        for rank, worker in enumerate(world.holders()):
            world.folder.blobs.add(f"{done}{rank}" * 32)
            world.says(worker, ev.StateStored(JOB, 1, done - 1, {f"w{rank}": f"{done}{rank}" * 32}))

    stored(1)
    loaded = {f"1{rank}" * 32 for rank in range(STAGES)}
    for done in (2, 3):
        step(world)
        stored(done)
    assert set(repeating(world, "d").tensors.values()) == loaded
    assert world.state().checkpoint.step == 3
    assert loaded <= world.folder.blobs
    answer(world, "d", wrong_from=None if agree else 1)
    assert loaded.isdisjoint(world.folder.blobs) is agree


def test_two_that_agree_outvote_one_and_its_work_is_done_anew() -> None:
    world = running("a", "b", "c", "d", "e", steps=3)
    order = repeating_three(world)
    holder = world.holders()[order.rank]
    answer(world, "d", wrong_from=1)
    assert "do not agree on step 2" in reason(world, holder)
    assert "do not agree on step 2" in reason(world, "d")
    assert facts(world, WorkRejected) == []
    answer(world, "e", wrong_from=1)
    (rejected,) = facts(world, WorkRejected)
    assert (rejected.worker, rejected.step) == (holder, 0)
    assert reason(world, holder).startswith(f"quarantined: wrong: {holder} computed step 2 of stage")
    assert world.state().step == 0
    assert holder not in (world.holders() if world.state().plan is not None else ())


def test_who_repeats_wrong_is_outvoted() -> None:
    world = running("a", "b", "c", "d", "e", steps=3)
    repeating_three(world)
    answer(world, "d", wrong_from=1)
    answer(world, "e")
    assert reason(world, "d").startswith("quarantined: wrong: d repeated step 2 of stage")
    assert facts(world, WorkRejected) == []
    assert world.state().phase is Phase.TRAINING


def test_other_messages_bar_nobody() -> None:
    world = running("a", "b", "c", "d", "e", steps=3)
    repeating_three(world)
    answer(world, "d", taken=7)
    answer(world, "e", taken=7)
    assert facts(world, WorkRejected) == []
    assert not any(known.quarantined for known in world.scheduler.roster.workers.values())
    assert "a neighbour may have sent other messages" in reason(world, "d")


def test_a_worker_of_another_class_repeats_nothing() -> None:
    world = Scripted(stages=STAGES, fewest=STAGES)
    world.join("a", "b", "c")
    honest = world.introduced
    world.introduced = lambda worker, incarnation: replace(  # type: ignore[method-assign]
        honest(worker, incarnation), torch_version="9.9"
    )
    world.join("d")
    assert isinstance(world.scheduler.roster.workers["d"].introduction.device_class, DeviceClass)
    world.submit(what=spec(STAGES, spot_checks=1.0))
    world.load()
    if "d" in world.holders():
        return
    for _ in range(3):
        step(world)
    assert world.to("d", do.Assign) == []


def test_who_repeats_steps_takes_over_a_lost_stage_at_once() -> None:
    world = running("a", "b", "c", "d", steps=3)
    repeating_three(world)
    leave(world, "b")
    orders = [m for m in world.to("d", object) if isinstance(m, do.Release | do.Assign)]
    assert isinstance(orders[-2], do.Release)
    assert isinstance(orders[-1], do.Assign)
    assert orders[-1].plan.version < BESIDE
    assert world.holders()[1] == "d"


def test_a_newcomer_that_arrives_at_something_else_is_named_with_who_was_lost() -> None:
    world = running("a", "b", "c", "d", share=1e-6)
    leave(world, "b")
    version = world.state().version
    world.says("d", ev.Loaded(JOB, version, digests=(digest(1, 0), digest(1, 1, wrong=1))))
    assert "do not agree on step 2 of stage 1" in reason(world, "d")
    for worker in "ac":
        world.says(worker, ev.Loaded(JOB, version))
    assert world.state().phase is Phase.TRAINING, "one word against another ends nothing"


def test_a_newcomer_that_arrives_at_the_same_is_an_agreement() -> None:
    world = running("a", "b", "c", "d", share=1e-6)
    leave(world, "b")
    world.says("d", ev.Loaded(JOB, world.state().version, digests=(digest(1, 0), digest(1, 1))))
    (agreed,) = facts(world, SpotChecked)
    assert (agreed.rank, agreed.step, agreed.by) == (1, 2, "d")
