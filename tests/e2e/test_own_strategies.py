"""A strategy that this project does not contain, on real workers: rounds, and a buffer without them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.federated_fleet import FederatedFleet
from tests.e2e.test_federated import finished, job, samples, submitted, weights
from tests.strategies.own.tutorial import ClientMomentum, tutorial


@pytest.fixture(scope="module")
def fleet() -> Iterator[FederatedFleet]:
    with FederatedFleet([samples(120, 1), samples(80, 2), samples(60, 3)]) as started:
        yield started


def test_a_strategy_of_the_job_s_file_learns_on_workers(fleet: FederatedFleet) -> None:
    name = submitted(fleet, job(5, "own", strategy=ClientMomentum.name, options={"alpha": 0.6}))
    last = finished(fleet, name)
    assert last.state == "finished", last
    assert last.federated.strategy == "client_momentum"
    assert {m.name: m.value for m in last.federated.central_metrics}["accuracy"] > 0.7


@pytest.mark.slow
def test_what_the_tutorial_writes_has_the_bits_of_ours_on_workers(fleet: FederatedFleet) -> None:
    tutorial()
    mine = submitted(fleet, job(3, "mine", strategy="controls", min_clients=3))
    finished(fleet, mine)
    ours = submitted(fleet, job(3, "ours", strategy="scaffold", min_clients=3))
    finished(fleet, ours)
    one, two = weights(fleet, mine), weights(fleet, ours)
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_it_runs_in_a_job_without_rounds(fleet: FederatedFleet) -> None:
    options = {"strategy": ClientMomentum.name, "buffer": 2}
    last = finished(fleet, submitted(fleet, job(8, "waitless", **options)))
    assert (last.state, last.step) == ("finished", 8)
    assert {m.name: m.value for m in last.federated.central_metrics}["accuracy"] > 0.7
