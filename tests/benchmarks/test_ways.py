"""The benchmark of ways: an exchange on simulated time takes what the planner says."""

from __future__ import annotations

import pytest

from benchmarks.ways import by_owners, carried_s, network_of
from coordinator.client.fleet_file import parse_fleet
from coordinator.planning.transfers import exchange_s, owner_transfers

SIZE = 200_000


@pytest.mark.parametrize("uplinks", [{}, {"up_mbit": 20, "down_mbit": 60}])
def test_an_exchange_takes_as_long_as_predicted(uplinks: dict[str, float]) -> None:
    document = {
        "default": {"mbit": 50, "ms": 5},
        "device": [{"name": f"d{i}", **uplinks} for i in range(5)],
    }
    fleet = parse_fleet(document)
    predicted = exchange_s(fleet, owner_transfers(fleet, [0, 2, 3, 4], 4.0 * SIZE))
    simulated = carried_s(network_of(fleet), [(by_owners(fleet, [0, 2, 3, 4], SIZE), SIZE)])
    assert simulated == pytest.approx(predicted, rel=0.15)


def test_several_at_once_share_the_links() -> None:
    fleet = parse_fleet({"default": {"mbit": 50, "ms": 0}, "device": [{"name": f"d{i}"} for i in range(3)]})
    one = [(by_owners(fleet, [0, 1, 2], SIZE), SIZE)]
    assert carried_s(network_of(fleet), one * 2) == pytest.approx(
        2 * carried_s(network_of(fleet), one), rel=0.05
    )
