"""A site of two hosts, each started by torchrun as a user would, here on one machine's loopback device."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import built_in, run_local
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from coordinator.client.prepare import prepare
from tests.e2e.test_devices import states
from tests.patience import eventually

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = TrainingSpec(
    steps=40, n_micro=4, seed=5, optimizer=Optimizer(lr=1e-3, clip_norm=0.5), spot_checks=0.0
)


def free_pair() -> int:
    """A free port whose next one is free, too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@contextmanager
def hosts(fleet: LoopbackFleet, folder: Path) -> Iterator[list[psutil.Process]]:
    """Two hosts of one process each, joined as one worker called "several"."""
    secret, port = folder / "secret", free_pair()
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    token = fleet.client.create_token("several").token
    started = []
    for node in range(2):
        state = folder / f"state{node}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        torchrun += ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        site = ["-m", "worker.site", fleet.client.endpoint.address, "--token", token, "--name", "several"]
        site += ["--threads", "1", "--device", "cpu", "--listen", "127.0.0.1:0", "--state-dir", str(state)]
        with (folder / f"log{node}").open("wb") as log:
            command = [*torchrun, *site, "--secret-file", str(secret)]
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
    try:
        yield [psutil.Process(process.pid) for process in started]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def kill(host: psutil.Process) -> None:
    """End a host with all that runs on it, at once."""
    for process in [host, *host.children(recursive=True)]:
        with suppress(ProcessLookupError):  # it has ended with the one before it
            os.kill(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_site_that_loses_a_host_goes_on_smaller_and_the_job_loses_no_step(tmp_path: Path) -> None:
    case = built_in("gpt2", TRAINING, 0.0)
    cuts = case.dag.cuttable()
    prepared = prepare(as_job(case), partitioner=cut_at((0, cuts[len(cuts) // 2])))
    with LoopbackFleet(1) as fleet, hosts(fleet, tmp_path) as (_, second):
        eventually(lambda: states(fleet) == {"worker0": "pool", "several": "pool"})

        def site() -> int:
            found = fleet.client.status().workers
            return next(max(1, w.device.processes) for w in found if w.name == "several")

        assert site() == 2
        job = fleet.client.submit(prepared).job
        losses, killed = dict[int, float](), False
        for update in fleet.client.watch(job):
            losses.update({p.step: p.value for p in update.metrics if p.name == "loss"})
            if update.step >= 5 and not killed:
                kill(second)
                killed = True
        assert update.state == "finished", update.reason
        assert site() == 1
        found = fleet.result(job, losses)
    assert killed
    alone = run_local(replace(case), (0,))
    assert [f[0] for f in found.figures] == pytest.approx([f[0] for f in alone.figures], rel=1e-4)
