"""Stages that take more memory than they may, in seeded worlds: what is trained stays."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import pytest

from atoll.plan import Prediction, StagePrediction
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import StepCommitted
from coordinator.messages.jobs import Phase
from tests.parameters import sampled
from tests.sim.coordinator import Coordinator, Folder
from tests.sim.faults import Fault, Freeze, FullDisk, KillCoordinator, KilledForMemory
from tests.sim.shrink import holding
from tests.sim.worker import MEMORY
from tests.sim.world import Scenario, World

JOB, STEPS = "job-1", 16
LOADED_S = 5.2


@pytest.mark.parametrize("seed", sampled(8, range(20)))
def test_a_stage_killed_at_any_moment_costs_no_committed_step(seed: int) -> None:
    random = Random(seed)
    faults: list[Fault] = [KilledForMemory(round(LOADED_S + 8.0 * random.random(), 3), 0.0, f"w{seed % 3}")]
    if random.random() < 0.3:
        at_s = round(faults[0].at_s + 2.0 * random.random(), 3)
        faults.append(KillCoordinator(at_s, round(0.05 + random.random(), 3)))
    workers = 3 + seed % 2  # the fourth can take over
    world = holding(Scenario(seed=seed, workers=workers, faults=tuple(faults)))
    assert world.coordinator.shadow.jobs[JOB].outcome == "finished"
    committed = [fact.step for fact in world.facts(StepCommitted)]
    if len(faults) == 1:
        assert committed == list(range(STEPS))


@pytest.mark.parametrize("kill", [None, KillCoordinator(14.0, 6.0)])
def test_workers_keep_what_was_stored_for_another_plan_until_its_record_is_on_the_disk(
    kill: Fault | None,
) -> None:
    faults = (KilledForMemory(10.39, 0.0, "w0"), FullDisk(11.76, 7.38), kill)
    world = holding(Scenario(seed=767, workers=3, faults=tuple(filter(None, faults))))
    assert world.coordinator.shadow.jobs[JOB].outcome == "finished"
    assert [fact.step for fact in world.facts(StepCommitted)] == list(range(STEPS))


def test_what_a_worker_asked_for_as_another_rank_is_not_taken_in_the_one_that_it_takes_over() -> None:
    """w3 repeats steps of rank 1 beside the plan, and w0 thaws as w3 repeats the same steps of rank 2."""
    faults = (Freeze(6.44, 1.47, "w0"), KilledForMemory(7.25, 0.0, "w2"))
    world = holding(Scenario(seed=7944, workers=4, faults=faults))
    assert "suspected" not in " ".join(line for _, line in world.clock.story)


@dataclass
class Short(Coordinator):
    """A coordinator whose planner is told a share of what stages take, and plans by what was learnt."""

    told: float = field(default=0.5, kw_only=True)
    tensor: float = field(default=0.5, kw_only=True)  # that a stage's tensor takes, of a worker's memory

    def plan(self, asked: do.MakePlan) -> ev.Event:
        """Cut the job evenly over the fewest workers that it fits, as far as the planner knows."""
        model_bytes, tensors = self.told * self.tensor * MEMORY, len(asked.spec.tensors)
        devices = {device.worker: device for device in asked.fleet.devices}
        fits = int(min(device.model_limit_bytes for device in devices.values()) // model_bytes)
        if not fits or -(-tensors // fits) > len(devices):
            return ev.PlanFailed(asked.job, asked.attempt, "the model needs more than there is")
        self.stages = -(-tensors // fits)
        made = super().plan(asked)
        assert isinstance(made, ev.PlanMade)
        stages = tuple(
            StagePrediction(
                s.worker, 1.0, 1.0,
                round(devices[s.worker].memory_scale * model_bytes * (s.stop - s.start)), MEMORY,
                memory_scale=devices[s.worker].memory_scale,
            )
            for s in made.plan.replicas[0].stages
        )  # fmt: skip
        return replace(made, plan=replace(made.plan, prediction=Prediction(1.0, 1.0, "", "", stages)))


@dataclass
class Tight(World):
    """A world in which a stage that takes more than its worker has is killed in a later step of its plan."""

    told: float = 0.5
    tensor: float = 0.5
    kills: int = 0

    def _coordinator(self, name: str, folder: Folder) -> Coordinator:
        figures = {"told": self.told, "tensor": self.tensor}
        short = Short(self.clock, name, network=self.network, folder=folder, **figures)
        short.recorded = partial(self.checks.recorded, short)
        short.performed = partial(self.checks.performed, short)
        return short

    def begin(self) -> None:
        super().begin()
        self._look()

    def _look(self) -> None:
        """Kill who computes with too much; not who only repeats steps, which takes less."""
        for worker in self.workers.values():
            held = worker.bench.held if worker.alive else None
            late = held is not None and held.step >= held.first + self.scenario.seed % 3
            much = held is not None and len(held.tensors) * self.tensor > 1.0
            if much and late and worker.bench.running is not None:
                self.kills += 1
                worker.killed_for_memory()
                break  # the others hear of it, and drop the step
        self.clock.after(0.2, self._look)


@pytest.mark.parametrize("told", [0.5, 0.25])
@pytest.mark.parametrize("seed", range(6))
def test_with_a_planner_that_is_told_half_the_truth_the_job_ends_and_no_step_is_done_twice(
    seed: int, told: float
) -> None:
    world = Tight(Scenario(seed=seed, workers=4), told=told)
    world.run()
    assert world.coordinator.shadow.jobs[JOB].outcome == "finished"
    assert [fact.step for fact in world.facts(StepCommitted)] == list(range(STEPS))
    assert 1 <= world.kills <= (4 if told == 0.5 else 6)
    assert not any(known.quarantined for known in world.coordinator.scheduler.roster.workers.values())


def test_where_nothing_fits_any_more_the_job_waits_with_what_it_has_trained() -> None:
    world = Tight(Scenario(seed=2, workers=6), tensor=1.5)
    world.begin()
    until_s = world.clock.now_s + 60.0
    while world.clock.step(until_s):
        pass
    state = world.coordinator.scheduler.jobs[JOB]
    assert (state.phase, state.checkpoint.step) == (Phase.PAUSED, 2)
    assert "the model needs more than there is" in state.reason
    assert [fact.step for fact in world.facts(StepCommitted)] == [0, 1]
