"""Who keeps a copy of a stage on its disk takes it over from there."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from coordinator.messages.facts import Reconfigured
from tests.sim.checks import Violation
from tests.sim.faults import Crash, KillCoordinator, Outage
from tests.sim.test_reconfigure import JOB, LOADED_S, ran
from tests.sim.world import Scenario, World


def newcomers(world: World, moves: list[Reconfigured]) -> list[str]:
    return [fact.workers[rank] for fact in moves for rank in fact.newcomers]


def warm(world: World, worker: str) -> list[bool]:
    return world.workers[worker].bench.warm


@pytest.mark.parametrize("worker", ["w0", "w1", "w2"])
@pytest.mark.parametrize("seed", range(1))
def test_a_lost_stage_is_taken_over_from_a_copy(seed: int, worker: str) -> None:
    """Of the newest checkpoint: two steps later at the latest it is on a backup's disk."""
    world, moves = ran(Scenario(seed=seed, workers=5, faults=(Crash(LOADED_S + 4.0, 0.0, worker),)))
    assert [warm(world, name) for name in newcomers(world, moves)] == [[True]]


@pytest.mark.parametrize("seed", range(2))
def test_neighbours_that_are_lost_together_are_taken_over_from_copies(seed: int) -> None:
    """Each backup keeps one of them: copies are spread."""
    world, moves = ran(Scenario(seed=seed, workers=6, faults=(Outage(LOADED_S + 3.6, 0.0, "w0", "w1"),)))
    final = moves[-1].workers
    assert [warm(world, name)[-1] for name in final[:2]] == [True, True]


def test_a_restarted_coordinator_hears_who_keeps_what() -> None:
    faults = (KillCoordinator(LOADED_S + 3.4, 0.1), Crash(LOADED_S + 4.6, 0.0, "w1"))
    world, moves = ran(Scenario(seed=3, workers=5, faults=faults))
    (newcomer,) = newcomers(world, moves)
    assert warm(world, newcomer) == [True]


def test_who_lends_no_disk_keeps_nothing_and_a_disk_that_lost_a_copy_costs_the_time_to_fetch_it() -> None:
    for lends in (True, False):
        kept: list[str] = []

        def lose_disks(world: World, kept: list[str]) -> None:
            for worker in world.workers.values():
                kept += worker.bench.copies
                worker.disk.clear()

        world = World(Scenario(seed=1, workers=5, faults=(Crash(LOADED_S + 3.6, 0.0, "w1"),)))
        for worker in world.workers.values():
            worker.copy_bytes = 2**30 if lends else 0
        world.clock.after(LOADED_S + 3.5, partial(lose_disks, world, kept))
        world.run()
        assert world.coordinator.shadow.jobs[JOB].outcome == "finished"
        spares = [world.workers[name] for name in ("w3", "w4")]
        assert [spare.bench.warm for spare in spares if spare.bench.warm] == [[False]]
        assert bool(kept) == lends


@pytest.mark.parametrize("seed", range(5))
def test_copies_come_and_go_with_workers_that_do(seed: int) -> None:
    random = Random(seed)
    faults = [
        Crash(round(LOADED_S + 6.0 * random.random(), 2), round(0.5 + random.random(), 2), f"w{at}")
        for at in random.sample(range(1, 7), 4)
    ]
    world = World(Scenario(seed=seed, workers=7, faults=tuple(faults)))
    try:
        world.run()
    except Violation as broken:
        pytest.fail(str(broken))
