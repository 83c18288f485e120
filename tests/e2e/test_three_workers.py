"""Three worker processes and a coordinator on loopback train what one process trains, in every way there is.

One fleet for all ways, as starting it takes longer than they do; each has more tests in a file of its own.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from atoll.exchange import Exchange
from atoll.job import Optimizer, TrainingSpec
from atoll.plan import Mask
from atoll.program import stage_programs
from benchmarks.oracle import Case, built_in, difference, random_starts, run_local
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from compressors import catalogue
from coordinator.client.prepare import prepare
from coordinator.messages.facts import RoundMet, StepCommitted, from_record
from coordinator.messages.jobs import Phase
from coordinator.storage.journal import StoredJournal
from tests.e2e.test_local_steps import CUT, gossip_ends_in_the_bits_of_its_rule, in_one_process, same
from tests.e2e.test_local_steps import TRAINING as LOCAL_STEPS
from tests.e2e.test_replicas import buckets_of, plan_of, sent_bytes
from tests.e2e.test_replicas import case as replicated
from tests.interrupts import interrupted, own_session

TRAINING = TrainingSpec(
    steps=5, n_micro=4, seed=3, optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5)
)


@pytest.fixture(scope="module")
def fleet() -> Iterator[LoopbackFleet]:
    with LoopbackFleet(3) as started:
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


def test_two_replicas_of_the_whole_model_end_in_the_bits_of_one_machine(fleet: LoopbackFleet) -> None:
    given, plan = plan_of(replicated("gpt2"), 4, (1, (0,)), (3, (0,)))
    found = fleet.run_replicas(given, plan)
    assert fleet.plan is not None
    assert [replica.micros for replica in fleet.plan.replicas] == [(0, 1), (1, 4)]
    for rank, place in enumerate(fleet.plan.places):
        spans = [
            s
            for s in fleet.client.trace(fleet.job)
            if (s.worker, s.kind, s.step) == (place.worker, "send", 1)
        ]
        assert sum(span.bytes for span in spans) == sum(
            sent_bytes(bucket) for bucket in buckets_of(given, fleet.plan, rank)
        )
    assert difference(found, run_local(given, (0,)), 1) == 0.0


@pytest.mark.slow  # in one process: tests/worker/stage/steps/test_gradient_joining.py
def test_a_pipeline_beside_a_whole_model_ends_in_the_bits_of_one_machine(fleet: LoopbackFleet) -> None:
    middle = replicated("gpt2").dag.cuttable()[len(replicated("gpt2").dag.cuttable()) // 2]
    given, plan = plan_of(replicated("gpt2"), 2, (2, (0, middle)), (2, (0,)))
    found = fleet.run_replicas(given, plan)
    assert fleet.plan is not None
    assert [len(replica.stages) for replica in fleet.plan.replicas] == [2, 1]
    assert difference(found, run_local(given, (0,)), 1) == 0.0


def test_peers_end_in_the_bits_of_the_rule_in_one_process(fleet: LoopbackFleet) -> None:
    case = built_in("gpt2", LOCAL_STEPS, 0.1)
    found = fleet.train(prepare(as_job(case), partitioner=CUT))
    assert fleet.plan is not None
    assert [replica.micros for replica in fleet.plan.replicas] == [(0, 1), (1, 2), (2, 4)]
    with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
        found_facts = [from_record(record) for record in journal.replay()]
    facts = [fact for fact in found_facts if getattr(fact, "job", "") == fleet.job]
    assert [fact.step for fact in facts if isinstance(fact, StepCommitted)] == [2, 5]
    assert [len(fact.included) for fact in facts if isinstance(fact, RoundMet)] == [3, 3]
    same(found, in_one_process(case, Exchange("diloco", every=3)))


def test_gossip_ends_in_the_bits_of_its_rule_in_one_process(fleet: LoopbackFleet) -> None:
    gossip_ends_in_the_bits_of_its_rule(fleet, "saps:4")


@contextmanager
def guest(fleet: LoopbackFleet, name: str) -> Iterator[subprocess.Popen[Any]]:
    """One worker more, in the pool."""
    command = [sys.executable, "-m", *fleet.join_command(name)]
    log = fleet.state.parent / f"{name}.log"
    with log.open("wb") as output, own_session(command, stdout=output, stderr=output) as process:
        fleet._wait_for(fleet.workers + 1)
        yield process
    assert "worker.left" in fleet.log(name)
    assert "Traceback" not in fleet.log(name)


def states(fleet: LoopbackFleet) -> dict[str, str]:
    return {w.name: w.state for w in fleet.client.status().workers}


def test_ctrl_c_ends_an_idle_worker_with_a_goodbye_within_two_seconds(fleet: LoopbackFleet) -> None:
    with guest(fleet, "idle") as process:
        assert interrupted(process) == 0
        found = states(fleet)
    assert found == {"worker0": "pool", "worker1": "pool", "worker2": "pool", "idle": "left"}


def test_ctrl_c_ends_a_worker_in_mid_step_within_two_seconds(fleet: LoopbackFleet) -> None:
    case = built_in("branches", replace(TRAINING, steps=200, n_micro=16), 0.1)
    starts = random_starts(case.dag, 4, random.Random(12))
    with guest(fleet, "busy") as process:
        job = fleet.client.submit(prepare(as_job(case), partitioner=cut_at(starts))).job
        with closing(fleet.client.watch(job)) as updates:
            # Steps follow one another without a pause: the next has begun.
            update = next(update for update in updates if update.step >= 2)
            assert len(update.stages) == 4
            assert interrupted(process) == 0
            # The job goes on when a fourth worker joins.
            waits = next(
                update for update in updates if "makes 4 stages, 3 devices are free" in update.reason
            )
            assert waits.state == Phase.PAUSED
            fleet.client.cancel(job)
        assert states(fleet)["busy"] == "left"
