"""Secure rounds of real workers: sums that nobody else could open, a worker and the coordinator killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from atoll.secure import Secure
from benchmarks.federated_fleet import COORDINATOR, FederatedFleet
from tests.e2e.test_federated import finished, job, samples, submitted, weights


@pytest.fixture(scope="module")
def fleet() -> Iterator[FederatedFleet]:
    with FederatedFleet([samples(90, seed) for seed in range(4)]) as started:
        yield started


@pytest.mark.slow
def test_a_secure_job_learns_and_ends_with_the_same_bits_after_the_coordinator_was_killed(
    fleet: FederatedFleet,
) -> None:
    """Every round closes with all four or is repeated: whoever is lost would be missing in one of the two."""
    options = {"secure": Secure(threshold=1.0), "evaluate_every": 0, "min_clients": 4}
    calm = submitted(fleet, job(5, "calm", **options))
    last = finished(fleet, calm)
    shown = last.federated
    assert (last.step, len(shown.clients)) == (5, 4)
    assert {m.name: m.value for m in shown.central_metrics}["accuracy"] > 0.6
    assert not last.HasField("loss")
    killed = submitted(fleet, job(5, "killed", **options))
    for update in fleet.client.watch(killed):
        if update.step >= 2:
            break
    fleet.kill(COORDINATOR)
    fleet.serve()
    assert finished(fleet, killed).step == 5
    expected, found = weights(fleet, calm), weights(fleet, killed)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_its_own_updates_alone(fleet: FederatedFleet) -> None:
    name = submitted(fleet, job(5, "one-lost", secure=Secure(), evaluate_every=0, uplink="random_k:4"))
    for update in fleet.client.watch(name):
        if update.step >= 1:
            break
    fleet.kill("worker3")
    assert finished(fleet, name).step == 5
    counted = [len(fact.participants) for fact in fleet.closed_rounds(name)]
    assert set(counted) <= {3, 4}
    assert all(fact.loss is None for fact in fleet.closed_rounds(name))
