"""Peers that are pipelines of several machines: who is one together, what each joins, what it costs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations
from typing import Any

import numpy as np
import pytest

from atoll.errors import NotEnoughMemory
from atoll.exchange import Exchange, PairTable, wanted_exchange
from atoll.job import Optimizer, TrainingSpec
from atoll.plan import Piece, Plan, Replica, StageSpec, stage_of
from coordinator.client.fleet_file import parse_fleet
from coordinator.planning.chosen import chosen_plan, shape
from coordinator.planning.costs.fleet import Fleet
from coordinator.planning.peers.gossip_plans import (
    Range,
    held_by,
    rates_by_rank,
    renewed,
    round_of,
    site_numbers,
    whole_models,
    with_table,
)
from coordinator.planning.peers.local_plans import Known, _balanced, fastest
from coordinator.planning.peers.sketches import Sharing
from coordinator.planning.peers.transfers import exchange_s, shares_of
from coordinator.planning.planner import PlanRequest
from coordinator.planning.problem import Problem
from coordinator.planning.ways import WayKind, compare_ways
from tests.coordinator.planning.dags import chain_dag, gpt_like

DAG = gpt_like(layers=4)
TRAINING = TrainingSpec(steps=100, n_micro=8, blocks=8, exchange="diloco", local_steps=50)
GROUPS = [{"name": name, "mbit": 1000, "ms": 0.2, "up_mbit": 8, "down_mbit": 8} for name in ("east", "west")]


def sites(*memory_mib: int, **more: Any) -> Fleet:
    """Machines of these memories, in turn of two sites behind a thin uplink each."""
    devices = [
        {"name": f"{'ew'[at % 2]}{at // 2}", "group": ("east", "west")[at % 2], "memory_mib": held}
        for at, held in enumerate(memory_mib)
    ]
    default = {"mbit": 8, "ms": 10, "gflops": 20, **more}
    return parse_fleet({"default": default, "group": GROUPS, "device": devices})


def planned(fleet: Fleet, training: TrainingSpec = TRAINING, cut: str = "op_fence") -> Plan:
    return chosen_plan(PlanRequest("j", 1, DAG, None, training, fleet, cut))


def test_machines_of_a_site_that_hold_the_model_together_are_one_peer() -> None:
    fleet = sites(200, 200, 200, 200)
    plan = planned(fleet)
    assert plan.local
    assert [{stage.worker for stage in r.stages} for r in plan.replicas] == [{"e0", "e1"}, {"w0", "w1"}]
    assert [replica.micros for replica in plan.replicas] == [(0, 4), (4, 8)]
    assert all(replica.links for replica in plan.replicas)
    assert plan.exchange is not None
    assert len(plan.exchange.rates) == len(plan.places) == 4
    # A rank's rate is that of the line to the other site, whatever its own site's.
    assert max(plan.exchange.rates) <= 8e6 / 8
    assert plan.prediction is not None
    assert "2 peers of 2, 2 machines with diloco" in plan.prediction.notes[0]
    assert "among 2 peers of 2, 2 machines" in shape(plan)


def test_what_crosses_between_sites_is_the_rules_bytes_of_the_model_once_a_period() -> None:
    plan = planned(sites(200, 200, 200, 200))
    assert plan.prediction is not None
    assert plan.exchange is not None
    crossing = sum(
        link.bytes_per_step * plan.exchange.every
        for link in plan.prediction.links
        if link.source[0] == "e" and link.target[0] == "w"
    )
    model = Problem(DAG, TRAINING, sites(200)).memory.trained(0, len(DAG.ops))[0]
    assert crossing == pytest.approx(model, rel=1e-3)  # of two peers each sends half as parts, half as totals
    inside = {(a, b) for a, b in (("e0", "e1"), ("w0", "w1"))}
    pairs = {(link.source, link.target) for link in plan.prediction.links}
    assert inside <= pairs | {(b, a) for a, b in pairs}


def test_a_machine_that_holds_the_model_is_a_peer_beside_a_group() -> None:
    plan = planned(sites(600, 200, 1, 200))
    assert sorted(sorted(stage.worker for stage in r.stages) for r in plan.replicas) == [["e0"], ["w0", "w1"]]


def test_a_given_cut_is_that_of_the_peers() -> None:
    fleet = sites(400, 400, 400, 400)
    plan = planned(fleet, cut="cut:16@4/24@4")
    assert [[stage.start for stage in r.stages] for r in plan.replicas] == [[0, 16], [0, 24]]
    assert [[stage.worker for stage in r.stages] for r in plan.replicas] == [["e0", "w0"], ["e1", "w1"]]


@pytest.mark.parametrize(
    ("rule", "memory_mib"),
    [
        ("diloco", 200),
        ("streaming_diloco:int4_block", 200),
        ("sparseloco", 200),
        ("wagma", 120),
        ("saps", 120),
        ("swarm", 200),
    ],
)
def test_each_rule_that_joins_slices_takes_peers_of_several_stages(rule: str, memory_mib: int) -> None:
    plan = planned(sites(*[memory_mib] * 4), replace(TRAINING, exchange=rule, local_steps=0))
    assert [len(replica.stages) for replica in plan.replicas] == [2, 2]
    assert plan.exchange is not None
    assert plan.exchange.rule == rule.partition(":")[0]


def test_where_no_two_groups_hold_the_model_it_is_said_what_would_do() -> None:
    with pytest.raises(
        NotEnoughMemory, match=r"no 2 groups of machines have it together, of 400 MiB .* exact"
    ):
        planned(sites(100, 100, 100, 100))


def test_a_pair_of_pipelines_is_as_fast_as_the_last_of_its_ranges() -> None:
    """All of them are under way at once, each between the ranks that hold it."""
    fleet = sites(120, 120, 120, 120)
    whole = whole_models(fleet, (0, 1), 8e6)
    exchange = Exchange("saps", ratio=4.0)
    alone = with_table(fleet, whole, exchange, 0, search=False).pairs
    ranges = (Range(6e6, (0, 1)), Range(2e6, (2, 3)))
    both = with_table(fleet, whole._replace(ranges=ranges), exchange, 0, search=False).pairs
    assert alone is not None
    assert both is not None
    assert len(both.rates) == 4
    assert both.bps(0, 1, 2) == pytest.approx(alone.bps(0, 1, 2) * 8 / 6, rel=0.02)


def test_newer_rates_of_pipelines_are_of_the_ranks_that_have_ops_in_common() -> None:
    plan = planned(sites(400, 400, 400, 400), cut="cut:16@4/24@4")
    before = PairTable((0.0, 1.0, 1.0, 0.0), 0.5)
    ranks = [plan.places.index(place) for place in plan.places]
    device = [{"name": place.worker} for place in plan.places]
    slow = {"from": plan.places[0].worker, "to": plan.places[3].worker, "mbit": 1, "ms": 10}
    given = parse_fleet({"default": {"mbit": 50, "ms": 10}, "device": device, "link": [slow]})
    # The first stage of one, before op 16, has nothing in common with the other's second, from op 24 on.
    assert min(rate for rate in renewed(plan, given, ranks, 1e6, before).rates if rate) > 1e6
    slow |= {"to": plan.places[2].worker}
    given = parse_fleet({"default": {"mbit": 50, "ms": 10}, "device": device, "link": [slow]})
    assert min(rate for rate in renewed(plan, given, ranks, 1e6, before).rates if rate) < 0.2e6


def test_no_more_groups_than_are_asked_for() -> None:
    asked = replace(TRAINING, replicas="3")
    assert len(planned(sites(*[200] * 8), asked).replicas) == 3


def test_thin_sites_are_named_with_the_reason() -> None:
    fleet = sites(200, 200, 200, 200)
    request = PlanRequest("j", 1, DAG, None, replace(TRAINING, exchange="auto"), fleet)
    plan = chosen_plan(request)
    assert plan.local
    assert plan.prediction is not None
    (words,) = [note for note in plan.prediction.notes if note.startswith("exchange auto: ")]
    assert "links carry 950 Mbit/s inside a peer, 7.6 between two" in words
    named, *others = compare_ways(replace(request, training=TRAINING), inexact="auto")
    assert named.kind is WayKind.LOCAL_STEPS
    assert named.workers == tuple(replica.workers for replica in plan.replicas)
    assert "2 peers of 2, 2 stages" in named.text
    exact = [way for way in others if way.exact and len(way.workers) > 1]
    assert exact
    assert all(named.micros_per_s > 8 * way.micros_per_s for way in exact)


# ---------------------------------------------------------------- ranges


def cut_at(*starts: int, names: str, ops: int) -> Replica:
    stops = (*starts[1:], ops)
    return Replica(
        (0, 1), tuple(StageSpec(a, b, 0, 0, n, 1) for a, b, n in zip(starts, stops, names, strict=True))
    )


def test_ranges_are_what_no_cut_divides_and_add_up_to_the_model() -> None:
    dag = chain_dag(3, 30, skips=0.0)
    fleet = parse_fleet({"device": [{"name": name} for name in "abcde"]})
    three, two = cut_at(0, 10, 15, names="abc", ops=30), cut_at(0, 12, names="de", ops=30)
    held = held_by(fleet, [three, two], dag, Optimizer())
    assert {range_.holders for range_ in held.ranges} == {(0, 3), (1, 3), (1, 4), (2, 4)}
    memory = Problem(dag, TRAINING, fleet).memory
    by_holders = {range_.holders: range_.n_bytes for range_ in held.ranges}
    assert by_holders[1, 3] == memory.trained(10, 12)[0]
    assert sum(by_holders.values()) == memory.trained(0, 30)[0]
    assert not held.settled.any()


def test_a_tied_parameter_is_joined_by_its_first_holder_and_sent_on_once_a_period() -> None:
    dag = chain_dag(3, 24, tied=True, skips=0.0)
    fleet = parse_fleet({"default": {"mbit": 100, "ms": 2}, "device": [{"name": name} for name in "abcd"]})
    split, other = cut_at(0, 12, names="ab", ops=24), cut_at(0, 10, names="cd", ops=24)
    held = held_by(fleet, [split, other], dag, Optimizer())
    name = next(leaf.name for leaf in dag.ops[0].args if getattr(leaf, "name", "") in dag.parameters)
    tied = dag.parameters[name].meta.nbytes
    assert (held.settled[0, 1], held.settled[2, 3]) == (tied, tied)
    assert held.settled.sum() == 2 * tied
    sent, seconds = round_of(fleet, held, Exchange("diloco", every=10), 0)
    assert sent[0, 1] == tied
    assert seconds == pytest.approx(
        exchange_s(fleet, sent - held.settled) + exchange_s(fleet, held.settled, 1)
    )
    # A ring has both of its uses on one machine, and sends nothing on.
    ring = Replica(
        (0, 1),
        (stage_of("a", (Piece(0, 6, 0, 0, 1), Piece(18, 24, 0, 0, 0))), StageSpec(6, 18, 0, 0, "b", 1)),
    )
    assert held_by(fleet, [ring, other], dag, Optimizer()).settled[0].sum() == 0.0


def test_a_ranks_rate_is_of_those_it_exchanges_with() -> None:
    fleet = sites(200, 200, 200, 200, mbit=8)
    n = len(DAG.ops)
    replicas = [
        Replica((0, 4), (StageSpec(0, n // 2, 0, 0, "e0", 1), StageSpec(n // 2, n, 0, 0, "e1", 1))),
        Replica((4, 8), (StageSpec(0, n // 2, 0, 0, "w0", 1), StageSpec(n // 2, n, 0, 0, "w1", 1))),
    ]
    members = [fleet.index[stage.worker] for replica in replicas for stage in replica.stages]
    held = held_by(fleet, replicas, DAG, Optimizer())
    assert rates_by_rank(fleet, members, held) == [pytest.approx(0.95e6)] * 4
    without = held._replace(ranges=(Range(1.0, (0, 1)),))
    assert len(rates_by_rank(fleet, members, without)) == 4


# ---------------------------------------------------------------- against all groupings


def groupings(names: list[str]) -> Iterator[list[list[str]]]:
    """All ways to make disjoint groups of all names."""
    if not names:
        yield []
        return
    first, *rest = names
    for found in groupings(rest):
        yield [[first], *found]
        for at in range(len(found)):
            yield [*found[:at], [first, *found[at]], *found[at + 1 :]]


def random_sites(machines: int, seed: int) -> Fleet:
    draw = random.Random(seed)
    uplinks = [
        {
            "name": g,
            "mbit": draw.choice([100, 1000]),
            "ms": 1,
            "up_mbit": draw.choice([4, 20]),
            "down_mbit": 20,
        }
        for g in "ab"
    ]
    devices = [
        {"name": f"d{at}", "group": draw.choice("ab"), "gflops": draw.uniform(5, 30),
         "memory_mib": draw.choice([100, 150, 250])}
        for at in range(machines)
    ]  # fmt: skip
    return parse_fleet({"default": {"mbit": 50, "ms": 20}, "group": uplinks, "device": devices})


SEEDS = sorted({*range(16)} - {11})  # of 11 the best takes 1.39 times less


@pytest.mark.parametrize(
    ("machines", "seed"),
    [(4, 3), (4, 5), *(pytest.param(5, seed, marks=pytest.mark.slow) for seed in SEEDS)],
)
def test_no_other_grouping_of_a_fleet_is_a_tenth_faster(machines: int, seed: int) -> None:
    fleet = random_sites(machines, seed)
    request = PlanRequest("j", 1, DAG, None, TRAINING, fleet)
    exchange = wanted_exchange("diloco", 50)
    assert exchange is not None
    known: Known = {}
    found = fastest(request, exchange, known=known)
    speed = {device.worker: device.gflops[""] for device in fleet.devices}
    best = np.inf
    for count in range(2, machines + 1):
        for chosen in combinations(speed, count):
            for parts in groupings(list(chosen)):
                if len(parts) > 1:
                    shares = shares_of(8, [sum(speed[worker] for worker in part) for part in parts])
                    sharing = Sharing(0.0, [tuple(sorted(part)) for part in parts], list(accumulate(shares)))
                    try:
                        best = min(best, _balanced(request, exchange, sharing, None, known).step_s)
                    except NotEnoughMemory:
                        continue
    assert (found is None) == (best == np.inf)
    assert found is None or found.step_s < 1.1 * best


# ---------------------------------------------------------------- gateways


def between(plan: Plan) -> float:
    """Bytes that a round of a plan sends from one site to the other, east and west told by names."""
    assert plan.prediction is not None
    assert plan.exchange is not None
    links = (one for one in plan.prediction.links if one.source[0] != one.target[0])
    return plan.exchange.every * float(sum(link.bytes_per_step for link in links))


@pytest.mark.parametrize("rule", ["diloco:int8_block", "streaming_diloco:int4_block", "sparseloco"])
def test_peers_of_one_site_send_each_range_across_once(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four peers of two machines: half of what each of them would send, and no slower a step."""
    fleet, training = sites(*[230] * 8), replace(TRAINING, exchange=rule, local_steps=0, replicas="4")
    plan = planned(fleet, training)
    assert [len(replica.stages) for replica in plan.replicas] == [2] * 4
    assert plan.exchange is not None
    assert plan.exchange.inner == Exchange()
    assert plan.exchange.sites == tuple(
        plan.exchange.sites[0] if place.worker[0] == plan.places[0].worker[0] else 1 - plan.exchange.sites[0]
        for place in plan.places
    )
    assert plan.prediction is not None
    assert "by gateways of 2 sites" in " ".join(plan.prediction.notes)
    for room in ("local_plans", "sketches"):
        where = f"coordinator.planning.peers.{room}.through_gateways"
        monkeypatch.setattr(where, lambda fleet, held, *_: held)
    flat = planned(fleet, training)
    assert flat.exchange is not None
    assert flat.exchange.inner is None
    assert between(plan) == pytest.approx(between(flat) / 2, rel=0.05)
    assert flat.prediction is not None
    assert plan.prediction.step_s <= flat.prediction.step_s


def test_one_peer_a_site_has_no_gateway() -> None:
    plan = planned(sites(200, 200, 200, 200))
    assert plan.exchange is not None
    assert (plan.exchange.inner, plan.exchange.sites) == (None, ())


def test_a_round_by_gateways_takes_the_sites_links_and_then_the_line() -> None:
    """What is inside a site is under way before and after: the two times add up."""
    fleet = sites(200, 200, 200, 200)
    models = whole_models(fleet, (0, 1, 2, 3), 4e6)
    held = models._replace(sites=site_numbers(fleet))
    exchange = Exchange("diloco", every=10)
    sent, seconds = round_of(fleet, held, exchange, 0)
    numbers = site_numbers(fleet)
    across = sum(sent[a, b] for a in range(4) for b in range(4) if numbers[a] != numbers[b])
    assert across == pytest.approx(2 * 4e6)  # each site's sum or total of every element, whoever owns it
    assert seconds == pytest.approx(4e6 * 8 / 8e6 / fleet.payload_share + 2 * 0.01, rel=0.1)
    flat_s = round_of(fleet, models, exchange, 0)[1]
    assert flat_s == pytest.approx(2 * seconds, rel=0.1)
