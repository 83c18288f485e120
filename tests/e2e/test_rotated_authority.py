"""Real processes exchange the coordinator's authority while a job runs over their links."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import built_in, run_local
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from benchmarks.waits import came_about
from coordinator.cli.main import app
from coordinator.client.client import connect
from coordinator.client.prepare import prepare
from hostos.command_line import run
from protos.credentials import Identity, JoinToken, authorities_in
from tests.patience import HUNG_S

TRAINING = TrainingSpec(
    steps=3000, n_micro=4, seed=3, optimizer=Optimizer(lr=3e-3, clip_norm=0.5), checkpoint_every=50
)
OVERLAP = "200s"  # a worker draws when it renews from the first 50 s

pytestmark = pytest.mark.slow


def identity(fleet: LoopbackFleet, name: str) -> Identity:
    found = Identity.load(fleet.state.with_name(name) / "identity")
    assert found is not None
    return found


def command(fleet: LoopbackFleet, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    capsys.readouterr()
    assert run(app, ["ca", *words, "--state-dir", str(fleet.state), "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def stopped(fleet: LoopbackFleet, n: int) -> None:
    process = fleet._processes[n + 1]
    process.send_signal(signal.SIGINT)
    process.wait(HUNG_S)


def started(fleet: LoopbackFleet, n: int, *more: str) -> None:
    """Start a worker anew on its folder."""
    name = f"worker{n}"
    address = fleet.client.endpoint.address
    fleet._spawn(name, "worker.cli", "join", address, "--listen", "127.0.0.1:0", *fleet._state(name), *more)
    fleet._processes[n + 1] = fleet._processes.pop()


def test_a_job_goes_on_while_its_workers_change_to_a_new_authority(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    case = built_in("branches", TRAINING, 0.1)
    positions = case.dag.cuttable()
    with LoopbackFleet(4) as fleet:

        def soon(check: Callable[[], bool], words: str) -> None:
            assert came_about(check, fleet._processes), (
                words + fleet.log("coordinator") + fleet.log("worker1")
            )

        stopped(fleet, 3)  # away all the while
        fleet._processes.pop()
        before = fleet.client.create_token("before").token
        cut = cut_at((0, positions[len(positions) // 2]))
        job = fleet.client.submit(prepare(as_job(case), partitioner=cut)).job
        updates = fleet.client.watch(job)
        reached: Callable[[int], int] = lambda n: next(u.step for u in updates if u.step >= n)  # noqa: E731
        reached(5)
        begun = command(fleet, capsys, "rotate", "--overlap", OVERLAP)
        assert len(begun["authorities"]) == 2  # type: ignore[arg-type]
        during = fleet.client.create_token("during").token
        names = ("worker0", "worker1", "worker2")
        soon(lambda: all(identity(fleet, name).of_newest() for name in names), "not all have renewed: ")
        behind = command(fleet, capsys, "show")["behind"]
        assert behind == [identity(fleet, "worker3").name]
        # The links' certificates are of both kinds in turn: a worker that comes anew dials and is dialled.
        stopped(fleet, 2)
        started(fleet, 2)
        for name, token in (("old-token", before), ("new-token", during)):
            fleet._spawn(name, "worker.cli", "join", fleet.client.endpoint.address, "--token", token,
                         "--name", name, "--device", "cpu", "--threads", "1", "--listen", "127.0.0.1:0",
                         *fleet._state(name))  # fmt: skip
        joined = {"worker0", "worker1", "worker2", "old-token", "new-token"}
        soon(
            lambda: joined <= {w.name for w in fleet.client.status().workers if w.state != "left"},
            "not joined: ",
        )
        assert identity(fleet, "old-token").of_newest()
        # A stage's holder is killed: another takes over, and everybody meets by certificates of the new one.
        holder = next(w.name for w in fleet.client.status().workers if w.job and w.name.startswith("worker"))
        process = fleet._processes[1 + int(holder[-1])]
        process.kill()
        process.wait()
        fleet._processes.remove(process)
        soon(lambda: len(command(fleet, capsys, "show")["authorities"]) == 1, "not ended: ")  # type: ignore[arg-type]
        fleet.client.close()
        fleet.client = connect(state_dir=fleet.state)
        *_, last = fleet.client.watch(job)
        assert (last.state, last.step) == ("finished", TRAINING.steps), last.reason
        fleet.client.export(job, tmp_path / "model.safetensors")
        # Who was away hears what to do, and does it.
        address = fleet.client.endpoint.address
        fleet._spawn("worker3", "worker.cli", "join", address, *fleet._state("worker3"))
        assert fleet._processes.pop().wait(HUNG_S) == 6
        assert "ask for a token" in fleet.log("worker3")
        fresh = fleet.client.create_token("after").token
        assert len(authorities_in(JoinToken.decode(fresh).ca_pem)) == 1
        fleet._spawn("worker3", "worker.cli", "join", address, "--token", fresh, *fleet._state("worker3"))
        soon(
            lambda: any(w.name == "worker3" and w.state == "pool" for w in fleet.client.status().workers),
            "no: ",
        )
    found, expected = load_file(tmp_path / "model.safetensors"), run_local(case, (0,)).state
    for name in expected:
        if name in found:
            assert torch.equal(found[name], expected[name]["value"]), name
