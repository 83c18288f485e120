"""Who is replaced: only where another could take its place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.plan import Plan, Prediction, StagePrediction
from coordinator.messages import instructions as do
from coordinator.messages.events import Goodput
from coordinator.pipeline.driver import PipelineDriver
from coordinator.pipeline.health.anomalies import FIRST_STEPS, WINDOW_STEPS, WINDOWS, Kind
from tests.sim.scripted import Scripted
from tests.sim.worker import MEMORY


def needing(memory_bytes: int, plan: Plan, asked: do.MakePlan) -> Plan:
    stages = tuple(StagePrediction(s.worker, 1.0, 0.5, memory_bytes, MEMORY) for s in plan.stages)
    return replace(plan, prediction=Prediction(1.0, 1.0, "stage 0", "it computes", stages))


def train(world: Scripted, windows: int, busy_s: float) -> None:
    """Have the job commit windows of steps of a second, in which a megabyte from a to b takes so long."""
    for _ in range(windows * WINDOW_STEPS):
        world.wait(1.0 + busy_s)
        world.ready("a", links=(Goodput("b", 10**6, busy_s, 0.01),))
        world.ready("b")
    world.wait(1.0)


@pytest.mark.parametrize(("needed", "replaced"), [(MEMORY, True), (MEMORY + 1, False)])
def test_a_slow_links_sender_is_replaced_where_an_idle_worker_has_the_memory(
    needed: int, replaced: bool
) -> None:
    world = Scripted(altered=lambda plan, asked: needing(needed, plan, asked))
    world.training("a", "b", "c", steps=10_000, checkpoint_every=1000)
    for _ in range(FIRST_STEPS):
        world.step()
    train(world, 2, 0.1)
    assert world.scheduler.roster.workers["a"].suspected == ""
    train(world, 1, 1.0)
    known = world.scheduler.roster.workers["a"]
    assert "slow link from a to b: 8 Mbit/s, usual are 80" in known.reason
    assert known.quarantined == ""
    train(world, WINDOWS - 1, 1.0)
    assert ("slow link from a to b" in known.quarantined) is replaced
    assert world.holders() == (["c", "b"] if replaced else ["a", "b"])


def test_links_to_others_than_neighbours_are_not_kept() -> None:
    """Names in a report are the worker's own words: new ones in each would be followed for ever."""
    world = Scripted()
    world.training("a", "b", "c", steps=10_000, checkpoint_every=1000)
    for step in range(FIRST_STEPS + WINDOW_STEPS + 1):
        world.wait(1.0)
        invented = tuple(Goodput(f"{step}-{at}", 10**6, 0.1, 0.01) for at in range(1000))
        world.ready("a", links=(*invented, Goodput("c", 10**6, 0.1, 0.01), Goodput("b", 10**6, 0.1, 0.01)))
        world.ready("b")
    world.wait(1.0)
    assert [link.peer for link in world.state().run.reports[0].links] == ["b"]
    driver = world.scheduler.driver_of("job-1")
    assert isinstance(driver, PipelineDriver)
    (watched,) = driver.suspicion._watched.values()
    assert {key.peer for key in watched._series if key.kind is Kind.LINK} == {"b"}
