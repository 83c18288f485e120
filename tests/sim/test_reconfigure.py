"""A worker that is lost costs the step in flight: who takes over repeats the others, and nobody else does."""

from __future__ import annotations

from random import Random

import pytest

from coordinator.messages.facts import PlanAdopted, Reconfigured, StepCommitted
from tests.parameters import sampled
from tests.sim.faults import (
    Crash,
    CutOff,
    Fault,
    Freeze,
    Hang,
    KillCoordinator,
    Leave,
    Outage,
    Partition,
)
from tests.sim.shrink import holding
from tests.sim.world import Scenario, World

JOB = "job-1"
LOADED_S = 5.2
STEPS = 16


def ran(scenario: Scenario) -> tuple[World, list[Reconfigured]]:
    """Run a world whose every step has to be committed once, under the plan that was adopted first."""
    world = holding(scenario)
    assert world.coordinator.shadow.jobs[JOB].outcome == "finished"
    assert [fact.step for fact in world.facts(StepCommitted)] == list(range(STEPS))
    assert len(world.facts(PlanAdopted)) == 1
    return world, world.facts(Reconfigured)


@pytest.mark.parametrize("kind", [Crash, Leave, Freeze, Hang, Partition, CutOff])
@pytest.mark.parametrize("worker", ["w0", "w1", "w2"])
def test_every_step_is_committed_once_whoever_is_lost_and_however(kind: type[Fault], worker: str) -> None:
    fault = kind(round(LOADED_S + 0.7, 2), 0.0 if kind in (Crash, Hang) else 9.0, worker)  # type: ignore[call-arg]
    _, moves = ran(Scenario(seed=1, workers=5, faults=(fault,)))
    assert [fact.newcomers for fact in moves] == [(int(worker[1]),)]


@pytest.mark.parametrize("seed", sampled(10, range(30)))
def test_at_any_moment_one_after_the_other_and_with_the_coordinator(seed: int) -> None:
    random = Random(seed)
    at_s, faults = LOADED_S, []
    workers = ["w0", "w1", "w2"]
    random.shuffle(workers)
    for worker in workers[: random.randint(1, 3)]:
        at_s += 4.0 * random.random()
        faults.append(random.choice((Crash, Leave))(round(at_s, 3), 0.0, worker))
        if random.random() < 0.4:
            faults.append(KillCoordinator(round(at_s + random.random(), 3), round(0.05 + random.random(), 3)))
        at_s += 6.5
    ran(Scenario(seed=seed, workers=6, faults=tuple(faults)))


@pytest.mark.parametrize("delay_s", [0.0, 0.3, 0.5, 0.6, 0.9, 1.2])
def test_the_newcomer_dies_while_it_loads(delay_s: float) -> None:
    faults = (Crash(LOADED_S + 1.0, 0.0, "w1"), Crash(round(LOADED_S + 1.4 + delay_s, 2), 0.0, "w3"))
    _, moves = ran(Scenario(seed=3, workers=5, faults=faults))
    assert [fact.workers[1] for fact in moves][-1] == "w4"


@pytest.mark.parametrize("delay_s", [0.05, 0.35, 0.4, 0.45, 0.5, 0.8, 1.0, 1.2, 1.5])
def test_the_coordinator_dies_while_a_newcomer_loads(delay_s: float) -> None:
    faults = (Crash(LOADED_S + 1.0, 0.0, "w1"), KillCoordinator(round(LOADED_S + 1.0 + delay_s, 2), 0.2))
    ran(Scenario(seed=4, workers=5, faults=faults))


@pytest.mark.parametrize("pair", [("w0", "w1"), ("w1", "w2"), ("w0", "w2")])
@pytest.mark.parametrize("seed", range(2))
def test_two_that_are_lost_at_once_repeat_together(seed: int, pair: tuple[str, str]) -> None:
    at_s = round(LOADED_S + 5.0 * Random(seed).random(), 3)
    _, moves = ran(Scenario(seed=seed, workers=5, faults=(Outage(at_s, 0.0, *pair),)))
    assert {rank for fact in moves for rank in fact.newcomers} == {int(worker[1]) for worker in pair}


@pytest.mark.parametrize("kind", [Leave, Freeze, Partition])
@pytest.mark.parametrize("delay_s", [0.1, 0.7, 1.5])
def test_a_neighbour_is_lost_while_the_first_newcomer_loads(kind: type[Fault], delay_s: float) -> None:
    """However it is lost; where both are back before anybody noticed, nobody has to take over."""
    first, second = (
        kind(round(LOADED_S + 1.9 + more_s, 3), 0.0 if kind is Leave else 9.0, worker)  # type: ignore[call-arg]
        for more_s, worker in ((0.0, "w1"), (delay_s, "w2"))
    )
    _, moves = ran(Scenario(seed=5, workers=6, faults=(first, second)))
    assert moves


@pytest.mark.parametrize("seed", range(4))
def test_all_stages_but_one_are_lost_at_once(seed: int) -> None:
    """Three neighbours of four: the newcomers are a pipeline of their own beside whoever is left."""
    random = Random(seed)
    at_s, left = LOADED_S + 4.0 * random.random(), random.randrange(4)
    lost = [f"w{at}" for at in range(4) if at != left]
    faults: list[Fault] = [Crash(round(at_s + 0.4 * random.random(), 3), 0.0, worker) for worker in lost]
    if seed % 3 == 0:
        faults.append(KillCoordinator(round(at_s + 2.5 * random.random(), 3), 0.2))
    scenario = Scenario(seed=seed, workers=8, stages=4, faults=tuple(faults))
    _, moves = ran(scenario)
    assert {rank for fact in moves for rank in fact.newcomers} == {0, 1, 2, 3} - {left}


def test_all_stages_that_are_lost_at_once_send_the_job_back_to_its_checkpoint() -> None:
    faults = tuple(Crash(LOADED_S + 2.0, 0.0, f"w{at}") for at in range(3))
    world = holding(Scenario(seed=2, workers=7, faults=faults))
    assert world.coordinator.shadow.jobs[JOB].outcome == "finished"
    assert len(world.facts(PlanAdopted)) == 2


@pytest.mark.parametrize("seed", sampled(3, range(6)))
def test_a_stage_that_is_lost_after_the_last_commit_costs_no_step(seed: int) -> None:
    undisturbed, _ = ran(Scenario(seed=seed, workers=5))
    end_s = max(fact.at_s for fact in undisturbed.facts(StepCommitted)) - 1000.0
    for late_s in (0.01, 0.2, 0.45):
        ran(Scenario(seed=seed, workers=5, faults=(Crash(round(end_s + late_s, 3), 0.0, f"w{seed % 3}"),)))
