"""Two worker processes and a coordinator on loopback train what one stage in one process trains."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from atoll.job import Optimizer, TrainingSpec
from atoll.plan import Mask
from atoll.program import stage_programs
from benchmarks.oracle import Case, built_in, difference, run_local
from benchmarks.real_workers import LoopbackFleet
from compressors import catalogue

TRAINING = TrainingSpec(
    steps=5, n_micro=4, seed=3, optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5)
)


@pytest.fixture(scope="module")
def fleet() -> Iterator[LoopbackFleet]:
    with LoopbackFleet(2) as started:
        yield started


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def middle(positions: tuple[int, ...]) -> int:
    return positions[len(positions) // 2]


def test_two_workers_end_in_the_bits_of_one_stage(fleet: LoopbackFleet) -> None:
    # Two branches, a skip, dropout, batch-norm, tied weights, clipping over both stages.
    case = built_in("branches", TRAINING, 0.1)
    found = fleet.run(case, (0, middle(case.dag.cuttable())))
    assert difference(found, run_local(case, (0,)), 1) == 0.0


def test_over_lossy_links_they_end_in_the_bits_of_the_same_codecs_in_one_process(
    fleet: LoopbackFleet,
) -> None:
    case = built_in("resnet", replace(TRAINING, compress="topk:8"), 0.1)
    start = next(p for p in case.dag.cuttable() if least_crossing(case, p) >= 2 * catalogue.MIN_BYTES)
    found = fleet.run(case, (0, start))
    assert fleet.plan is not None
    links = fleet.plan.links
    assert {(link.source, link.target, link.codec, link.mask) for link in links} == {
        (0, 1, "topk", Mask.NONE),
        (1, 0, "topk", Mask.SAME),
    }
    assert difference(found, run_local(case, (0, start), links=links), 1) == 0.0
    assert difference(found, run_local(case, (0,)), 1) > 0.0


def least_crossing(case: Case, start: int) -> int:
    """Bytes of the smallest value that crosses the cut."""
    return min((r.meta.nbytes for r in stage_programs(case.dag, (0, start))[1].received), default=0)


def test_a_worker_that_is_interrupted_says_goodbye_and_exits_with_zero(fleet: LoopbackFleet) -> None:
    worker = fleet._processes[-1]
    worker.send_signal(signal.SIGINT)
    assert worker.wait(10) == 0
    assert "worker.left" in fleet.log("worker1")
    states = {w.name: w.state for w in fleet.client.status().workers}
    assert states["worker0"] == "pool"
    assert states.get("worker1", "left") == "left"
