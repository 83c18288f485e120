"""Plans of several replicas: who is in which, how much each takes, what joining them costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.errors import AtollError, NotEnoughMemory, PlanError, UsageError
from atoll.gradient_exchange import buckets, trained_elements
from atoll.job import TrainingSpec
from atoll.plan import Plan
from atoll.program import stage_programs
from coordinator.planning import planner
from coordinator.planning.costs.fleet import Fleet, Uplink
from coordinator.planning.peers.replicas import best_plan, devices_named, exchanged_bytes
from coordinator.planning.peers.transfers import exchange_s, shares_of
from coordinator.planning.planner import PlanRequest
from coordinator.planning.problem import Problem
from coordinator.planning.search.op_fence import Effort
from tests.coordinator.planning.test_ways import DAG, fleet_of

FOUR = TrainingSpec(1, 8, blocks=4, replicas="2")


def planned(fleet: Fleet, training: TrainingSpec = FOUR, partitioner: str = "op_fence") -> Plan:
    return best_plan(PlanRequest("j", 1, DAG, None, training, fleet, partitioner))


def test_two_pairs_of_machines_that_hold_half_of_it_become_two_replicas() -> None:
    plan = planned(fleet_of(4, memory_mib=100, gflops=1, mbit=10_000, ms=0.1))
    assert [len(replica.stages) for replica in plan.replicas] == [2, 2]
    assert [replica.micros for replica in plan.replicas] == [(0, 4), (4, 8)]
    assert plan.exchange is not None
    assert len(plan.exchange.rates) == 4
    assert plan.prediction is not None
    assert [told.worker for told in plan.prediction.stages] == [place.worker for place in plan.places]
    assert "2 replicas exchange gradients" in plan.prediction.notes[0]


def test_replicas_of_other_speed_take_other_shares() -> None:
    fleet = fleet_of(2, memory_mib=1000, gflops=2, mbit=10_000, ms=0.1)
    slow = replace(fleet.devices[1], gflops={"": 0.7})
    plan = planned(replace(fleet, devices=(fleet.devices[0], slow)))
    assert [replica.micros for replica in plan.replicas] == [(0, 6), (6, 8)]


def test_auto_takes_one_pipeline_behind_thin_links_and_replicas_on_fast_ones() -> None:
    auto = replace(FOUR, replicas="auto")
    thin = planned(fleet_of(4, memory_mib=1000, gflops=2, mbit=2, ms=20), auto)
    assert len(thin.replicas) == 1
    fast = planned(fleet_of(4, memory_mib=1000, gflops=2, mbit=10_000, ms=0.1), auto)
    assert len(fast.replicas) == 4
    assert fast.prediction is not None
    assert thin.prediction is not None
    assert fast.prediction.step_s < thin.prediction.step_s


def test_bytes_of_the_exchange_are_those_of_the_messages() -> None:
    fleet = fleet_of(3, memory_mib=1000, gflops=2, mbit=1000, ms=0.1)
    cuttable = DAG.cuttable()
    plan = planned(fleet, FOUR, f"cut:{cuttable[len(cuttable) // 2]}@4/@4")
    request = PlanRequest("j", 1, DAG, None, FOUR, fleet)
    sent = exchanged_bytes(plan, Problem(DAG, FOUR, fleet))
    index = fleet.index
    found = np.zeros_like(sent)
    programs = [p for r in plan.replicas for p in stage_programs(DAG, [s.start for s in r.stages])]
    for rank, place in enumerate(plan.places):
        elements = trained_elements(programs[rank].parameters, DAG.parameters, request.training.optimizer)
        for bucket in buckets(plan, place.replica, [programs[rank]], elements):
            for action in bucket.collective.actions[place.replica]:
                if hasattr(action, "to"):
                    to = plan.places[bucket.holders[action.to]].worker
                    size = bucket.collective.segments[action.segment].size
                    found[index[place.worker], index[to]] += 4 * size
    assert found.sum() == pytest.approx(sent.sum(), rel=0.02)
    np.testing.assert_allclose(found, sent, rtol=0.05)


def two_clusters(mbit: float) -> Fleet:
    """Two pairs of machines, each pair on a fast network, with slower links between them."""
    fleet = fleet_of(4, memory_mib=1000, gflops=2, mbit=10_000, ms=0.1)
    site = np.array([0, 0, 1, 1])
    between = site[:, None] != site[None, :]
    rate = np.where(between, mbit * 1e6, fleet.bandwidth_bps)
    return replace(fleet, bandwidth_bps=rate, latency_s=np.where(between, 0.02, fleet.latency_s))


def test_replicas_at_two_sites_add_within_each_first_and_half_as_much_crosses() -> None:
    fleet = two_clusters(mbit=20)
    training = replace(FOUR, replicas="4")
    plan = planned(fleet, training)
    assert plan.exchange is not None
    assert plan.exchange.inner is not None
    assert plan.exchange.sites in ((0, 0, 1, 1), (1, 1, 0, 0))
    assert plan.prediction is not None
    assert "within 2 sites first" in plan.prediction.notes[0]
    problem = Problem(DAG, training, fleet)
    flat = replace(plan, exchange=replace(plan.exchange, inner=None, sites=()))
    apart = np.array([0, 0, 1, 1])[:, None] != np.array([0, 0, 1, 1])[None, :]
    crossing = [float(exchanged_bytes(one, problem)[apart].sum()) for one in (plan, flat)]
    assert crossing[0] <= 0.55 * crossing[1]
    # Links that share an uplink: predicted to be about twice as fast.
    uplinks = (Uplink("a", ("d0", "d1"), 20e6, 20e6), Uplink("b", ("d2", "d3"), 20e6, 20e6))
    behind = replace(fleet, uplinks=uplinks)
    took_s = [exchange_s(behind, exchanged_bytes(one, problem)) for one in (plan, flat)]
    assert took_s[0] <= 0.55 * took_s[1]


def test_sites_that_are_alike_are_searched_once_and_planned_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Fleet] = []
    honest = planner._searched

    def counted(request: PlanRequest, effort: Effort) -> object:
        searched.append(request.fleet)
        return honest(request, effort)

    monkeypatch.setattr(planner, "_searched", counted)
    fleet = replace(two_clusters(mbit=20), uplinks=(Uplink("a", ("d0", "d1"), 5e7, 5e7),))
    alike = replace(fleet, uplinks=(*fleet.uplinks, Uplink("b", ("d2", "d3"), 5e7, 5e7)))
    plans = [planned(alike), planned(fleet)]
    sites = ({"d0", "d1"}, {"d2", "d3"})
    once = sum({device.worker for device in part.devices} in sites for part in searched)
    assert once == 3, "one site of two that are alike, both where one has an uplink"
    monkeypatch.setattr(Fleet, "alike", lambda self, other: False)
    searched.clear()
    assert [planned(alike), planned(fleet)] == plans
    assert len(searched) > 3


def test_on_one_fast_network_the_exchange_is_flat() -> None:
    plan = planned(fleet_of(4, memory_mib=1000, gflops=2, mbit=10_000, ms=0.1), replace(FOUR, replicas="4"))
    assert plan.exchange is not None
    assert (plan.exchange.inner, plan.exchange.sites) == (None, ())


def test_given_cuts_name_shares_or_have_equal_ones() -> None:
    fleet = fleet_of(3, memory_mib=1000, gflops=2, mbit=1000, ms=0.1)
    middle = DAG.cuttable()[len(DAG.cuttable()) // 2]
    plan = planned(fleet, replace(FOUR, replicas="1"), f"cut:{middle}/")
    assert [[stage.start for stage in r.stages] for r in plan.replicas] == [[0, middle], [0]]
    assert [r.micros for r in plan.replicas] == [(0, 4), (4, 8)]
    assert [place.worker for place in plan.places] == [device.worker for device in fleet.devices]
    plan = planned(fleet, FOUR, f"cut:@2/{middle}@6")
    assert [r.micros for r in plan.replicas] == [(0, 2), (2, 8)]


@pytest.mark.parametrize(
    ("training", "partitioner", "error", "why"),
    [
        (replace(FOUR, blocks=1), "op_fence", UsageError, "2 replicas share out 1 blocks"),
        (replace(FOUR, replicas="4"), "op_fence", NotEnoughMemory, "4 replicas on 3 machines"),
        (FOUR, "cut:@3/@5", UsageError, "blocks end at"),
        (FOUR, "cut:@4/@5", UsageError, "end at micro-batches"),
        (FOUR, "cut:@x/@5", UsageError, "numbers of micro-batches"),
        (FOUR, "cut:@2/@2/@2/@2", PlanError, "more stages than the 3 devices"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_out_is_refused(
    training: TrainingSpec, partitioner: str, error: type[AtollError], why: str
) -> None:
    fleet = fleet_of(3, memory_mib=1000, gflops=2, mbit=1000, ms=0.1)
    with pytest.raises(error, match=why):
        planned(fleet, training, partitioner)


def test_a_fleet_without_room_for_two_says_so_and_auto_makes_one() -> None:
    fleet = fleet_of(3, memory_mib=60, gflops=2, mbit=1000, ms=0.1)
    with pytest.raises(NotEnoughMemory, match="no room for 2 replicas"):
        planned(fleet)
    assert len(planned(fleet, replace(FOUR, replicas="auto")).replicas) == 1


def test_shares_go_to_who_would_be_done_first() -> None:
    assert shares_of(8, [3.0, 1.0]) == (6, 2)
    assert shares_of(2, [9.0, 1.0]) == (1, 1)


def test_a_job_that_has_lost_machines_goes_on_with_fewer_replicas() -> None:
    fleet = fleet_of(3, memory_mib=60, gflops=1, mbit=10_000, ms=0.1)
    request = PlanRequest("j", 1, DAG, None, FOUR, fleet)
    with pytest.raises(NotEnoughMemory, match="no room for 2 replicas"):
        best_plan(request)
    assert len(best_plan(replace(request, version=2)).replicas) == 1


@pytest.mark.parametrize(
    ("partitioner", "devices"),
    [("op_fence", 1), ("cut:26,65", 3), ("cut:26,65:0,1,0", 2), ("cut:26@4/40,50@2", 5), ("cut:x", 1)],
)
def test_a_given_cut_names_its_devices(partitioner: str, devices: int) -> None:
    assert devices_named(partitioner) == devices
