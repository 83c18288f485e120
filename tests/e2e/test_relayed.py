"""Real workers that accept no inbound connection train one model through the coordinator's relay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import built_in, difference, run_local
from benchmarks.real_workers import LoopbackFleet
from tests.e2e.test_three_workers import middle

TRAINING = TrainingSpec(
    steps=5, n_micro=4, seed=3, optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5)
)


@pytest.fixture(scope="module")
def fleet() -> Iterator[LoopbackFleet]:
    with LoopbackFleet(2, options=("--no-inbound",)) as started:
        yield started


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_two_workers_without_inbound_connections_end_in_the_bits_of_one_stage(fleet: LoopbackFleet) -> None:
    case = built_in("branches", TRAINING, 0.1)
    found = fleet.run(case, (0, middle(case.dag.cuttable())))
    assert difference(found, run_local(case, (0,)), 1) == 0.0
    links = fleet.client.status().links
    assert [link.way for link in links] == ["relayed", "relayed"]
    assert all(link.shared.startswith("relay 127.0.0.1:") for link in links)
    assert all(link.bandwidth_bps > 1e6 for link in links)
