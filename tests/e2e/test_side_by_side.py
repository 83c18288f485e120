"""Two jobs that need two workers each, on five real workers at once: each has the bits of itself alone."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.errors import ConnectionFailed
from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import built_in, run_local
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from benchmarks.waits import came_about
from coordinator.client.prepare import prepare
from protos import atoll_control_pb2 as pb
from tests.e2e.test_coordinator_restart import killed_and_started_again, work_port

TRAINING = TrainingSpec(
    steps=120, n_micro=4, optimizer=Optimizer(lr=3e-3, clip_norm=0.5), checkpoint_every=20, spot_checks=0.0
)
SEEDS = (3, 4)

pytestmark = pytest.mark.slow


def test_each_job_has_the_bits_of_itself_alone_whatever_happens_beside_it(tmp_path: Path) -> None:
    """A worker is killed, a third job that waits is cancelled, the coordinator is restarted."""
    torch.set_num_threads(1)
    cases = [built_in("branches", replace(TRAINING, seed=seed), 0.1) for seed in SEEDS]
    positions = cases[0].dag.cuttable()
    halves = cut_at((0, positions[len(positions) // 2]))
    with LoopbackFleet(5) as fleet:
        port = work_port(fleet.state.with_suffix(".log"))

        seen: dict[str, pb.JobUpdate] = {}

        def jobs() -> dict[str, pb.JobUpdate]:
            with suppress(ConnectionFailed):  # while the coordinator is started again
                seen.update({job.job: job for job in fleet.client.status().jobs})
            return seen

        names = [
            fleet.client.submit(prepare(as_job(case), partitioner=halves, standbys=0)).job for case in cases
        ]
        assert came_about(lambda: all(jobs()[name].step > 5 for name in names), ())
        held = [{stage.worker for stage in jobs()[name].stages} for name in names]
        assert not held[0] & held[1]
        waits = fleet.client.submit(prepare(as_job(cases[0]), partitioner=halves, standbys=0)).job
        assert came_about(lambda: "waits for " in jobs()[waits].reason, ())
        fleet.client.cancel(waits)
        numbers = {worker.worker: int(worker.name[-1]) for worker in fleet.client.status().workers}
        lost = fleet._processes[1 + numbers[sorted(held[1])[0]]]
        lost.kill()
        lost.wait()
        assert came_about(lambda: jobs()[names[1]].plan_version > 1, ())
        killed_and_started_again(fleet, port)
        assert came_about(lambda: all(jobs()[name].step > 30 for name in names), ())
        for name in names:
            assert fleet.client.wait(name).state == "finished"
            fleet.client.export(name, tmp_path / name)
        assert jobs()[waits].state == "cancelled"
    for name, case in zip(names, cases, strict=True):
        expected, found = run_local(case, (0,)).state, load_file(tmp_path / name)
        trained = [key for key in expected if key in found]
        assert trained
        assert [key for key in trained if not torch.equal(found[key], expected[key]["value"])] == []
