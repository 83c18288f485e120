"""Workers that only heartbeat, links that lose everything, circles and lies: no job waits for ever."""

from __future__ import annotations

import pytest

from coordinator.messages import instructions as do
from coordinator.messages.facts import StepCommitted
from tests.parameters import sampled
from tests.sim.faults import Fault, Hang, Lie, SilentLink
from tests.sim.world import Scenario, World


def run(*faults: Fault, workers: int = 5, seed: int = 1) -> tuple[World, list[tuple[str, str]]]:
    """Run one job to its end; returns the world, and who was quarantined, in order, and why."""
    world = World(Scenario(seed, workers, pipeline=1, faults=faults))
    quarantined: list[tuple[str, str]] = []
    performed = world.coordinator.performed

    def watch(instruction: do.Instruction) -> None:
        performed(instruction)
        if isinstance(instruction, do.Log) and instruction.event == "worker.quarantined":
            quarantined.append((instruction.fields["worker"], instruction.fields["reason"]))

    world.coordinator.performed = watch
    world.run()
    assert world.coordinator.shadow.jobs["job-1"].outcome == "finished"
    return world, quarantined


def ended_s(world: World) -> float:
    """Return when the last step was recorded, in simulated seconds."""
    return max(fact.at_s for fact in world.facts(StepCommitted)) - 1000.0


@pytest.mark.parametrize("seed", sampled(2, range(5)))
@pytest.mark.parametrize("at_s", [5.0, 8.0, 12.0])
@pytest.mark.parametrize("worker", ["w0", "w1", "w2"])
def test_a_hung_computation_costs_its_worker_and_not_the_run(worker: str, at_s: float, seed: int) -> None:
    _, quarantined = run(Hang(at_s, 0.0, worker), seed=seed)
    assert [who for who, _ in quarantined] == [worker]
    assert f"{worker} waits for nobody" in quarantined[0][1]


def test_a_hung_computation_is_noticed_within_seconds_once_steps_were_measured() -> None:
    undisturbed, disturbed = run()[0], run(Hang(8.0, 0.0, "w1"))[0]
    # Five seconds of patience, one to load anew, and the steps since the last checkpoint.
    assert ended_s(disturbed) - ended_s(undisturbed) < 15.0


def test_a_hung_computation_while_loading_costs_its_worker() -> None:
    _, quarantined = run(Hang(4.0, 0.0, "w1"))
    assert [who for who, _ in quarantined] == ["w1"]


def test_a_hung_computation_at_the_end_costs_no_result() -> None:
    """The last commit is out; what is missing is an evaluation or a part of the checkpoint."""
    end_s = ended_s(run()[0])
    for late_s in (0.01, 0.15, 0.25, 0.3):
        run(Hang(round(end_s + late_s, 2), 0.0, "w2"))


@pytest.mark.parametrize("pair", [("w0", "w1"), ("w1", "w2")])
def test_a_link_that_both_ends_believe_in_costs_one_of_them(pair: tuple[str, str]) -> None:
    world, quarantined = run(SilentLink(8.0, 600.0, *pair))
    assert len(quarantined) == 1
    assert quarantined[0][0] in pair
    assert world.coordinator.shadow.jobs["job-1"].version == 2


@pytest.mark.parametrize(("liar", "innocent"), [("w1", "w0"), ("w1", "w2"), ("w0", "w1"), ("w2", "w0")])
def test_a_liar_stops_no_job(liar: str, innocent: str) -> None:
    """Its progress goes on and it claims to wait for somebody who has done nothing wrong."""
    _, quarantined = run(Lie(8.0, 0.0, liar, innocent))
    assert liar in [who for who, _ in quarantined]
    assert len(quarantined) <= 2


def test_a_circle_of_waits_is_broken() -> None:
    circle = (Lie(8.0, 120.0, "w0", "w1"), Lie(8.0, 120.0, "w1", "w2"), Lie(8.0, 120.0, "w2", "w0"))
    _, quarantined = run(*circle)
    assert "in a cycle of waits of" in quarantined[0][1]


def test_a_fleet_without_a_spare_goes_on_when_the_quarantine_ends() -> None:
    world = World(Scenario(1, 2, pipeline=1, faults=(Hang(8.0, 20.0, "w1"),)))
    world.coordinator.fewest = 2
    world.run()
    assert world.coordinator.shadow.jobs["job-1"].outcome == "finished"


def test_a_slow_worker_is_not_hung() -> None:
    def slow(world: World) -> None:
        world.workers["w1"].slowness = 8.0

    world = World(Scenario(1, 4, pipeline=1))
    world.clock.after(7.0, lambda: slow(world))
    world.run()
    assert world.coordinator.shadow.jobs["job-1"].version == 1


def test_our_own_stall_is_nobodys_fault() -> None:
    world = World(Scenario(1, 4, pipeline=1))
    world.clock.after(8.0, world.coordinator.freeze)
    world.clock.after(40.0, world.coordinator.thaw)
    world.run()
    assert "worker.quarantined" not in "".join(text for _, text in world.clock.story)
