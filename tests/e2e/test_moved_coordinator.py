"""A coordinator moves to another folder and address, from a backup or as it lies; its job goes on."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import built_in, run_local
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from coordinator.cli.main import app
from coordinator.client.prepare import prepare
from hostos.command_line import run
from tests.patience import HUNG_S

TRAINING = TrainingSpec(
    steps=120, n_micro=4, seed=3, optimizer=Optimizer(lr=3e-3, clip_norm=0.5), checkpoint_every=20
)
MOVED_AFTER = 50

pytestmark = pytest.mark.slow


def copied_as_it_lies(fleet: LoopbackFleet, target: Path) -> None:
    """Stopped, its folder copied by whatever copies files."""
    stop(fleet)
    shutil.copytree(fleet.state, target)


def backed_up(fleet: LoopbackFleet, target: Path) -> None:
    """A backup of the running coordinator, whose machine then goes up in flames."""
    assert run(app, ["backup", str(target), "--state-dir", str(fleet.state), "--json"]) == 0
    fleet._processes[0].kill()
    fleet._processes[0].wait()
    shutil.rmtree(fleet.state)


def stop(fleet: LoopbackFleet) -> None:
    fleet._processes[0].send_signal(signal.SIGINT)
    assert fleet._processes[0].wait(HUNG_S) == 0


def moved(fleet: LoopbackFleet, target: Path) -> None:
    """Start the coordinator from another folder, at another address, and have its workers come there."""
    fleet.state = target
    fleet._spawn(
        "coordinator", "coordinator.cli", "serve", "--listen", "127.0.0.1:0", "--state-dir", str(target)
    )
    fleet._processes[0] = fleet._processes.pop()
    fleet.client.close()
    fleet.client = fleet._connected()
    for n in range(fleet.workers):
        # The machine keeps its identity: a new address takes no token.
        process = fleet._processes[n + 1]
        process.send_signal(signal.SIGINT)
        process.wait(HUNG_S)
        name = f"worker{n}"
        address = fleet.client.endpoint.address
        fleet._spawn(name, "worker.cli", "join", address, "--listen", "127.0.0.1:0", *fleet._state(name))
        fleet._processes[n + 1] = fleet._processes.pop()


@pytest.mark.parametrize("how", [copied_as_it_lies, backed_up])
def test_the_job_ends_in_the_bits_of_an_undisturbed_one(
    how: Callable[[LoopbackFleet, Path], None], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    case = built_in("branches", TRAINING, 0.1)
    positions = case.dag.cuttable()
    with LoopbackFleet(2) as fleet:
        job = fleet.client.submit(
            prepare(as_job(case), partitioner=cut_at((0, positions[len(positions) // 2])))
        ).job
        workers = {known.worker for known in fleet.client.status().workers}
        updates = fleet.client.watch(job)
        next(update for update in updates if update.checkpoint_step and update.step >= MOVED_AFTER)
        updates.close()
        how(fleet, tmp_path / "elsewhere")
        moved(fleet, tmp_path / "elsewhere")
        *_, last = fleet.client.watch(job)
        assert (last.state, last.step) == ("finished", TRAINING.steps), last.reason
        assert {known.worker for known in fleet.client.status().workers} == workers, "the same identities"
        fleet.client.export(job, tmp_path / "model.safetensors")
    found, expected = load_file(tmp_path / "model.safetensors"), run_local(case, (0,)).state
    trained = [name for name in expected if name in found]
    assert trained
    for name in trained:
        assert torch.equal(found[name], expected[name]["value"]), name
