"""Hot standbys and joiners in simulated worlds: a place is taken at once, and no step is done twice."""

from __future__ import annotations

from random import Random

import pytest

from coordinator.messages.facts import PlanAdopted, Reconfigured, StepCommitted
from coordinator.messages.jobs import JobState
from coordinator.pipeline.changes import newcomers
from tests.parameters import each_once, sampled
from tests.sim.faults import Crash, Fault, KillCoordinator, Leave
from tests.sim.world import Scenario, World

JOB = "job-1"
STEPS = 40
STANDING_S = 10.0  # by then standbys are chosen and have caught up


def ran(scenario: Scenario, world: World | None = None) -> tuple[World, list[Reconfigured]]:
    """Run a world whose every step has to be committed once, under the plan that was adopted first."""
    world = world or World(scenario)
    world.run()
    assert world.coordinator.shadow.jobs[JOB].outcome == "finished"
    assert [fact.step for fact in world.facts(StepCommitted)] == list(range(STEPS))
    assert len(world.facts(PlanAdopted)) == 1
    return world, world.facts(Reconfigured)


def state(world: World) -> JobState:
    return world.coordinator.scheduler.jobs[JOB]


def beside(world: World, at_s: float) -> dict[int, str]:
    """Note who stands by at a moment."""
    found: dict[int, str] = {}
    look = lambda: found.update({r: s.worker for r, s in state(world).standbys.items() if s.loaded})  # noqa: E731
    world.clock.after(at_s, look)
    return found


@pytest.mark.parametrize("kind", [Crash, Leave])
@pytest.mark.parametrize("rank", range(3))
def test_who_stands_by_takes_the_place_and_repeats_nothing_from_the_checkpoint(
    kind: type[Fault], rank: int
) -> None:
    fault = kind(STANDING_S + 1.3, 0.0, f"w{rank}")  # type: ignore[call-arg]
    world = World(Scenario(seed=2, workers=6, standbys=3, steps=STEPS, faults=(fault,)))
    standing = beside(world, STANDING_S)
    _, moves = ran(world.scenario, world)
    assert sorted(standing) == [0, 1, 2]
    assert [(fact.newcomers, fact.workers[rank]) for fact in moves] == [((), standing[rank])]


def test_one_after_the_other_each_by_its_standby_and_a_standby_that_dies_costs_nothing() -> None:
    faults = (Crash(STANDING_S, 0.0, "w0"), Crash(STANDING_S + 4.0, 0.0, "w2"))
    _, moves = ran(Scenario(seed=5, workers=6, standbys=3, steps=STEPS, faults=faults))
    assert len(moves) == 2
    assert all(fact.newcomers == () for fact in moves)
    faults = tuple(Crash(STANDING_S + at, 0.0, f"w{at}") for at in range(3, 6))
    _, moves = ran(Scenario(seed=5, workers=6, standbys=3, steps=STEPS, faults=faults))
    assert moves == []


@pytest.mark.parametrize("workers", sampled(1, [6, 5]))
@pytest.mark.parametrize(
    ("pair", "late_s"), each_once([(2, 1), (0, 1), (1, 2), (1, 0)], [0.1, 0.16, 0.22, 0.28])
)
def test_a_neighbour_is_lost_while_a_standby_takes_its_place(
    workers: int, pair: tuple[int, int], late_s: float
) -> None:
    """Half of a place is no state: the standby begins it anew, beside the neighbour's successor."""
    first, second = pair
    faults = (Crash(STANDING_S, 0.0, f"w{first}"), Crash(STANDING_S + late_s, 0.0, f"w{second}"))
    ran(Scenario(seed=5, workers=workers, standbys=1 + workers % 2, steps=STEPS, faults=faults))


@pytest.mark.parametrize("seed", sampled(8, range(25)))
def test_at_any_moment_with_standbys_and_with_the_coordinator(seed: int) -> None:
    random = Random(seed)
    at_s, faults = 6.0, []
    workers = ["w0", "w1", "w2", "w3", "w4"]
    random.shuffle(workers)
    for worker in workers[:3]:
        at_s += 5.0 * random.random()
        faults.append(random.choice((Crash, Leave))(round(at_s, 3), 0.0, worker))
        if random.random() < 0.4:
            faults.append(KillCoordinator(round(at_s + random.random(), 3), round(0.05 + random.random(), 3)))
        at_s += 6.5
    world = World(Scenario(seed=seed, workers=7, standbys=2, steps=STEPS, faults=tuple(faults)))
    world.run()
    assert world.coordinator.shadow.jobs[JOB].outcome == "finished"


@pytest.mark.parametrize("seed", range(4))
def test_a_faster_worker_that_joins_takes_a_place_and_no_step_is_done_twice(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newcomers, "SETTLED_S", 5.0)
    world = World(Scenario(seed=seed, workers=4, standbys=None, steps=STEPS))
    joiner = world.workers["w3"]
    for worker in world.workers.values():
        worker.slowness = 2.0
    joiner.slowness = 0.5
    world.coordinator.step_s = lambda workers: sum(world.workers[w].slowness for w in workers)
    joiner.start, begin = lambda: None, joiner.start  # type: ignore[method-assign]

    def join() -> None:
        joiner.start = begin  # type: ignore[method-assign]
        joiner.start()
        joiner.slowness = 0.5

    world.clock.after(12.0, join)
    _, moves = ran(world.scenario, world)
    (move,) = moves
    assert "w3" in move.workers
    assert move.newcomers == ()
    assert "w3 instead of" in move.reason
