"""Workers and populations on a Ray cluster of this machine's: two nodes of one CPU each, real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
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
    options = {{"strategy": "{strategy}", "local_epochs": {epochs}, "clients": 6, "min_clients": 1}}
    return made({rounds}, evaluate_every=0, **options)
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
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(":")])
    )
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
    contained = "--sandbox require" if shutil.which("bwrap") else ""
    wanted = ["--workers", 1, "--cpus", 2, "--memory", "2GiB", "--wait", 3600, "--worker-options", contained]
    (before,) = atoll("ray", "up", address, "--token-file", token, *wanted)
    assert before["state"] == "joined"
    first = pool(client)
    cluster.do("remove")
    eventually(lambda: atoll("ray", "status")[0]["state"] == "waiting for room")
    shutil.rmtree(before["folder"])  # another machine has none of it
    cluster.do("add 2")
    eventually(lambda: atoll("ray", "status")[0]["state"] == "joined")
    assert len(pool(client) - first) == 1  # by the token
    atoll("ray", "down")
    assert running(tmp_path / "home") == []


class Simulation:
    """`atoll simulate` of one job with twelve clients on two hosts of one thread, under way."""

    def __init__(self, folder: Path, name: str, *words: object) -> None:
        self._out = folder / f"{name}.safetensors"
        asked: list[object] = ["simulate", folder / "job.py", "--population", 12, "--how", "dirichlet:1.0"]
        asked += ["--hosts", 2, "--cpus", 1, "--data", folder / "digits.safetensors", "--by", "label"]
        asked += ["--output", self._out, "--json", *words]
        with (folder / f"{name}.log").open("w") as log:
            self._process = subprocess.Popen(
                [*CLI, *map(str, asked)], stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT
            )

    def rounds(self) -> Iterator[int]:
        """Rounds that are over, as they are reported."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = json.loads(line)
            yield found.get("step", found.get("rounds", 0))

    def weights(self) -> dict[str, torch.Tensor]:
        self._process.communicate()
        assert self._process.returncode == 0
        return load_file(self._out)


def prepared(folder: Path, **job: object) -> None:
    (folder / "job.py").write_text(POPULATION.format(**job))
    save_file(samples(400, 1), folder / "digits.safetensors")


def different(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> list[str]:
    assert here.keys() == there.keys()
    return [name for name in here if not torch.equal(here[name], there[name])]


def test_two_simulations_on_ray_have_the_bits_of_one_on_this_machine_and_leave_nothing(
    cluster: Nodes, tmp_path: Path
) -> None:
    """There is room for one of them at a time, so one waits."""
    prepared(tmp_path, rounds=3, strategy="scaffold", epochs=2)
    here = Simulation(tmp_path, "here").weights()
    both = [Simulation(tmp_path, name, "--ray", cluster.address) for name in ("one", "other")]
    assert [different(here, each.weights()) for each in both] == [[], []]
    assert running(tmp_path / "home") == []
    assert list((tmp_path / "home").rglob("simulation-*")) == []


def test_a_population_that_loses_a_node_has_the_same_bits(cluster: Nodes, tmp_path: Path) -> None:
    prepared(tmp_path, rounds=5, strategy="fedavg", epochs=100)
    here = Simulation(tmp_path, "here").weights()
    under_way = Simulation(tmp_path, "there", "--ray", cluster.address)
    for rounds in under_way.rounds():
        if rounds >= 1:
            break
    cluster.do("remove")
    cluster.do("add 1")
    assert different(here, under_way.weights()) == []
    assert running(tmp_path / "home") == []
