"""Buckets of gradients that replicas exchange: every rank derives the same, whatever its cut."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from atoll.collective import TOTAL
from atoll.exchange import Exchange
from atoll.gradient_exchange import Bucket, buckets, part_labels, trained_elements
from atoll.job import Optimizer, TrainingSpec
from atoll.plan import Plan
from atoll.program import stage_programs
from benchmarks.oracle import DROPOUT, MAX_MICRO, Case, built_in, random_replicas

TRAINING = TrainingSpec(1, MAX_MICRO, 3, Optimizer())


@cache
def case(name: str) -> Case:
    return built_in(name, TRAINING, DROPOUT)


def of_all(found: Case, plan: Plan) -> dict[int, tuple[Bucket, ...]]:
    """Every rank's buckets."""
    programs = [p for r in plan.replicas for p in stage_programs(found.dag, [s.start for s in r.stages])]
    return {
        rank: buckets(
            plan,
            place.replica,
            programs[rank],
            trained_elements(programs[rank].parameters, found.states, found.training.optimizer),
        )
        for rank, place in enumerate(plan.places)
    }


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_one_holder_sends_the_other_awaits(name: str, seed: int) -> None:
    found, plan = random_replicas(case(name), random.Random(seed))
    seen = of_all(found, plan)
    if len(plan.replicas) == 1:
        assert not any(seen.values())
        return
    sent, awaited, once = set(), set(), []
    for rank, held in seen.items():
        mine = plan.places[rank].replica
        for bucket in held:
            assert bucket.holders[mine] == rank
            if not mine:
                once += bucket.names
            for action in bucket.collective.actions[mine]:
                if hasattr(action, "to"):
                    size = bucket.collective.segments[action.segment].size
                    sent.add((rank, bucket.holders[action.to], bucket.op, action.segment, action.label, size))
            for segment, label, source in bucket.arriving:
                size = bucket.collective.segments[segment].size
                awaited.add((bucket.holders[source], rank, bucket.op, segment, label, size))
    assert sent == awaited
    keys = [
        (to, op, segment if label == TOTAL else label, label == TOTAL)
        for _, to, op, segment, label, _ in sent
    ]
    assert len(set(keys)) == len(keys), "two messages of one key"
    trained = trained_elements(found.dag.parameters, found.states, found.training.optimizer)
    assert sorted(once) == sorted(trained)  # each gradient is in one bucket


def test_a_replica_that_begins_the_step_has_one_part_and_others_one_for_each_block() -> None:
    _, plan = random_replicas(case("gpt2"), random.Random(0))
    while len(plan.replicas) < 3 or plan.blocks < 4:
        _, plan = random_replicas(case("gpt2"), random.Random(plan.n_micro * 31 + plan.blocks))
    labels = [part_labels(plan, number) for number in range(len(plan.replicas))]
    assert labels[0] == (0,)
    assert sorted(sum(labels[1:], ())) == list(range(labels[1][0], plan.blocks))


def test_gradients_are_merged_up_to_the_size_of_a_bucket_and_never_within_an_op() -> None:
    given, plan = random_replicas(case("gpt2"), random.Random(5))
    assert plan.exchange is not None
    sizes = {}
    for n_bytes in (1, 1 << 15, 1 << 30):
        held = of_all(given, replace(plan, exchange=Exchange(bucket_bytes=n_bytes)))[0]
        sizes[n_bytes] = len(held)
        ops = [bucket.op for bucket in held]
        assert ops == sorted(ops, reverse=True)
        assert all(4 * b.elements <= n_bytes or len(set(b.names)) <= 2 for b in held)
    assert sizes[1] > sizes[1 << 15] > sizes[1 << 30]
