"""A compute process that is stopped while its daemon beats on costs its fleet a moment."""

from __future__ import annotations

import signal

import psutil
import pytest

from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import built_in
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from coordinator.client.prepare import prepare

TRAINING = TrainingSpec(steps=300, n_micro=4, seed=3, optimizer=Optimizer(lr=3e-3))
STOP_AFTER = 50


@pytest.mark.slow
def test_a_stopped_compute_process_is_replaced_by_a_spare_worker() -> None:
    case = built_in("branches", TRAINING, 0.1)
    positions = case.dag.cuttable()
    stopped: list[psutil.Process] = []
    holders: list[str] = []
    with LoopbackFleet(3) as fleet:
        middle = positions[len(positions) // 2]
        reply = fleet.client.submit(prepare(as_job(case), partitioner=cut_at((0, middle))))
        for update in fleet.client.watch(reply.job):
            holders = [stage.workers[0] for stage in update.plan.stages] or holders
            if not stopped and update.step > STOP_AFTER:
                names = {w.worker: w.name for w in fleet.client.status().workers}
                # Process 0 is the coordinator, worker n is process n + 1.
                number = int(names[holders[1]].removeprefix("worker"))
                daemon = psutil.Process(fleet._processes[number + 1].pid)
                stopped = daemon.children(recursive=True)
                for process in stopped:
                    process.send_signal(signal.SIGSTOP)
        reasons = [w.reason for w in fleet.client.status().workers if w.reason.startswith("quarantined")]
        lines = "\n".join(str(line) for line in fleet.client.logs(reply.job))
        for process in stopped:
            if process.is_running():
                process.send_signal(signal.SIGCONT)
    assert stopped
    assert (update.state, update.plan_version) == ("finished", 2), update.reason
    assert "waits for nobody" in lines or any("waits for nobody" in reason for reason in reasons)
