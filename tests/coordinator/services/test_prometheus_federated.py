"""Metrics of federated jobs, and what a private job keeps to itself."""

from __future__ import annotations

from math import isclose

from atoll.privacy import Privacy
from coordinator.federated.state import FederationState
from coordinator.services.prometheus import federated_metrics
from strategies.privacy.accountant import planned
from tests.coordinator.federated.lone_machine import LoneMachine, spec
from tests.coordinator.federated.test_private_jobs import job, train

Found = dict[str, dict[tuple[str, ...], float]]


def metrics(*states: FederationState) -> Found:
    return {
        family.name: {tuple(sample.labels.values()): sample.value for sample in family.samples}
        for family in federated_metrics(states)
    }


def test_a_round_counts_who_was_asked_who_answered_and_who_was_refused() -> None:
    world = LoneMachine(spec(evaluate_every=0), bad={"c"})
    world.begin("a", "b", "c")
    assert metrics(world.state)["atoll_federated_clients"] == {}  # before the first round is closed
    world.now_s += 2.0
    world.updates("a", "b", "c")
    found = metrics(world.state)
    assert found["atoll_federated_rounds"] == {("job-1",): 1.0}
    assert found["atoll_federated_clients"] == {
        ("job-1", "asked"): 3.0, ("job-1", "answered"): 2.0, ("job-1", "refused"): 1.0,
    }  # fmt: skip
    assert found["atoll_federated_round_seconds"] == {("job-1",): 2.0}
    assert found["atoll_federated_epsilon"] == {}


def test_a_private_job_shows_rounds_and_epsilon_alone() -> None:
    privacy = Privacy(noise=1.0, sampling=0.5)
    world = job(1, sampling=0.5)
    world.begin("a", "b", "c", "d")
    train(world)
    found = metrics(world.state)
    assert found["atoll_federated_rounds"] == {("job-1",): 1.0}
    assert found["atoll_federated_clients"] == found["atoll_federated_round_seconds"] == {}
    assert isclose(found["atoll_federated_epsilon"]["job-1",], planned(privacy, 1))
