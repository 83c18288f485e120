"""Samples that are private, on real workers: owners' ledgers have what a job costs, and a budget holds."""

from __future__ import annotations

from collections import deque

import pytest

from atoll.privacy import SamplePrivacy
from benchmarks.federated_fleet import COORDINATOR, FederatedFleet
from coordinator.client.prepare import Prepared, prepare
from hostos.command_line import run
from strategies.privacy.samples import Charge, epsilon
from tests.e2e.test_federated import job, samples
from worker.cli import main as cli
from worker.federated.samples.ledger import SampleLedger

ROUNDS, STEPS, DELTA = 3, 4, 1e-5
pytestmark = pytest.mark.slow


def private(name: str) -> Prepared:
    privacy = SamplePrivacy(noise=1.0, clip=1.0, delta=DELTA)
    rule = {"local_steps": STEPS, "min_clients": 2, "evaluate_every": 0, "sample_privacy": privacy}
    return prepare(job(ROUNDS, name, **rule))


def spent(fleet: FederatedFleet, worker: str) -> tuple[Charge, ...]:
    return SampleLedger(fleet.folder / worker).spent("digits")


def test_what_a_private_job_costs_is_charged_by_each_owner_and_a_budget_refuses_the_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with FederatedFleet([samples(120, 1), samples(80, 2)]) as fleet:
        name = fleet.client.submit(private("private")).job
        for update in fleet.client.watch(name):
            if update.step >= 1:
                break
        fleet.kill(COORDINATOR)  # an update that is sent again is charged once
        fleet.serve()
        (last,) = deque(fleet.watch(name), maxlen=1)
        assert last.step == ROUNDS
        charges = {worker: spent(fleet, worker) for worker in ("worker0", "worker1")}
        for (charge,) in charges.values():
            assert charge.noise == 1.0
            assert charge.steps <= ROUNDS * STEPS  # as many updates as the job has rounds, whoever asks
            assert charge.steps >= (ROUNDS - 1) * STEPS
        rates = [charge.rate for (charge,) in charges.values()]
        assert 0.0 < rates[0] < rates[1] < 1.0  # of fewer samples a batch is a larger part
        here = ["--state-dir", str(fleet.folder / "worker1")]
        assert run(cli.app, ["jobs", "--all", "--json", *here]) == 0
        assert "epsilon 0 spent in other jobs on these data" in capsys.readouterr().out
        budget = epsilon(charges["worker1"], DELTA)
        assert run(cli.app, ["data", "policy", "digits", "--epsilon", f"{budget:.3f}", *here]) == 0
        second = fleet.client.submit(private("again")).job

        def refused() -> bool:
            update = next(j for j in fleet.client.status().jobs if j.job == second)
            return any("their owner allows" in client.reason for client in update.federated.clients)

        fleet.wait_until(refused, "the budget to refuse the second job")
        assert spent(fleet, "worker1") == charges["worker1"]
        assert fleet.client.cancel(second).state == "cancelled"
