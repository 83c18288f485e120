"""What a federated job's process sees of its host, and that the host outlives it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from benchmarks.federated_fleet import COORDINATOR
from tests.e2e.contained import WAYS, HostileFederation, assert_no_torch, need_sandbox
from tests.e2e.test_federated import finished, job, samples, submitted

pytestmark = pytest.mark.slow
SEEN = {
    "contained": "readable: own data, own folder",
    "bare": "readable: key, other data, other folder, own data, own folder, secret",
}


@pytest.fixture(scope="module", params=WAYS)
def fleet(request: pytest.FixtureRequest) -> Iterator[HostileFederation]:
    need_sandbox(request.param)
    with HostileFederation([samples(120, 1), samples(80, 2)], request.param) as started:
        yield started


def daemons(fleet: HostileFederation) -> list[int]:
    return [process.pid for name, process in fleet.processes.items() if name != COORDINATOR]


def test_it_sees_its_own_data_and_folder_and_no_other(
    fleet: HostileFederation, request: pytest.FixtureRequest
) -> None:
    before = daemons(fleet)
    name = submitted(fleet, job(3, "looks", min_clients=2))
    wanted = SEEN[str(request.node.callspec.params["fleet"])]

    def shown() -> bool:
        lines = [json.loads(line.fields_json) for line in fleet.client.logs(name)]
        return any(str(line.get("reason", "")).endswith(wanted) for line in lines)

    fleet.wait_until(shown, "what it sees")
    fleet.client.cancel(name)
    assert daemons(fleet) == before
    assert finished(fleet, submitted(fleet, job(3, "honest", min_clients=2))).step == 3


def test_the_daemons_of_a_federated_job_map_no_torch(fleet: HostileFederation) -> None:
    for _ in fleet.watch(submitted(fleet, job(3, "honest", min_clients=2))):
        assert_no_torch(daemons(fleet))


def test_a_crash_costs_a_round_and_no_daemon(fleet: HostileFederation) -> None:
    before = daemons(fleet)
    name = submitted(fleet, job(3, "dies", min_clients=2, deadline_s=20.0))
    assert finished(fleet, name).step == 3
    assert daemons(fleet) == before
    reasons = " ".join(line.fields_json for line in fleet.client.logs(name) if line.event == "client.dropped")
    assert "the compute process ended (SIGSEGV" in reasons
