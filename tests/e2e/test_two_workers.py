"""Two worker processes and a coordinator on loopback train what one stage in one process trains."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from atoll.job import Optimizer, TrainingSpec
from atoll.plan import Mask
from atoll.program import stage_programs
from benchmarks.oracle import Case, built_in, difference, random_starts, run_local
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from compressors import catalogue
from coordinator.client.prepare import prepare
from coordinator.messages.jobs import Phase
from tests.interrupts import interrupted, own_session

TRAINING = TrainingSpec(
    steps=5, n_micro=4, seed=3, optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5)
)


@pytest.fixture(scope="module")
def fleet() -> Iterator[LoopbackFleet]:
    with LoopbackFleet(2) as started:
        yield started


pytestmark = pytest.mark.usefixtures("one_thread")


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


@contextmanager
def guest(fleet: LoopbackFleet, name: str) -> Iterator[subprocess.Popen[Any]]:
    """A third worker, in the pool."""
    command = [sys.executable, "-m", *fleet.join_command(name)]
    log = fleet.state.parent / f"{name}.log"
    with log.open("wb") as output, own_session(command, stdout=output, stderr=output) as process:
        fleet._wait_for(3)
        yield process
    assert "worker.left" in fleet.log(name)
    assert "Traceback" not in fleet.log(name)


def states(fleet: LoopbackFleet) -> dict[str, str]:
    return {w.name: w.state for w in fleet.client.status().workers}


def test_ctrl_c_ends_an_idle_worker_with_a_goodbye_within_two_seconds(fleet: LoopbackFleet) -> None:
    with guest(fleet, "idle") as process:
        assert interrupted(process) == 0
        found = states(fleet)
    assert (found["worker0"], found["worker1"], found["idle"]) == ("pool", "pool", "left")


def test_ctrl_c_ends_a_worker_in_mid_step_within_two_seconds(fleet: LoopbackFleet) -> None:
    case = built_in("branches", replace(TRAINING, steps=200, n_micro=16), 0.1)
    starts = random_starts(case.dag, 3, random.Random(12))
    with guest(fleet, "busy") as process:
        job = fleet.client.submit(prepare(as_job(case), partitioner=cut_at(starts))).job
        with closing(fleet.client.watch(job)) as updates:
            # Steps follow one another without a pause: the next has begun.
            update = next(update for update in updates if update.step >= 2)
            assert len(update.stages) == 3
            assert interrupted(process) == 0
            # The job goes on when a third worker joins.
            waits = next(
                update for update in updates if "makes 3 stages, 2 devices are free" in update.reason
            )
            assert waits.state == Phase.PAUSED
            fleet.client.cancel(job)
        assert states(fleet)["busy"] == "left"
