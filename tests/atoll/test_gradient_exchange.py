"""Buckets of gradients that replicas exchange: every rank derives the same, whatever its cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from atoll.collective import TOTAL
from atoll.exchange import Exchange
from atoll.gradient_exchange import Bucket, buckets, joining, part_labels, trained_elements
from atoll.job import Optimizer, TrainingSpec
from atoll.microbatch import ScheduleName
from atoll.plan import Plan, Replica, StageSpec
from atoll.program import stage_programs
from benchmarks.oracle import DROPOUT, MAX_MICRO, Case, built_in, random_replicas
from tests.parameters import sampled

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
            [programs[rank]],
            trained_elements(programs[rank].parameters, found.states, found.training.optimizer),
        )
        for rank, place in enumerate(plan.places)
    }


def at_sites(plan: Plan, site_of: Sequence[int]) -> Plan:
    """The plan with its replicas at these sites."""
    sites = tuple(site_of[place.replica] for place in plan.places)
    return replace(plan, exchange=Exchange(inner=Exchange(), sites=sites))


@pytest.mark.parametrize("sites", [(), (0, 0, 1, 1), (0, 1, 1, 2), (0, 1, 0, 1)])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", sampled(1, ["gpt2", "llama"]))
def test_what_one_holder_sends_the_other_awaits(name: str, seed: int, sites: tuple[int, ...]) -> None:
    found, plan = random_replicas(case(name), random.Random(seed))
    if sites and plan.exchange is not None:
        plan = at_sites(plan, sites)
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
            for segment, label, source, _ in bucket.arriving:
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


def crossing(found: Case, plan: Plan, site_of: Sequence[int]) -> dict[tuple[int, int], int]:
    """Bytes of a step between each two sites, by direction."""
    bytes_of: dict[tuple[int, int], int] = {}
    for rank, held in of_all(found, plan).items():
        mine = plan.places[rank].replica
        for bucket in held:
            for action in bucket.collective.actions[mine]:
                if hasattr(action, "to"):
                    pair = (site_of[mine], site_of[action.to])
                    n_bytes = 4 * bucket.collective.segments[action.segment].size
                    bytes_of[pair] = bytes_of.get(pair, 0) + n_bytes
    return bytes_of


def test_between_two_clusters_of_two_an_inner_exchange_halves_what_crosses() -> None:
    given, plan = four_replicas()
    site_of = (0, 0, 1, 1)
    flat, inner = crossing(given, plan, site_of), crossing(given, at_sites(plan, site_of), site_of)
    model = 4 * sum(trained_elements(given.dag.parameters, given.states, given.training.optimizer).values())
    marks = 4 * len(given.dag.parameters)
    for way in ((0, 1), (1, 0)):  # the sum so far goes there, the total comes back, each once
        assert model <= inner[way] <= model + marks
    wide = [sum(n for (a, b), n in found.items() if a != b) for found in (inner, flat)]
    print(f"between the sites: {wide[0]} bytes a step, flat {wide[1]}: {wide[0] / wide[1]:.3f}")
    assert wide[0] <= 0.55 * wide[1]


def test_where_blocks_of_sites_alternate_the_exchange_stays_flat() -> None:
    given, plan = four_replicas()
    for site_of in ((0, 1, 0, 1), (0, 0, 0, 0), (0, 1, 2, 3), (0, 0, 1, 0)):
        assert of_all(given, at_sites(plan, site_of)) == of_all(given, plan)


def four_replicas() -> tuple[Case, Plan]:
    """A plan of four replicas, each of one block and the whole model."""
    given = case("gpt2")
    stages = [(StageSpec(0, len(given.dag.ops), 0, 0, f"r{at}", 0),) for at in range(4)]
    replicas = tuple(Replica((at, at + 1), stage) for at, stage in enumerate(stages))
    schedule = ScheduleName.ONE_F_ONE_B
    return given, Plan("j", 1, "", "", "", schedule, 4, replicas, blocks=4, exchange=Exchange())


def test_a_slow_gateway_carries_less() -> None:
    rates = (4.0, 1.0, 4.0, 4.0)
    exchange = Exchange(rates=rates, inner=Exchange(), sites=(0, 0, 1, 1))
    found = joining(exchange, range(4), {at: (at,) for at in range(4)}, 100)
    assert [segment.size for segment in found.segments] == [80, 20]
