"""The population benchmark on a few clients: equal bits, everybody counted once, states where needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import population as bench
from benchmarks.population import Run
from experiments.datasets import download
from tests.benchmarks.test_federated_mnist import SMALL


@pytest.mark.slow  # tests/inprocess/test_population.py shows it of a smaller net
def test_few_clients_end_in_the_same_bits_on_any_number_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "read", lambda name: {})
    monkeypatch.setattr("experiments.datasets.corpora.mnist", lambda files: SMALL)
    monkeypatch.setattr(bench, "DRAWN", 6)
    monkeypatch.setattr(bench, "ROUNDS", 3)
    one = Run("scaffold", 0, clients=15)
    runs = [bench.train(run) for run in (one, replace(one, hosts=2), replace(one, hosts=2, lost=2))]
    assert len({run["bits"] for run in runs}) == 1
    assert [run["rows"] for run in runs] == [18, 18, 18]
    assert all(run["upload_bytes"] <= 1.1 * run["hosts"] * run["model_bytes"] for run in runs)
    assert runs[0]["kept_bytes"] > 0
    assert bench.train(replace(one, rule="fedavg"))["kept_bytes"] == 0
    assert bench.train(replace(one, seed=1))["bits"] != runs[0]["bits"]
