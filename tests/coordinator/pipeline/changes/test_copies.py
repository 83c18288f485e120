"""Idle workers keep copies of stages, each stage's on one of them, and a stage goes where its copy is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.pipeline.changes.copies import FLEET_EVERY_S
from coordinator.pipeline.driver import PipelineDriver
from coordinator.planning.costs.fleet import LinkEstimate
from coordinator.services.blobs.rights import KeeperRole, role_of
from tests.coordinator.pipeline.changes.test_price import costs
from tests.coordinator.pipeline.changes.test_reconfigure import JOB, leave, predicted, spec, step, store
from tests.sim.scripted import Scripted

MB = 10**6


class Lending(Scripted):
    """Workers lend a gigabyte of disk to copies, but for those in ``lent``."""

    lent: dict[str, int] = {}  # noqa: RUF012 - replaced, never changed

    def introduced(self, worker: str, incarnation: int) -> ev.Introduction:
        return replace(super().introduced(worker, incarnation), copy_bytes=self.lent.get(worker, 10**9))


def trained(*workers: str, lent: dict[str, int] | None = None, checkpoint_every: int = 0) -> Lending:
    """Two stages train on the first two workers, the others are idle."""
    world = Lending(stages=2, fewest=2, altered=predicted)
    world.lent = lent or {}
    world.join(*workers)
    world.submit(what=spec(2, checkpoint_every=checkpoint_every))
    world.load()
    step(world)
    world.handle(ev.Tick())
    return world


def ordered(world: Scripted, worker: str) -> list[tuple[int, int]]:
    """Step and rank of each copy in the newest order."""
    orders = world.to(worker, do.KeepCopies)
    return [(int(c.name.split(".")[1]), c.rank) for c in orders[-1].copies] if orders else []


def keeps(world: Scripted, worker: str, n_bytes: int = 10 * MB, took_s: float = 10.0) -> None:
    """Have a worker keep what it was asked to."""
    for copy in world.to(worker, do.KeepCopies)[-1].copies:
        world.says(worker, ev.CopyHeld(copy.job, copy.name, n_bytes, n_bytes, took_s))


def test_copies_are_spread_over_the_idle_workers_that_lend_disk() -> None:
    world = trained("a", "b", "c", "d", "e", lent={"e": 0})
    assert ordered(world, "c") == [(0, 0)]
    assert ordered(world, "d") == [(0, 1)]
    assert not world.to("e", do.KeepCopies)
    assert not world.to("a", do.KeepCopies)
    assert ordered(trained("a", "b", "c"), "c") == [(0, 0), (0, 1)]


def test_each_checkpoint_is_ordered_once_from_who_kept_the_stage_before() -> None:
    world = trained("a", "b", "c", "d", checkpoint_every=2)
    for _ in range(3):
        world.handle(ev.Tick())
    assert len(world.messages(do.KeepCopies)) == 2
    step(world)
    store(world, 2)
    assert world.state().checkpoint.step == 2
    world.handle(ev.Tick())
    assert len(world.messages(do.KeepCopies)) == 4
    assert ordered(world, "c") == [(2, 0)]
    assert ordered(world, "d") == [(2, 1)]


def test_who_keeps_the_copy_takes_over_before_one_that_would_have_to_fetch_it() -> None:
    """Also where the other one is a little faster; not where it is much faster for ten minutes."""
    for slower, chosen in ((1.01, "d"), (30.0, "c")):
        world = trained("a", "b", "c", "d")
        keeps(world, "c")
        keeps(world, "d")
        roster = world.scheduler.roster
        roster.links.table.believe(("d", "c"), 1e6)  # slower than the store, at 8 Mbit/s
        for worker, factor in (("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", slower)):
            roster.ops.timings[worker, "fp32"] = {"op": (0.1 * factor, 0.2 * factor)}
        assert ordered(world, "d") == [(0, 1)]
        leave(world, "b")
        assert world.holders() == ["a", chosen]


def test_seconds_to_fetch_are_those_of_the_nearest_copy() -> None:
    world = trained("a", "b", "c", lent={"c": 10**9})
    keeps(world, "c", took_s=1.0)
    assert [cost.copy for cost in costs(world)] == ["on the disk of c"] * 2
    world.join("d")
    roster = world.scheduler.roster
    roster.workers["c"].quarantined = "for the test"
    roster._changed("c")
    roster.links.table.estimates["c", "d"] = LinkEstimate(160e6, 0.01)
    assert costs(world)[0].copy == "on the disk of c, 0.5 s from d"
    roster.links.table.believe(("c", "d"), 10e6)
    assert costs(world)[0].copy == "in the store, 4.0 s from d"


def test_who_takes_over_is_told_who_keeps_a_copy_and_that_one_expects_it() -> None:
    """Both stages' copies are on c, which takes one stage; d fetches the other from it."""
    world = Lending(stages=3, fewest=3)
    world.lent = {"e": 0}
    world.join("a", "b", "c", "d", "e")
    world.submit(what=spec(3))
    world.load()
    step(world)
    world.handle(ev.Tick())
    keeps(world, "d")
    leave(world, "a")
    leave(world, "b")
    assert world.holders()[0] == "d"
    (assign,) = world.to("e", do.Assign)
    assert [holder.peer for holder in assign.holders] == ["d"]
    assert [expected.peer for expected in world.to("d", do.ExpectPeer)][-1] == "e"
    assert world.to("d", do.Assign)[0].holders == ()


def test_only_what_was_asked_for_counts_and_what_cannot_be_kept_does_not() -> None:
    world = trained("a", "b", "c")
    known = world.scheduler.roster.workers["c"]
    world.says("c", ev.CopyHeld(JOB, "another", 1))
    assert known.copies == {}
    keeps(world, "c")
    name = next(iter(known.copies))
    assert known.store_bps == pytest.approx(8 * MB)
    world.says("c", ev.CopyHeld(JOB, name, error="no room"))
    assert name not in known.copies


def test_a_copy_is_known_again_after_a_restart_of_the_coordinator() -> None:
    world = trained("a", "b", "c", "d")
    keeps(world, "c")
    held = tuple(world.scheduler.roster.workers["c"].copies.values())
    world.restart()
    honest = world.introduced

    def introduced(worker: str, incarnation: int) -> ev.Introduction:
        found = honest(worker, incarnation)
        if worker == "c":
            return replace(found, copies=held)
        return replace(found, held=ev.Held(JOB, 1, 1)) if worker in "ab" else found

    world.introduced = introduced  # type: ignore[method-assign]
    world.join("a", "b", "d", "c")
    assert list(world.scheduler.roster.workers["c"].copies.values()) == list(held)
    assert costs(world)[0].copy == "on the disk of c"


def test_the_fleet_is_looked_at_now_and_then_and_a_newcomer_gets_its_share() -> None:
    world = trained("a", "b", "c")
    world.join("d")
    world.wait(FLEET_EVERY_S + 1.0)
    assert ordered(world, "d") == [(0, 1)]
    assert ordered(world, "c") == [(0, 0)]
    leave(world, "d")
    world.wait(FLEET_EVERY_S + 1.0)
    assert ordered(world, "c") == [(0, 0), (0, 1)]


def test_a_keeper_may_fetch_what_it_is_to_keep_and_put_nothing() -> None:
    world = trained("a", "b", "c")
    driver = world.scheduler.drivers[0]
    assert isinstance(driver, PipelineDriver)
    graphs: Any = None
    role = role_of(world.scheduler, graphs, "c")
    assert isinstance(role, KeeperRole)
    assert role.copies == driver.beside.copies.of("c")
    assert role.allowance().n_bytes == 0
    world.join("e")
    assert role_of(world.scheduler, graphs, "e") is None
