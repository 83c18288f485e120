"""Ways compared: memory decides first, then seconds; a named way is the fastest of those that fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.collective import even_shares, owner_shares
from atoll.device_class import DeviceClass
from atoll.errors import NotEnoughMemory, UsageError
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from atoll.opdag import LeafRef, Source, StateMeta, TensorMeta
from coordinator.client.fleet_file import parse_fleet, read_fleet
from coordinator.planning.chosen import chosen_plan
from coordinator.planning.costs.fleet import Fleet
from coordinator.planning.peers.replicas import best_plan, with_blocks
from coordinator.planning.peers.transfers import exchange_s, owner_transfers, rank_rates, seconds, shares_of
from coordinator.planning.planner import PlanRequest
from coordinator.planning.ways import Way, WayKind, compare_ways
from strategies.exchanges.catalogue import elements_of
from tests.coordinator.planning.dags import gpt_like

DAG = gpt_like(layers=4)
TRAINING = TrainingSpec(steps=10, n_micro=8, seed=0)


def fleet_of(n: int, **default: object) -> Fleet:
    return parse_fleet({"default": default, "device": [{"name": f"d{i}"} for i in range(n)]})


def ways(fleet: Fleet, inexact: str = "") -> dict[WayKind, Way]:
    found = compare_ways(PlanRequest("j", 1, DAG, None, TRAINING, fleet), inexact=inexact)
    worths = [way.worth for way in found if not way.why_not]
    assert worths == sorted(worths, reverse=True)
    assert [bool(way.why_not) for way in found] == sorted(bool(way.why_not) for way in found)
    return {way.kind: way for way in found}


def best(fleet: Fleet, inexact: str = "") -> Way:
    return compare_ways(PlanRequest("j", 1, DAG, None, TRAINING, fleet), inexact=inexact)[0]


def test_where_no_machine_holds_the_model_it_is_a_pipeline() -> None:
    found = ways(fleet_of(5, memory_mib=40, gflops=50, mbit=50, ms=10), "auto")
    assert next(iter(found)) is WayKind.PIPELINE
    for kind in (WayKind.DATA_PARALLEL, WayKind.LOCAL_STEPS, WayKind.GOSSIP):
        assert "hold the whole model" in found[kind].why_not


def test_on_a_fast_network_the_whole_model_is_replicated() -> None:
    fleet = fleet_of(4, memory_mib=1000, gflops=2, mbit=10_000, ms=0.1)
    way = best(fleet)
    assert way.kind is WayKind.DATA_PARALLEL
    assert way.exact
    assert way.micros == (2, 2, 2, 2)


def test_machines_that_hold_half_of_it_become_replicas_of_short_pipelines() -> None:
    fleet = fleet_of(6, memory_mib=80, gflops=1, mbit=10_000, ms=0.1)
    way = best(fleet)
    assert way.kind is WayKind.REPLICAS
    assert sum(way.micros) == TRAINING.n_micro
    members = [worker for replica in way.workers for worker in replica]
    assert len(set(members)) == len(members)
    assert way.plan is not None
    assert [len(replica.stages) for replica in way.plan.replicas] == [len(held) for held in way.workers]


def test_behind_thin_links_local_steps_win_once_they_are_allowed() -> None:
    fleet = fleet_of(4, memory_mib=8000, gflops=20, mbit=10, ms=20)
    assert best(fleet).kind is WayKind.PIPELINE
    allowed = best(fleet, "auto")
    assert not allowed.exact
    assert allowed.kind in (WayKind.LOCAL_STEPS, WayKind.GOSSIP)
    named = best(fleet, "diloco")
    assert named.kind is WayKind.LOCAL_STEPS
    assert named.exchange is not None
    assert named.exchange.rule == "diloco"


def test_nobody_sends_more_a_day_than_an_uplink_carries() -> None:
    mbit = 20.0
    for way in ways(fleet_of(5, memory_mib=8000, gflops=20, mbit=mbit, ms=20), "auto").values():
        links = 4  # pairs of one machine, each with a rate of its own
        assert way.bytes_a_day <= links * mbit * 1e6 / 8 * 86_400


def test_nothing_that_fits_is_an_error_and_so_is_an_unknown_rule() -> None:
    with pytest.raises(NotEnoughMemory):
        ways(fleet_of(2, memory_mib=2))
    with pytest.raises(UsageError, match="'gossiping' is not known"):
        ways(fleet_of(2), "gossiping")


@pytest.mark.parametrize("name", ["tight", "sites", "thin"])
def test_the_benchmarks_fleets_can_be_read(name: str) -> None:
    assert len(read_fleet(f"benchmarks/fleets/{name}.toml").devices) >= 6


def test_shares_follow_speeds_and_add_up() -> None:
    assert shares_of(8, [1.0, 1.0, 2.0]) == (2, 2, 4)
    assert shares_of(3, [1.0, 100.0, 1.0]) == (1, 1, 1)
    assert sum(shares_of(31, [0.3, 0.5, 9.0, 1.0])) == 31


def test_transfers_are_an_owners_exchange() -> None:
    fleet = fleet_of(4, mbit=100, ms=10)
    sent = owner_transfers(fleet, [0, 1, 3], 3e6)
    assert sent[2].sum() == sent[:, 2].sum() == 0.0
    assert sent.sum(axis=1)[[0, 1, 3]] == pytest.approx([4e6] * 3)  # 2 (R - 1) / R
    alone = exchange_s(fleet, owner_transfers(fleet, [0], 3e6))
    assert alone == 0.0
    rate = 100e6 / 8 * fleet.payload_share
    assert exchange_s(fleet, sent) == pytest.approx(2e6 / rate + 2 * 0.01)


def test_a_shared_uplink_bounds_what_crosses_it() -> None:
    document = {
        "group": [{"name": "g", "up_mbit": 8, "down_mbit": 80}],
        "device": [{"name": f"d{i}", **({"group": "g"} if i < 2 else {})} for i in range(4)],
    }
    fleet = parse_fleet(document)
    sent = np.zeros((4, 4))
    sent[0, 2] = sent[1, 3] = 1e6
    sent[0, 1] = 1e6  # stays inside
    assert seconds(fleet, sent) == pytest.approx(2e6 / (1e6 * fleet.payload_share))


def test_shares_by_rates_are_no_slower_than_even_ones() -> None:
    generator = np.random.default_rng(5)
    for _ in range(20):
        document = {
            "device": [{"name": f"d{i}", "up_mbit": float(generator.uniform(5, 100))} for i in range(5)]
        }
        fleet = parse_fleet(document)
        rates = rank_rates(fleet, list(range(5)))
        weights = [1 + 3 * share for share in owner_shares(rates)]
        even = [1 + 3 * share for share in even_shares(5)]
        slowest = max(w / r for w, r in zip(weights, rates, strict=True))
        assert slowest <= max(w / r for w, r in zip(even, rates, strict=True)) * (1 + 1e-9)


def test_what_a_rule_keeps_counts_for_its_peers_alone_and_once() -> None:
    fleet = fleet_of(4, memory_mib=2000, gflops=2, mbit=100, ms=5)

    def compared(exchange: str) -> tuple[Way, ...]:
        training = replace(TRAINING, exchange=exchange)
        return compare_ways(PlanRequest("j", 1, DAG, None, training, fleet), inexact="diloco")

    without = [tuple(replace(way, options="") for way in compared(how)) for how in ("diloco", "exact")]
    assert without[0] == without[1]
    by_kind = {way.kind: way for way in compared("diloco")}
    assert by_kind[WayKind.PIPELINE].memory_share < by_kind[WayKind.LOCAL_STEPS].memory_share


def test_a_model_whose_training_writes_buffers_is_no_peers() -> None:
    reads = replace(DAG.ops[3], args=(*DAG.ops[3].args, LeafRef(Source.BUFFER, "mean")))
    mean = {"mean": StateMeta(TensorMeta((4,), "float32"), mutated=True)}
    dag = replace(DAG, ops=(*DAG.ops[:3], reads, *DAG.ops[4:]), buffers=mean)
    fleet = fleet_of(4, memory_mib=8000, gflops=20, mbit=10_000, ms=0.1)
    found = compare_ways(PlanRequest("j", 1, dag, None, TRAINING, fleet), inexact="auto")
    assert [way.kind for way in found] == list(WayKind)
    assert [bool(way.why_not) for way in found] == [False, True, True, True, True, True]
    assert "writes 1 buffers, as mean" in found[1].why_not


def asked(options: str) -> TrainingSpec:
    """The job's training with a way's options, as the command reads them."""
    words = options.split()
    sets = dict(zip(words[::2], words[1::2], strict=True))
    given = {name.removeprefix("--").replace("-", "_"): value for name, value in sets.items()}
    fields = {name: int(value) if name == "local_steps" else value for name, value in given.items()}
    return with_blocks(replace(TRAINING, **fields))  # type: ignore[arg-type]


SIX = {"memory_mib": 120, "gflops": 20_000, "mbit": 100, "ms": 20}
UNLIKE = {
    "default": {"memory_mib": 90, "mbit": 1000, "ms": 1},
    "device": [{"name": f"d{i}", "gflops": 1 + i, "memory_mib": 40 + 25 * i} for i in range(7)],
}
FLEETS = {
    "six": fleet_of(6, **SIX),
    "unlike": parse_fleet(UNLIKE),
    "lan": fleet_of(5, memory_mib=1000, gflops=2, mbit=10_000, ms=0.1),
    "halves": fleet_of(6, memory_mib=60, gflops=1, mbit=10_000, ms=0.1),
    "thin": fleet_of(4, memory_mib=8000, gflops=20, mbit=10, ms=20),
    **{name: read_fleet(f"benchmarks/fleets/{name}.toml") for name in ("tight", "sites")},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("six", "unlike", "lan", "sites") else name
        for name in FLEETS
    ],
)
def test_a_way_is_the_plan_that_its_options_make(name: str) -> None:
    request = PlanRequest("j", 1, DAG, None, TRAINING, FLEETS[name])
    possible = [way for way in compare_ways(request, inexact="auto") if not way.why_not]
    assert possible
    for way in possible:
        made = chosen_plan(replace(request, training=asked(way.options)))
        assert made.prediction is not None
        assert (way.options, way.step_s) == (way.options, made.prediction.step_s)
        assert way.plan == made
        if way.kind is WayKind.LOCAL_STEPS and way.exchange is not None:
            every = way.exchange.every * way.exchange.fragments
            assert f"--local-steps {every}" in way.options  # a step more has the same plan


def test_replicas_that_the_planner_refuses_are_not_offered() -> None:
    request = PlanRequest("j", 1, DAG, None, TRAINING, FLEETS["sites"])
    offered = {len(way.workers) for way in compare_ways(request) if not way.why_not}
    for count in range(2, 9):
        try:
            best_plan(replace(request, training=asked(f"--replicas {count}")))
        except NotEnoughMemory:
            assert count not in offered
    one = replace(request, fleet=fleet_of(1, memory_mib=8000))
    assert [way.kind for way in compare_ways(one) if not way.why_not] == [WayKind.PIPELINE]


def test_gradients_in_a_codec_win_where_exact_ones_take_many_steps_time() -> None:
    """And a plan says how they travel; a quarter of the bytes, another model, no sample that counts less."""
    fleet = fleet_of(2, memory_mib=8000, gflops=200, mbit=20, ms=0.5)
    found = ways(fleet, "mean")
    coded, exact = found[WayKind.CODED], found[WayKind.DATA_PARALLEL]
    assert coded.worth > 2.0 * exact.worth
    assert (coded.exact, coded.efficiency) == (False, 1.0)
    assert 0.24 < coded.bytes_a_day * coded.step_s / (exact.bytes_a_day * exact.step_s) < 0.27
    assert coded.memory_share > exact.memory_share
    assert coded.options == "--exchange mean:int8_block --replicas 2"
    assert "mean in int8_block" in coded.text
    assert coded.plan is not None
    assert coded.plan.prediction is not None
    assert any("by mean in int8_block" in note for note in coded.plan.prediction.notes)


def test_auto_takes_gradients_in_a_codec_where_nothing_teaches_more_a_second() -> None:
    """With as many replicas as the owner says, and too few steps between rounds for local ones to pay."""
    fleet = fleet_of(2, memory_mib=8000, gflops=200, mbit=100, ms=0.5)
    training = replace(TRAINING, exchange="auto", replicas="2", blocks=2)
    plan = chosen_plan(PlanRequest("j", 1, DAG, None, training, fleet))
    assert plan.prediction is not None
    words = [note for note in plan.prediction.notes if note.startswith("exchange auto")]
    assert any("mean:int8_block" in note for note in words)


def test_replicas_that_make_results_of_their_own_are_of_one_class_of_machines() -> None:
    fleet = fleet_of(4, memory_mib=8000, gflops=20, mbit=100, ms=0.5)
    classes = [DeviceClass("avx2", "2.13", 1 + (at == 3)) for at in range(4)]
    mixed = replace(
        fleet,
        devices=tuple(replace(d, device_class=c) for d, c in zip(fleet.devices, classes, strict=True)),
    )

    def workers(exchange: str) -> set[str]:
        training = replace(TRAINING, exchange=exchange, replicas="3", blocks=4)
        plan = best_plan(PlanRequest("j", 1, DAG, None, training, mixed))
        return {place.worker for place in plan.places}

    assert workers("acp_sgd:4") == {device.worker for device in mixed.devices[:3]}
    assert len(workers("mean:int8_block")) >= 3


def test_a_rule_of_signs_has_replicas_where_one_pipeline_would_be_faster() -> None:
    """What a machine alone makes are gradients, and the optimizer takes signs."""
    fleet = fleet_of(2, memory_mib=8000, gflops=200, mbit=1, ms=20)
    plain = Optimizer(OptimizerName.SGD)
    for how, count in (("gtopk:10", 1), ("demo:10", 2)):
        training = with_blocks(replace(TRAINING, exchange=how, optimizer=plain))
        plan = chosen_plan(PlanRequest("j", 1, DAG, None, training, fleet))
        assert (how, len(plan.replicas)) == (how, count)


def test_a_rule_of_few_elements_is_planned_along_its_tree() -> None:
    """Of eight replicas the root sends what it chose three times, a leaf once to where it belongs."""
    fleet = fleet_of(8, memory_mib=8000, gflops=200, mbit=20, ms=0.5)
    training = replace(TRAINING, exchange="gtopk:50", replicas="8", blocks=8)
    plan = chosen_plan(PlanRequest("j", 1, DAG, None, training, fleet))
    assert plan.prediction is not None
    assert any("by gtopk of ratio 50" in note for note in plan.prediction.notes)
    sent: dict[str, int] = {}
    for link in plan.prediction.links:
        sent[link.source] = sent.get(link.source, 0) + link.bytes_per_step
    by_replica = [sent[replica.workers[0]] for replica in plan.replicas]
    whole = 4 * sum(elements_of((state.meta.shape,)) for state in DAG.parameters.values())
    assert by_replica[0] == pytest.approx(3 * whole / 50, rel=0.02)
    assert by_replica[7] == pytest.approx(whole / 50, rel=0.02)
