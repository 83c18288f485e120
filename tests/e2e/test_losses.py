"""A worker killed without a word costs its fleet a moment, and the result not one bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import built_in, run_local
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from coordinator.client.prepare import prepare

TRAINING = TrainingSpec(steps=300, n_micro=4, seed=3, optimizer=Optimizer(lr=3e-3))
KILL_AFTER = 50


@pytest.mark.slow
def test_a_killed_worker_is_replaced_from_the_pool_and_nothing_is_lost(tmp_path):
    torch.set_num_threads(1)
    case = built_in("branches", TRAINING, 0.1)
    positions = case.dag.cuttable()
    killed, holders = None, []
    with LoopbackFleet(3) as fleet:
        middle = positions[len(positions) // 2]
        reply = fleet.client.submit(prepare(as_job(case), partitioner=cut_at((0, middle))))
        for update in fleet.client.watch(reply.job):
            holders = [stage.workers[0] for stage in update.plan.stages] or holders
            if killed is None and update.step > KILL_AFTER:
                names = {w.worker: w.name for w in fleet.client.status().workers}
                # Process 0 is the coordinator, worker n is process n + 1.
                number = int(names[holders[1]].removeprefix("worker"))
                killed = fleet._processes[number + 1]
                killed.kill()
                killed.wait()
        assert killed is not None
        assert update.state == "finished", update.reason
        assert update.plan_version > 1
        path = tmp_path / "model.safetensors"
        fleet.client.export(reply.job, path)
    found, expected = load_file(path), run_local(case, (0,)).state
    trained = [name for name in expected if name in found]
    assert trained
    for name in trained:
        assert torch.equal(found[name], expected[name]["value"]), name
