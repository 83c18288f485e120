"""A site of two processes and a machine of one: to plans and links two workers like others."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import Run, built_in, run_local
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from coordinator.client.prepare import prepare
from tests.e2e.test_devices import compute_processes, lending, states
from tests.patience import eventually

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = TrainingSpec(
    steps=4, n_micro=4, seed=5, optimizer=Optimizer(lr=1e-3, clip_norm=0.5), spot_checks=0.0
)


def losses_of(run: Run) -> list[float]:
    return [figures[0] for figures in run.figures]


@pytest.mark.slow
def test_a_site_of_two_processes_and_a_machine_train_as_one(tmp_path: Path) -> None:
    case = built_in("gpt2", TRAINING, 0.1)
    cuts = case.dag.cuttable()
    with LoopbackFleet(1) as fleet, lending(fleet, "cpu+cpu", tmp_path / "site"):
        eventually(lambda: states(fleet) == {"worker0": "pool", "several": "pool"})
        found = fleet.run(case, (0, cuts[len(cuts) // 2]))
        plan = fleet.plan
        site = next(w for w in fleet.client.status().workers if w.name == "several")
    assert plan is not None
    assert plan.prediction is not None
    assert site.device.processes == 2
    inside = {stage.worker: stage.inside for stage in plan.stages}
    assert inside[site.worker] in ("shards", "tensor", "sequence")
    assert sum(map(bool, inside.values())) == 1
    assert any("inside several" in note for note in plan.prediction.notes)
    alone = run_local(case, (0,))
    assert losses_of(found) == pytest.approx(losses_of(alone), rel=1e-5)
    for name, tensors in alone.state.items():
        assert found.state[name]["value"].shape == tensors["value"].shape
        assert float((found.state[name]["value"] - tensors["value"]).abs().max()) < 4 * 1e-3  # lr a step


@pytest.mark.slow
def test_a_killed_process_of_a_site_costs_its_member_the_stage_and_the_job_no_step(tmp_path: Path) -> None:
    case = built_in("gpt2", replace(TRAINING, steps=40), 0.0)
    cuts = case.dag.cuttable()
    prepared = prepare(as_job(case), partitioner=cut_at((0, cuts[len(cuts) // 2])))
    with LoopbackFleet(1) as fleet, lending(fleet, "cpu+cpu", tmp_path / "site") as daemon:
        eventually(lambda: states(fleet) == {"worker0": "pool", "several": "pool"})
        fleet._spawn("worker1", *fleet.join_command("worker1"))
        job = fleet.client.submit(prepared).job
        steps, losses, killed = [], dict[int, float](), False
        for update in fleet.client.watch(job):
            losses.update({p.step: p.value for p in update.metrics if p.name == "loss"})
            steps.append(update.step)
            if update.step >= 5 and not killed:
                eventually(lambda: len(states(fleet)) == 3)
                below = psutil.Process(compute_processes(daemon)[0]).children(recursive=True)
                followers = [p for p in below if "worker.mesh" in p.cmdline()]
                assert len(followers) == 1
                os.kill(followers[0].pid, signal.SIGKILL)
                killed = True
        assert update.state == "finished", update.reason
        found = fleet.result(job, losses)
    assert killed
    assert losses_of(found) == pytest.approx(losses_of(run_local(case, (0,))), rel=1e-4)
