"""Workers and populations on a Ray cluster of this machine's: two nodes of one CPU each, real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from coordinator.cli.processes import Processes
from coordinator.client.client import Client, connect
from tests.e2e.test_federated import samples
from tests.patience import eventually

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-P", "-m", "coordinator.cli"]
GPT = ROOT / "examples" / "gpt.py"
SETTINGS = ("WIDTH=64", "LAYERS=2", "MICRO_BATCH=16", "N_MICRO=2", "blocks=2", "eval_batches=0")
POPULATION = """
from tests.e2e.test_federated import job as made

def job():
    return made(3, clients=6, strategy="scaffold", local_epochs=2, evaluate_every=0, min_clients=1)
"""


class Nodes:
    """The nodes of a cluster, in a process of their own."""

    def __init__(self, log: IO[str], *cpus: int) -> None:
        command = [sys.executable, "-P", "-m", "tests.e2e.ray_nodes", *map(str, cpus)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        self.address = self._line()

    def do(self, what: str) -> None:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        self._line()

    def close(self) -> None:
        self.process.communicate()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the cluster's process has ended"
        return line


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray here: pip install 'atoll[ray]'")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # of the nodes, and of the workers' state on them
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with (tmp_path / "ray.log").open("w") as log:
        started = Nodes(log, 1, 1)
        monkeypatch.setenv("RAY_ADDRESS", started.address)
        try:
            yield started
        finally:
            started.close()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[tuple[Client, str, Path]]:
    """A coordinator outside the cluster, and its join token in a file."""
    state = tmp_path / "coordinator"
    serve = ["-m", "coordinator.cli", "serve", "--state-dir", str(state), "--json"]
    with Processes(tmp_path) as processes:
        processes.daemon("coordinator", "", [*serve, "--listen", "127.0.0.1:0"])
        made = json.loads(processes.first_line("coordinator"))
        token = tmp_path / "token"
        token.write_text(made["join_token"])
        with connect(state_dir=state) as client:
            yield client, made["address"], token


def atoll(*words: object) -> Any:
    done = subprocess.run([*CLI, *map(str, words), "--json"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def pool(client: Client) -> set[str]:
    return {w.worker for w in client.status().workers if w.state in ("pool", "assigned")}


def running(folder: Path) -> list[str]:
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if str(folder) in line]


def test_workers_on_ray_train_come_back_after_a_kill_and_all_end(
    cluster: Nodes, coordinator: tuple[Client, str, Path], tmp_path: Path
) -> None:
    client, address, token = coordinator
    before = atoll("ray", "up", address, "--token-file", token, "--wait", 3600)
    assert [(row["name"], row["state"]) for row in before] == [("atoll-0", "joined"), ("atoll-1", "joined")]
    folders = [Path(row["folder"]) for row in before]
    assert all(tmp_path / "home" in folder.parents for folder in folders)
    names = pool(client)
    assert len(names) == 2

    settings = [word for each in (*SETTINGS, "STEPS=30") for word in ("--set", each)]
    job = atoll("submit", GPT, "--state-dir", tmp_path / "coordinator", *settings, "--partitioner", "even")
    for update in client.watch(job["job"]):
        if update.step >= 3:
            break
    os.kill(before[1]["process"], signal.SIGKILL)  # the actor; its daemon does not outlive it
    assert client.wait(job["job"]).step == 30

    eventually(lambda: [row["state"] for row in atoll("ray", "status")] == ["joined", "joined"])
    after = atoll("ray", "status")
    assert after[0]["process"] == before[0]["process"]
    assert after[1]["process"] != before[1]["process"]
    assert after[1]["folder"] == before[1]["folder"]
    eventually(lambda: pool(client) == names)  # with the identity that its folder holds

    assert atoll("ray", "down", "--forget") == {"ended": ["atoll-0", "atoll-1"], "without_answer": []}
    assert atoll("ray", "status") == []
    assert running(tmp_path / "home") == []
    assert not any(folder.exists() for folder in folders)


def test_a_worker_of_a_node_that_dies_joins_anew_on_another(
    cluster: Nodes, coordinator: tuple[Client, str, Path], tmp_path: Path
) -> None:
    client, address, token = coordinator
    cluster.do("add 2")
    wanted = ["--workers", 1, "--cpus", 2, "--wait", 3600, "--worker-options", "--memory 2GiB"]
    (before,) = atoll("ray", "up", address, "--token-file", token, *wanted)
    assert before["state"] == "joined"
    cluster.do("remove")
    eventually(lambda: atoll("ray", "status")[0]["state"] == "waiting for room")
    cluster.do("add 2")
    eventually(lambda: atoll("ray", "status")[0]["state"] == "joined")
    assert len(pool(client)) == 1
    atoll("ray", "down")
    assert running(tmp_path / "home") == []


def simulated(folder: Path, name: str, *words: object) -> dict[str, torch.Tensor]:
    out = folder / f"{name}.safetensors"
    asked = ["--population", 12, "--how", "dirichlet:1.0", "--hosts", 2, "--cpus", 1, "--output", out]
    asked += ["--data", folder / "digits.safetensors", "--by", "label"]
    figures = atoll("simulate", folder / "job.py", *asked, *words)
    assert figures["rounds"] == 3
    return load_file(out)


def test_a_population_on_ray_has_the_bits_of_one_on_this_machine_and_leaves_nothing(
    cluster: Nodes, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(POPULATION)
    save_file(samples(400, 1), tmp_path / "digits.safetensors")
    here = simulated(tmp_path, "here")
    there = simulated(tmp_path, "there", "--ray", cluster.address)
    assert here.keys() == there.keys()
    assert [name for name in here if not torch.equal(here[name], there[name])] == []
    assert running(tmp_path / "home") == []
    assert list((tmp_path / "home").rglob("simulation-*")) == []
