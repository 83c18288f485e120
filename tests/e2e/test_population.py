"""Populations on real workers over loopback: hosts train many clients, and some are killed with kill -9."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.federated_fleet import COORDINATOR, ROOT, FederatedFleet
from coordinator.client.prepare import prepare
from tests.e2e.test_federated import job, samples
from tests.patience import HUNG_S
from worker.data.policy import UNSTATED
from worker.data.population import name_owner, part_dataset
from worker.data.registry import add_dataset, load_dataset

CLIENTS, DRAWN, ROUNDS, EPOCHS = 20, 8, 3, 200
FLOORS = ("--min-samples", "1", "--min-steps", "1", "--min-batch", "1", "--min-clients", "1")
DATA = samples(800, 1)


def parted(state_dir: Path, worker: str = "") -> Mapping[str, Any]:
    return part_dataset(state_dir, "digits", "dirichlet:1.0", CLIENTS, seed=5, field="label").rows_of()


def hosts(count: int) -> FederatedFleet:
    """So many workers that each speak for the same population."""
    return FederatedFleet([DATA] * count, parted=parted, options=FLOORS)


def trained(
    fleet: FederatedFleet, name: str, kills: Collection[int] = (), back: bool = True, **options: Any
) -> dict[str, Tensor]:
    """Weights after ``ROUNDS`` rounds; the last worker is killed in the rounds ``kills``, and started again
    where it comes ``back``. A round lasts long enough to be seen: a watch shows one at most every 0.2 s."""
    wanted = job(ROUNDS, name, **{"clients": DRAWN, "local_epochs": EPOCHS, "evaluate_every": 0, **options})
    started = fleet.client.submit(prepare(wanted)).job
    left, victim = set(kills), f"worker{len(fleet.clients) - 1}"
    for update in fleet.watch(started):
        if update.state == "training" and left and update.step >= min(left):
            left.discard(min(left))
            fleet.kill(victim)
            if back:
                fleet.join(victim)
    assert not left
    counted_once(fleet, started, options.get("clients", DRAWN))
    path = fleet.folder / f"{name}.safetensors"
    fleet.client.export(started, path)
    return load_file(path)


def counted_once(fleet: FederatedFleet, started: str, drawn: int, hosts: Collection[str] = ()) -> None:
    """Every client that a round drew is in exactly one sum of it; none but ``hosts`` is dropped."""
    closed = fleet.closed_rounds(started)
    assert [fact.round for fact in closed] == list(range(ROUNDS))
    for fact in closed:
        everybody = [client for entry in fact.participants.values() for client in entry["clients"]]
        assert len(everybody) == len(set(everybody)) == drawn
        assert all(any(f"lost: {host} " in why for host in hosts) for why in fact.dropped.values())


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_population_has_the_same_bits_on_two_hosts_and_where_one_is_killed() -> None:
    with hosts(2) as fleet:
        undisturbed = trained(fleet, "two", strategy="fedavg")
        assert same(trained(fleet, "killed", kills=(1,), back=False, strategy="fedavg"), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedavg", "scaffold"])
def test_twenty_clients_of_a_host_and_twenty_workers_give_the_same_bits(strategy: str) -> None:
    with hosts(1) as fleet:
        virtual = trained(fleet, "virtual", strategy=strategy, clients=CLIENTS)
        rows = parted(fleet.folder / "worker0")
    clients = [{name: np.asarray(array)[rows[client]] for name, array in DATA.items()} for client in rows]
    names = {f"worker{n}": client for n, client in enumerate(rows)}

    def named(state_dir: Path, worker: str) -> None:
        name_owner(state_dir, "digits", names[worker])

    with FederatedFleet(clients, parted=named, options=FLOORS) as fleet:
        real = trained(fleet, "real", strategy=strategy, clients=CLIENTS, min_clients=CLIENTS)
    assert same(real, virtual)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["off", "topk:4"])
def test_states_survive_a_host_that_is_killed_and_comes_back(codec: str) -> None:
    options = {"strategy": "scaffold", "clients": CLIENTS, "uplink": codec}
    with hosts(3) as fleet:
        undisturbed = trained(fleet, "three", **options)
        assert same(trained(fleet, "killed", kills=(1, 2), **options), undisturbed)
    with hosts(1) as fleet:
        assert same(trained(fleet, "one", **options), undisturbed)


@pytest.mark.slow
def test_an_asynchronous_job_on_hosts_has_the_bits_of_rounds_though_coordinator_and_host_are_killed() -> None:
    """With everybody in the buffer: what was taken counts once, and nobody is lost or counted twice."""
    options = {"clients": CLIENTS, "local_epochs": EPOCHS, "evaluate_every": 0}
    with hosts(3) as fleet:
        rounds = trained(fleet, "rounds", strategy="fedavg", **options)
        assert same(trained(fleet, "buffered", strategy="fedavg", buffer=CLIENTS, **options), rounds)
        started = fleet.client.submit(prepare(job(ROUNDS, "killed", buffer=CLIENTS, **options))).job
        left = {1: COORDINATOR, 2: "worker2"}
        for update in fleet.watch(started):
            if update.state == "training" and update.step in left:
                victim = left.pop(update.step)
                fleet.kill(victim)
                fleet.serve() if victim == COORDINATOR else fleet.join(victim)
        assert not left
        counted_once(fleet, started, CLIENTS, hosts=("worker2",))
        fleet.client.export(started, fleet.folder / "killed.safetensors")
        assert same(load_file(fleet.folder / "killed.safetensors"), rounds)


SIMULATED = """
from tests.e2e.test_federated import job as made

def job():
    return made(3, "simulated", strategy="scaffold", clients=8, local_steps=3)
"""


def simulated(folder: Path, hosts: int, *given: str) -> dict[str, Tensor]:
    """Weights of `atoll simulate` on so many hosts, which leaves nothing in ``folder``; people's own state is
    in ``folder / "home"``."""
    (folder / "job.py").write_text(SIMULATED)
    weights = folder / f"{hosts}.safetensors"
    command = [sys.executable, "-m", "coordinator.cli", "simulate", str(folder / "job.py"), "--json"]
    command += ["--population", str(CLIENTS), "--how", "dirichlet:1.0", "--hosts", str(hosts)]
    command += [*given, "-o", str(weights)]
    places = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "HOME": str(folder / "home")}
    done = subprocess.run(
        command,
        env=os.environ | places,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    assert (shown["rounds"], shown["clients"], shown["hosts"]) == (3, CLIENTS, hosts)
    assert not list(folder.glob("atoll-*"))
    return load_file(weights)


@pytest.mark.slow
def test_a_simulation_trains_what_is_registered_here_and_its_owner_is_asked_by_others_still(
    tmp_path: Path,
) -> None:
    save_file(DATA, tmp_path / "data.safetensors")
    state_dir = tmp_path / "home" / ".local" / "state" / "atoll-worker"
    add_dataset(state_dir, "digits", tmp_path / "data.safetensors", [])
    assert simulated(tmp_path, 1)
    assert load_dataset(state_dir, "digits").policy == UNSTATED


@pytest.mark.slow
def test_a_simulation_has_the_same_bits_on_one_host_and_on_two(tmp_path: Path) -> None:
    save_file(DATA, tmp_path / "data.safetensors")
    given = ("--data", str(tmp_path / "data.safetensors"))
    assert same(simulated(tmp_path, 1, *given), simulated(tmp_path, 2, *given))
