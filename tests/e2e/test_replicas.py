"""Replicas on real worker processes train the model that one machine with as many blocks trains.

The default tests of it share a fleet in ``test_three_workers``.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache

import pytest

from atoll.collective import Send
from atoll.exchange import Exchange
from atoll.gradient_exchange import ELEMENT_BYTES, Bucket, buckets, trained_elements
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from atoll.microbatch import ScheduleName
from atoll.plan import Plan, Replica, StageSpec
from atoll.program import stage_programs
from benchmarks.oracle import (
    DROPOUT,
    MAX_MICRO,
    REPLICATED,
    Case,
    built_in,
    difference,
    random_replicas,
    run_local,
    run_replicas,
)
from benchmarks.real_workers import LoopbackFleet, as_job, cuts_of
from coordinator.client.prepare import prepare
from coordinator.messages.facts import CheckpointStored, PlanAdopted, Reconfigured, StepCommitted, from_record
from coordinator.storage.journal import StoredJournal
from protos.convert import from_proto
from tests.e2e.test_reconfigured import disturb

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = TrainingSpec(
    steps=2, n_micro=MAX_MICRO, seed=17, optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5)
)
WORKERS = 4


@pytest.fixture(scope="module")
def fleet() -> Iterator[LoopbackFleet]:
    with LoopbackFleet(WORKERS) as started:
        yield started


@cache
def case(name: str) -> Case:
    return built_in(name, TRAINING, DROPOUT)


def plan_of(given: Case, blocks: int, *replicas: tuple[int, tuple[int, ...]]) -> tuple[Case, Plan]:
    """Replicas of (number of micro-batches, starts of their stages), and the case in as many blocks."""
    found, first = [], 0
    for count, starts in replicas:
        stages = tuple(
            StageSpec(a, b, 0, 0, f"{first}.{a}", 0)
            for a, b in zip(starts, (*starts[1:], 10**6), strict=True)
        )
        found.append(Replica((first, first + count), stages))
        first += count
    plan = Plan(
        "j", 1, "", "", "", ScheduleName.ONE_F_ONE_B, first, tuple(found), blocks=blocks, exchange=Exchange()
    )
    training = replace(given.training, n_micro=first, blocks=blocks)
    return replace(given, training=training, batches=lambda step: given.batches(step)[:first]), plan


def sent_bytes(bucket: Bucket) -> int:
    """Payload bytes that a bucket's holder sends in a step."""
    sends = (a for a in bucket.collective.actions[bucket.replica] if isinstance(a, Send))
    return ELEMENT_BYTES * sum(bucket.collective.segments[send.segment].size for send in sends)


def buckets_of(given: Case, plan: Plan, rank: int) -> tuple[Bucket, ...]:
    """What a rank exchanges, as every rank derives it."""
    place = plan.places[rank]
    starts = [stage.start for stage in plan.replicas[place.replica].stages]
    program = stage_programs(given.dag, starts)[place.stage]
    elements = trained_elements(program.parameters, given.states, given.training.optimizer)
    return buckets(plan, place.replica, [program], elements)


def drawn(seed: int) -> tuple[Case, Plan]:
    """A random plan of several replicas that the fleet has workers for."""
    source = random.Random(seed)
    while True:
        found, plan = random_replicas(case(REPLICATED[seed % len(REPLICATED)]), source)
        if len(plan.replicas) > 1 and len(plan.places) <= WORKERS:
            return found, plan


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_replicas_end_in_the_bits_of_one_machine(seed: int, fleet: LoopbackFleet) -> None:
    given, plan = drawn(seed)
    found = fleet.run_replicas(given, plan)
    assert fleet.plan is not None
    assert [r.micros for r in fleet.plan.replicas] == [r.micros for r in plan.replicas]
    assert [[s.start for s in r.stages] for r in fleet.plan.replicas] == [
        [s.start for s in r.stages] for r in plan.replicas
    ]
    assert difference(found, run_local(given, (0,)), 1) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [4, 3], ids=["one idle", "nobody idle"])
@pytest.mark.parametrize("lost", [0, 2], ids=["of the pipeline", "of the whole model"])
def test_no_step_and_no_bit_is_lost_with_a_rank_that_is_killed(lost: int, workers: int) -> None:
    """Who is idle takes it over; where nobody is, the replica that is whole goes on."""
    middle = case("gpt2").dag.cuttable()[len(case("gpt2").dag.cuttable()) // 2]
    longer = replace(case("gpt2"), training=replace(TRAINING, steps=60, checkpoint_every=10_000))
    given, plan = plan_of(longer, 4, (2, (0, middle)), (2, (0,)))
    holders: list[str] = []
    struck = False
    with LoopbackFleet(workers) as fleet:
        prepared = prepare(as_job(given), partitioner=cuts_of(plan), schedule=plan.schedule.value)
        job = fleet.client.submit(prepared).job
        losses: dict[int, float] = {}
        for update in fleet.client.watch(job):
            losses.update({p.step: p.value for p in update.metrics if p.name == "loss"})
            holders = [s.workers[0] for r in update.plan.replicas for s in r.stages] or holders
            if not struck and update.step > 10:
                struck = True
                disturb(fleet, holders[lost], signal.SIGKILL)
        assert update.state == "finished", update.reason
        found = fleet.result(job, losses)
        with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
            facts = [from_record(record) for record in journal.replay()]
    assert struck
    assert [fact.step for fact in facts if isinstance(fact, StepCommitted)] == list(range(60))
    assert sum(isinstance(fact, PlanAdopted) for fact in facts) == 1  # nothing began anew
    (moved,) = (fact for fact in facts if isinstance(fact, Reconfigured))
    assert len(moved.newcomers) == workers - 3
    if moved.plan is not None:
        (left,) = moved.plan.replicas
        assert (len(left.stages), left.micros) == (1 if lost == 0 else 2, (0, 4))
        assert [fact.step for fact in facts if isinstance(fact, CheckpointStored)] == [moved.step, 60]
    assert (moved.plan is None) == (workers > 3)
    assert difference(found, run_local(given, (0,)), 1) == 0.0


@pytest.mark.slow
def test_a_replica_that_lost_its_worker_is_whole_again_once_another_joins() -> None:
    """The job is cancelled once that is so, and its losses are those of one machine up to then."""
    training = replace(TRAINING, steps=3000, n_micro=4, blocks=2, replicas="2", checkpoint_every=10**6)
    given = replace(case("gpt2"), training=training, batches=lambda step: case("gpt2").batches(step)[:4])
    holders: list[str] = []
    struck, joined, again_at = False, False, 0
    with LoopbackFleet(2) as fleet:
        job = fleet.client.submit(prepare(as_job(given))).job
        for update in fleet.client.watch(job):
            holders = [stage.worker for stage in update.stages] or holders
            if not struck and update.step > 5:
                struck = True
                disturb(fleet, holders[0], signal.SIGKILL)
            if struck and not joined and len(holders) == 1:
                joined = True
                fleet._spawn("worker2", *fleet.join_command("worker2"))
            if joined and len(holders) == 2 and not again_at:
                again_at = update.step
            if again_at and update.step > again_at + 5 and update.state != "cancelled":
                fleet.client.cancel(job)
        with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
            facts = [from_record(record) for record in journal.replay()]
    assert update.state == "cancelled", update.reason
    moves = [fact for fact in facts if isinstance(fact, Reconfigured)]
    assert [(len(m.plan.replicas), len(m.newcomers)) for m in moves if m.plan is not None] == [(1, 0), (2, 1)]
    commits = [fact for fact in facts if isinstance(fact, StepCommitted)]
    assert [fact.step for fact in commits] == list(range(len(commits)))
    assert sum(isinstance(fact, PlanAdopted) for fact in facts) == 1
    short = replace(given, training=replace(training, steps=len(commits)))
    assert [fact.loss for fact in commits] == [row[0] for row in run_local(short, (0,)).figures]


@pytest.mark.slow
@pytest.mark.parametrize(
    "exchange",
    ["mean:int8_block", "powersgd:4", "acp_sgd:4", "random_k:4", "gtopk:4", "ok_topk:4", "demo:4"],
)
@pytest.mark.parametrize("lost", [0, 2], ids=["of the pipeline", "of the whole model"])
def test_a_rule_of_gradients_goes_on_in_its_bits_when_a_rank_is_killed(lost: int, exchange: str) -> None:
    """Who takes over begins with what the rank's rule had kept when the checkpoint was stored."""
    middle = case("gpt2").dag.cuttable()[len(case("gpt2").dag.cuttable()) // 2]
    signs = Optimizer(OptimizerName.SGD, lr=1e-3)
    optimizer = signs if exchange.startswith("demo") else TRAINING.optimizer
    training = replace(TRAINING, steps=40, checkpoint_every=6, exchange=exchange, optimizer=optimizer)
    given, plan = plan_of(replace(case("gpt2"), training=training), 4, (1, (0, middle)), (3, (0,)))
    adopted: list[Plan] = []
    struck = False
    with LoopbackFleet(4) as fleet:
        prepared = prepare(as_job(given), partitioner=cuts_of(plan), schedule=plan.schedule.value)
        job = fleet.client.submit(prepared).job
        losses: dict[int, float] = {}
        for update in fleet.client.watch(job):
            losses.update({p.step: p.value for p in update.metrics if p.name == "loss"})
            if update.HasField("plan"):
                adopted.append(from_proto(update.plan))
            if not struck and update.step > 15:
                struck = True
                disturb(fleet, adopted[-1].places[lost].worker, signal.SIGKILL)
        assert update.state == "finished", update.reason
        found = fleet.result(job, losses)
        with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
            facts = [from_record(record) for record in journal.replay()]
    assert struck
    assert [fact.step for fact in facts if isinstance(fact, StepCommitted)] == list(range(40))
    (moved,) = (fact for fact in facts if isinstance(fact, Reconfigured))
    assert (moved.plan, len(moved.newcomers)) == (None, 1)
    stored = [fact for fact in facts if isinstance(fact, CheckpointStored)]
    assert stored[0].step < moved.step
    kept = {name.rpartition("@")[2] for fact in stored for name in fact.tensors if "@" in name}
    assert kept == {"0", "1"}
    # Its bits are those of the plan that was adopted, whose owners have shares by their links.
    assert difference(found, run_replicas(given, adopted[0]), 1) == 0.0
