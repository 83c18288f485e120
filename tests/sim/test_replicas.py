"""Replicas in simulated worlds: a step counts when every replica has reported it, whatever is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.messages import events as ev
from coordinator.messages.jobs import Phase
from tests.sim.compute import Bench
from tests.sim.shrink import shrunk
from tests.sim.world import Scenario, scenario, told, violation_of


def replicated(seed: int) -> Scenario:
    """A world drawn by its seed in which pipelines are replicated."""
    drawn = scenario(seed)
    return replace(drawn, pipeline=1, federated=0, replicas=2 + seed % 2, local_steps=0)


def test_replicas_of_other_cuts_end_as_an_undisturbed_run_does() -> None:
    for workers, replicas in ((2, 2), (3, 2), (4, 2), (5, 3)):
        why, world = violation_of(Scenario(seed=1, workers=workers, replicas=replicas))
        assert why == ""
        record = world.coordinator.shadow.jobs["job-1"]
        assert record.version == 1
        assert record.plan is not None
        assert len(record.plan.replicas) == replicas


@pytest.mark.parametrize("first", [0, 10])
def test_everything_holds_where_pipelines_are_replicated(first: int) -> None:
    for seed in range(first, first + 10):
        found = replicated(seed)
        why, world = violation_of(found)
        if why:
            small = shrunk(found)
            why, world = violation_of(small)
            pytest.fail(f"seed {seed}: {why}\n{small!r}\n{told(world, 40)}", pytrace=False)


def test_a_replica_that_leaves_out_a_part_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Bench._join_replicas

    def bug(self: Bench) -> None:
        """Take its own part for those of the others."""
        held, running = self.held, self.running
        if held is not None and running is not None and held.replica == 1 and running[2] in held.values:
            for replica in held.others.values():
                self.parts[(*running, replica)] = held.values[running[2]]
        right(self)

    monkeypatch.setattr(Bench, "_join_replicas", bug)
    _, world = violation_of(Scenario(seed=1, workers=4, replicas=2))
    state = world.coordinator.scheduler.jobs["job-1"]
    assert state.phase is Phase.FAILED
    assert "different gradients" in state.reason
    assert world.coordinator.shadow.jobs["job-1"].steps == 0


def test_a_report_that_lacks_losses_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ev.StepReady.__init__

    def fewer(self: ev.StepReady, *given: object, **named: object) -> None:
        made(self, *given, **named)
        object.__setattr__(self, "losses", self.losses[:-1])

    monkeypatch.setattr(ev.StepReady, "__init__", fewer)
    why, world = violation_of(Scenario(seed=1, workers=2, replicas=2))
    assert world.coordinator.shadow.jobs["job-1"].steps == 0
    assert world.coordinator.scheduler.jobs["job-1"].phase is Phase.FAILED, why
