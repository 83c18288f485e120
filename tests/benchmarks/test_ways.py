"""The benchmark of ways: an exchange on simulated time takes what the planner says."""

from __future__ import annotations

import pytest

from atoll.job import TrainingSpec
from benchmarks.ways import HERE, by_owners, carried_s, network_of, simulated_step_s
from coordinator.client.fleet_file import parse_fleet, read_fleet
from coordinator.planning.peers.transfers import exchange_s, owner_transfers
from coordinator.planning.planner import PlanRequest
from coordinator.planning.ways import WayKind, compare_ways
from tests.coordinator.planning.dags import gpt_like
from tests.parameters import sampled

SIZE = 200_000


@pytest.mark.parametrize("uplinks", [{}, {"up_mbit": 20, "down_mbit": 60}])
def test_an_exchange_takes_as_long_as_predicted(uplinks: dict[str, float]) -> None:
    document = {
        "default": {"mbit": 50, "ms": 5},
        "device": [{"name": f"d{i}", **uplinks} for i in range(5)],
    }
    fleet = parse_fleet(document)
    predicted = exchange_s(fleet, owner_transfers(fleet, [0, 2, 3, 4], 4.0 * SIZE))
    simulated = carried_s(network_of(fleet), [by_owners(fleet, [0, 2, 3, 4], SIZE)])
    assert simulated == pytest.approx(predicted, rel=0.15)


def test_several_at_once_share_the_links() -> None:
    fleet = parse_fleet({"default": {"mbit": 50, "ms": 0}, "device": [{"name": f"d{i}"} for i in range(3)]})
    one = [by_owners(fleet, [0, 1, 2], SIZE)]
    assert carried_s(network_of(fleet), one * 2) == pytest.approx(
        2 * carried_s(network_of(fleet), one), rel=0.05
    )


def test_two_that_leave_by_one_line_share_it() -> None:
    group = [{"name": "g", "mbit": 1000, "up_mbit": 8, "down_mbit": 8}]
    devices = [{"name": f"d{i}", **({"group": "g"} if i < 2 else {})} for i in range(4)]
    fleet = parse_fleet({"default": {"mbit": 50, "ms": 5}, "group": group, "device": devices})
    sent = owner_transfers(fleet, [0, 2], 4.0 * SIZE) + owner_transfers(fleet, [1, 3], 4.0 * SIZE)
    pairs = [by_owners(fleet, pair, SIZE) for pair in ([0, 2], [1, 3])]
    assert carried_s(network_of(fleet), pairs) == pytest.approx(exchange_s(fleet, sent), rel=0.15)
    one = carried_s(network_of(fleet), pairs[:1])
    assert carried_s(network_of(fleet), pairs) == pytest.approx(2 * one, rel=0.15)


@pytest.mark.parametrize("rule", sampled(1, ["diloco", "wagma"]))
def test_peers_of_several_machines_take_what_is_predicted(rule: str) -> None:
    training = TrainingSpec(steps=100, n_micro=4, blocks=4)
    fleet = read_fleet(HERE / "sites_thin.toml")
    request = PlanRequest("j", 1, gpt_like(layers=6), None, training, fleet)
    kinds = (WayKind.LOCAL_STEPS, WayKind.GOSSIP)
    ways = (way for way in compare_ways(request, inexact=rule) if way.kind in kinds)
    way = next(way for way in ways if not way.why_not)
    assert way.plan is not None
    assert max(len(replica.stages) for replica in way.plan.replicas) == 2
    assert simulated_step_s(way, request) == pytest.approx(way.step_s, rel=0.2)
