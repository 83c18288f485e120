"""Populations on real workers over loopback: hosts that train many clients, and what becomes of a killed one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.federated_fleet import FederatedFleet
from coordinator.client.prepare import prepare
from tests.e2e.test_federated import job, samples
from worker.data.population import name_owner, part_dataset

CLIENTS, DRAWN, ROUNDS = 20, 8, 3
FLOORS = ("--min-samples", "1", "--min-steps", "1", "--min-batch", "1")


def parted(state_dir: Path, worker: str) -> None:
    part_dataset(state_dir, "digits", "dirichlet:1.0", CLIENTS, seed=5, field="label")


def hosts(count: int) -> FederatedFleet:
    """So many workers that each speak for the same population."""
    return FederatedFleet([samples(800, 1)] * count, parted=parted, options=FLOORS)


def trained(fleet: FederatedFleet, strategy: str, name: str, **options: Any) -> Mapping[str, Tensor]:
    wanted = job(ROUNDS, name, strategy=strategy, clients=DRAWN, local_steps=3, **options)
    started = fleet.client.submit(prepare(wanted)).job
    for last in fleet.watch(started):
        pass
    assert last.step == ROUNDS
    path = fleet.folder / f"{name}.safetensors"
    fleet.client.export(started, path)
    return load_file(path)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_population_has_the_same_bits_on_one_host_and_on_two() -> None:
    found = []
    with hosts(2) as fleet:
        found.append(trained(fleet, "fedavg", "two"))
        fleet.kill("worker1")
        fleet.wait_until(lambda: len(fleet.states("pool")) == 1, "one host to be left")
        found.append(trained(fleet, "fedavg", "one"))
    assert same(*found)
