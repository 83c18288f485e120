"""Two sites of three real workers: one sum and one model a site, bits of flat rounds, a killed gateway."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.federated_fleet import EXPERIMENT, FederatedFleet
from tests.e2e.test_federated import finished, job, samples, submitted, weights

SITES = {f"worker{n}": "east" if n < 3 else "west" for n in range(6)}


@pytest.fixture(scope="module")
def fleet() -> Iterator[FederatedFleet]:
    policy = replace(EXPERIMENT, gateways=("site",))
    with FederatedFleet([samples(90, s) for s in range(6)], policy=policy, sites=SITES) as started:
        yield started


@pytest.mark.slow
def test_two_sites_send_two_sums_and_lose_a_gateway(fleet: FederatedFleet) -> None:
    options = {"evaluate_every": 0, "clients": 6}
    sites = submitted(fleet, job(4, "sites", gateways="worker0,worker3", min_clients=6, **options))
    finished(fleet, sites)
    told = [list(fact.participants.values()) for fact in fleet.closed_rounds(sites)]
    assert [len(each) for each in told] == [6] * 4
    assert [sum(t["bytes_up"] > 0 for t in each) for each in told] == [2] * 4
    assert [sum(t["bytes_down"] > 0 for t in each) for each in told] == [2] * 4
    flat = submitted(fleet, job(4, "flat", gateways="nobody", min_clients=6, **options))
    finished(fleet, flat)  # of its models every worker has the bits already
    alone = [fact.participants.values() for fact in fleet.closed_rounds(flat)]
    assert [sum(t["bytes_up"] > 0 for t in each) for each in alone] == [6] * 4
    expected, found = weights(fleet, flat), weights(fleet, sites)
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    killed = submitted(fleet, job(4, "killed", gateways="worker0,worker3", min_clients=4, **options))
    for update in fleet.client.watch(killed):
        if update.step >= 1:
            break
    fleet.kill("worker0")
    assert finished(fleet, killed).step == 4
    counted = [len(fact.participants) for fact in fleet.closed_rounds(killed)]
    assert set(counted) <= {5, 6}
    assert counted[-1] == 5
