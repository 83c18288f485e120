"""Plans of peers with local steps: who takes part, what of a step each has, and what ``auto`` chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atoll.errors import NotEnoughMemory, PlanError, UsageError
from atoll.exchange import PairTable
from atoll.job import TrainingSpec
from atoll.plan import Plan
from coordinator.client.fleet_file import parse_fleet
from coordinator.planning.chosen import chosen_plan, exact_step_s, grown_fleet, shape
from coordinator.planning.costs.memory import MemoryModel
from coordinator.planning.costs.traffic import Traffic
from coordinator.planning.peers.gossip_plans import moved_share, renewed
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.problem import Problem
from tests.coordinator.planning.dags import gpt_like

DAG = gpt_like(layers=4)
TRAINING = TrainingSpec(steps=100, n_micro=8, blocks=8, exchange="diloco", local_steps=50)
ROOMY: dict[str, Any] = {"memory_mib": 8000, "gflops": 20}


def planned(
    n: int = 4, *, training: TrainingSpec = TRAINING, version: int = 1, cut: str = "", **of: Any
) -> Plan:
    fleet = parse_fleet({"default": of, "device": [{"name": f"d{i}"} for i in range(n)]})
    return chosen_plan(PlanRequest("j", version, DAG, None, training, fleet, cut or "op_fence"))


def grown(exchange: str, mbit: float) -> tuple[Plan, Plan]:
    """Plans of one machine, and of it and three others like it."""
    training = replace(TRAINING, exchange=exchange, local_steps=0, replicas="auto")
    devices = [{"name": f"d{i}"} for i in range(4)]
    fleet = parse_fleet({"default": {"mbit": mbit, "ms": 1, **ROOMY}, "device": devices})
    return grown_fleet(PlanRequest("j", 2, DAG, None, training, fleet, "op_fence"), ("d1",))


@pytest.mark.parametrize(("rule", "measured"), [("diloco", 14.1), ("sparseloco", 12.1), ("swarm", 15.2)])
def test_a_peer_has_room_for_what_it_holds_when_a_result_is_used(rule: str, measured: float) -> None:
    def held(exchange: str) -> tuple[float, float]:
        training = replace(TRAINING, exchange=exchange, blocks=1)
        model = MemoryModel(DAG, training, Traffic(DAG, training.optimizer))
        return model.state_bytes(0, len(DAG.ops)), model.trained(0, len(DAG.ops))[0]

    (alone, trained), (peer, _) = held("exact"), held(rule)
    assert measured * trained < peer - alone < 1.1 * measured * trained


def test_a_fleet_that_has_grown_is_worth_replicas_or_steps_of_their_own() -> None:
    own, more = grown("exact", mbit=10_000)
    assert [place.worker for place in own.places] == ["d1"]
    assert len(more.replicas) == 4
    assert "4 replicas" in shape(more)
    assert exact_step_s(more) < 0.5 * exact_step_s(own)
    own, more = grown("auto", mbit=5)
    assert more.local
    assert "among 4 machines" in shape(more)
    # What a step teaches counts, not only what it takes.
    assert more.prediction is not None
    assert more.prediction.step_s < exact_step_s(more) < exact_step_s(own)


def test_every_machine_that_holds_the_model_is_a_peer_with_a_share_of_a_step() -> None:
    plan = planned(mbit=50, ms=10, **ROOMY)
    assert plan.exchange is not None
    assert (plan.exchange.rule, plan.exchange.every) == ("diloco", 50)
    assert [replica.micros for replica in plan.replicas] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert all(len(replica.stages) == 1 for replica in plan.replicas)
    assert len(plan.exchange.rates) == 4
    assert plan.exchange.deadline_s >= 60.0
    assert plan.prediction is not None
    assert "another model than one machine's" in plan.prediction.notes[0]


def test_so_many_peers_as_are_asked_for_and_fewer_once_some_are_lost() -> None:
    two = replace(TRAINING, replicas="2")
    assert len(planned(training=two, mbit=50, ms=10, **ROOMY).replicas) == 2
    three = replace(TRAINING, replicas="3")
    assert len(planned(2, training=three, version=2, mbit=50, ms=10, **ROOMY).replicas) == 2
    assert planned(1, training=three, version=2, mbit=50, ms=10, **ROOMY).exchange is None


def test_shares_that_are_given() -> None:
    plan = planned(cut="cut:@1/@3/@4", mbit=50, ms=10, **ROOMY)
    assert [replica.micros for replica in plan.replicas] == [(0, 1), (1, 4), (4, 8)]


def test_machines_that_do_not_hold_the_model_cannot_be_peers() -> None:
    with pytest.raises(NotEnoughMemory, match="0 of 4 machines"):
        planned(memory_mib=40, gflops=50, mbit=50, ms=10)


def test_a_job_that_has_lost_its_large_machines_goes_on_with_one_exact_plan() -> None:
    """The others hold the model once, without what the rule keeps of it."""
    small: dict[str, Any] = {"memory_mib": 60, "gflops": 2, "mbit": 1000, "ms": 1}
    with pytest.raises(NotEnoughMemory, match="0 of 4 machines have that, 2 are needed"):
        planned(**small)
    plan = planned(version=2, **small)
    assert (plan.exchange, len(plan.replicas)) == (None, 1)
    exact = planned(training=replace(TRAINING, exchange="exact"), **small)
    assert plan.prediction is not None
    assert exact.prediction is not None
    assert [s.memory_bytes for s in plan.prediction.stages] == [
        s.memory_bytes for s in exact.prediction.stages
    ]


@pytest.mark.parametrize(
    ("n_micro", "replicas", "words"),
    [
        (1, "1", "2 peers share out the 1 .* give --set n_micro=2 or more, or --exchange"),
        (4, "8", "8 peers share out the 4 .* n_micro=8 or more, or --replicas 4"),
    ],
)
def test_peers_without_a_micro_batch_each_are_refused_for_good(
    n_micro: int, replicas: str, words: str
) -> None:
    few = replace(TRAINING, n_micro=n_micro, blocks=1, replicas=replicas)
    with pytest.raises(UsageError, match=words):
        planned(10, training=few, mbit=50, ms=10, **ROOMY)
    later = planned(10, training=few, version=2, mbit=50, ms=10, **ROOMY)
    assert len(later.replicas) <= n_micro


def test_who_asks_for_more_peers_than_hold_the_model_hears_how_many() -> None:
    six = replace(TRAINING, replicas="6")
    with pytest.raises(NotEnoughMemory, match="4 of 4 machines have that, 6 are needed"):
        planned(training=six, mbit=50, ms=10, **ROOMY)


def test_an_evaluation_of_the_slowest_peer_is_no_delay_of_a_round() -> None:
    devices = [{"name": f"d{i}", "gflops": 20 / (1 + i)} for i in range(2)]
    fleet = parse_fleet({"default": {"mbit": 1000, "ms": 1, "memory_mib": 8000}, "device": devices})

    def deadline_s(batches: int) -> float:
        training = replace(TRAINING, eval_batches=batches)
        plan = chosen_plan(PlanRequest("j", 1, DAG, DAG if batches else None, training, fleet))
        assert plan.exchange is not None
        return plan.exchange.deadline_s

    problem = Problem(DAG, replace(TRAINING, n_micro=1, blocks=1), fleet)
    slowest_s = float(problem.forward[:, -1].max())
    assert deadline_s(0) >= 60.0
    assert deadline_s(5000) - deadline_s(0) == pytest.approx(5000 * slowest_s)


def test_a_step_is_predicted_with_its_share_of_the_exchange() -> None:
    seldom = planned(mbit=8, ms=10, **ROOMY).prediction
    often = planned(training=replace(TRAINING, local_steps=1), mbit=8, ms=10, **ROOMY).prediction
    assert seldom is not None
    assert often is not None
    assert often.step_s > 5 * seldom.step_s


@pytest.mark.parametrize(
    ("fleet", "local", "replicas"),
    [
        ({"memory_mib": 40, "gflops": 50, "mbit": 50, "ms": 10}, False, 1),
        ({"memory_mib": 1000, "gflops": 2, "mbit": 10_000, "ms": 0.1}, False, 4),
        ({"memory_mib": 8000, "gflops": 2, "mbit": 10, "ms": 20}, True, None),
    ],
    ids=["tight memory", "fast links", "thin links"],
)
def test_auto_takes_what_teaches_most_and_says_what_it_was_held_against(
    fleet: dict[str, Any], local: bool, replicas: int | None
) -> None:
    plan = planned(training=replace(TRAINING, exchange="auto"), **fleet)
    assert plan.local is local
    assert replicas is None or len(plan.replicas) == replicas
    assert plan.prediction is not None
    (words,) = [note for note in plan.prediction.notes if note.startswith("exchange auto: ")]
    assert ("no two machines" in words) or ("of an exact one; " in words)


GOSSIP = replace(TRAINING, exchange="saps", local_steps=0)


def test_pairs_are_drawn_by_the_rates_that_the_fleet_has() -> None:
    plan = planned(training=GOSSIP, mbit=50, ms=10, **ROOMY)
    exchange = plan.exchange
    assert exchange is not None
    assert (exchange.rule, exchange.every, exchange.ratio) == ("saps", 1, 100.0)
    assert exchange.pairs is not None
    table = np.array(exchange.pairs.rates).reshape(4, 4)
    assert (table.diagonal() == 0.0).all()
    off = table[~np.eye(4, dtype=bool)]
    assert (off > 0.0).all()
    assert (8.0 * off < 50e6).all()  # a message's latency counts
    assert exchange.pairs.threshold <= off.max()


@pytest.mark.parametrize(("rule", "every"), [("swarm", 5), ("wagma", 1)])
def test_other_gossip_knows_no_rates(rule: str, every: int) -> None:
    exchange = planned(training=replace(GOSSIP, exchange=rule), mbit=50, ms=10, **ROOMY).exchange
    assert exchange is not None
    assert (exchange.rule, exchange.every, exchange.pairs) == (rule, every, None)


def test_a_round_of_gossip_is_predicted_to_be_much_shorter_than_one_of_models() -> None:
    def step_s(how: str) -> float:
        plan = planned(training=replace(GOSSIP, exchange=how, local_steps=1), mbit=20, ms=5, **ROOMY)
        assert plan.prediction is not None
        return plan.prediction.step_s

    assert 3 * step_s("saps") < min(step_s("wagma"), step_s("diloco"))


@pytest.mark.parametrize("how", ["saps:topk", "sparseloco:topk"])
def test_a_codec_that_a_rule_does_not_have_is_refused(how: str) -> None:
    with pytest.raises(PlanError, match="exchange"):
        planned(training=replace(GOSSIP, exchange=how), mbit=50, ms=10, **ROOMY)


def test_a_newer_table_keeps_the_thresholds_place_and_shows_what_moved() -> None:
    plan = planned(training=GOSSIP, mbit=50, ms=10, **ROOMY)
    exchange = plan.exchange
    assert exchange is not None
    assert exchange.pairs is not None
    before = replace(exchange.pairs, threshold=float(max(exchange.pairs.rates)))
    device = [{"name": f"d{i}"} for i in range(3)]
    slower = parse_fleet({"default": {"mbit": 5, "ms": 10, **ROOMY}, "device": device})
    now = renewed(plan, slower, [0, 1, 3], 1e5, before)
    table = np.array(now.rates).reshape(4, 4)
    assert (table[2] == 0.0).all()
    assert (table[:, 2] == 0.0).all()
    assert now.threshold <= table.max() < before.threshold
    assert moved_share(before, before) == 0.0


def test_pairs_that_are_alike_cross_the_threshold_by_chance_and_others_have_moved() -> None:
    before = PairTable((0.0, 9.5, 10.5, 0.0), 10.0)
    assert moved_share(before, PairTable((0.0, 10.5, 9.5, 0.0), 10.0)) == 0.0
    assert moved_share(before, PairTable((0.0, 20.0, 5.0, 0.0), 10.0)) == 1.0
    assert moved_share(before, PairTable((0.0, 19.0, 21.0, 0.0), 20.0)) == 0.0  # twice as fast, all of them
    assert moved_share(before, PairTable((0.0, 0.0, 5.0, 0.0), 10.0)) == 1.0  # of those that both know


def test_a_machine_alone_is_compared_by_the_whole_step_and_the_note_by_the_plans_seconds() -> None:
    """Each peer is planned for its share of the micro-batches; a machine alone would compute all of them."""
    auto = replace(GOSSIP, exchange="auto", local_steps=0)
    device = [{"name": f"d{i}", "memory_mib": 40 if i == 4 else 4000} for i in range(5)]
    fleet = parse_fleet({"default": {"mbit": 4, "ms": 20, "gflops": 20}, "device": device})
    plan = chosen_plan(PlanRequest("j", 1, DAG, None, auto, fleet))
    assert plan.local
    assert plan.prediction is not None
    alone = make_plan(
        PlanRequest("j", 1, DAG, None, replace(auto, exchange="exact"), fleet.subset(["d0"]))
    ).prediction
    assert alone is not None
    assert plan.prediction.single_machine_s == pytest.approx(alone.step_s, rel=0.05)
    assert any(f": {plan.prediction.step_s:.3g} s a step that counts" in n for n in plan.prediction.notes)
    assert "does not hold the model with what" in dict(plan.left_out)["d4"]
