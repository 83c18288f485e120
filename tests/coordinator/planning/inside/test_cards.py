"""The same machines with other workers: memory, rates and what is shared stay as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coordinator.client.fleet_file import parse_fleet
from coordinator.planning.costs.fleet import Mesh
from coordinator.planning.inside.cards import card_fleet, joined_fleet, near_cards

RACK = {"name": "rack", "devices": 4, "memory_mib": 100, "inside_gbps": 5, "inside_us": 30}
HOME = {"name": "home", "memory_mib": 50, "up_mbit": 20}


def grouped(mbit: float = 40_000, ms: float = 0.01, *more: dict[str, Any]) -> dict[str, Any]:
    cards = [{"name": f"gpu{n}", "group": "box", "memory_mib": 100} for n in range(3)]
    group = {"name": "box", "mbit": mbit, "ms": ms, "up_mbit": 500}
    return {"group": [group], "device": [*cards, {"name": "home"}, *more]}


def test_cards_of_a_site_have_its_memory_and_the_rates_of_inside_and_share_its_links() -> None:
    fleet = parse_fleet({"device": [HOME, RACK, {"name": "far"}], "default": {"mbit": 100, "ms": 7}})
    found = card_fleet(fleet, ["rack"])
    assert [device.worker for device in found.devices] == ["home", *(f"rack/{n}" for n in range(4)), "far"]
    assert found.devices[0] == fleet.devices[0]
    assert {(d.memory_limit_bytes, d.mesh) for d in found.devices[1:5]} == {(100 * 2**20, None)}
    one, other, home, far = (found.index[name] for name in ("rack/0", "rack/3", "home", "far"))
    assert found.effective_bps[one, other] == pytest.approx(8 * 5e9)
    assert found.latency_s[one, other] == pytest.approx(30e-6)
    was = fleet.index
    for end, name in ((home, "home"), (far, "far")):
        assert found.effective_bps[one, end] == fleet.effective_bps[was["rack"], was[name]]
        assert found.effective_bps[end, one] == fleet.effective_bps[was[name], was["rack"]]
        assert found.latency_s[one, end] == 7e-3
    assert found.effective_bps[home, far] == fleet.effective_bps[was["home"], was["far"]]
    shared = {line.name: line for line in found.uplinks}
    assert shared["home"] == fleet.uplinks[0]
    assert shared["rack"].members == tuple(f"rack/{n}" for n in range(4))
    assert shared["rack"].up_bps == 100e6


def test_cards_are_behind_the_uplink_that_their_site_has() -> None:
    fleet = parse_fleet({"device": [{**RACK, "up_mbit": 30, "down_mbit": 60}, HOME]})
    (rack, home) = card_fleet(fleet, ["rack"]).uplinks
    assert (rack.members, rack.up_bps, rack.down_bps) == (tuple(f"rack/{n}" for n in range(4)), 30e6, 60e6)
    assert home.members == ("home",)


def test_alike_cards_of_a_group_with_fast_links_may_be_one_worker() -> None:
    fleet = parse_fleet(grouped())
    assert near_cards(fleet) == {"box": ("gpu0", "gpu1", "gpu2")}
    found = joined_fleet(fleet, near_cards(fleet))
    box, home = found.devices
    assert (box.worker, box.memory_limit_bytes) == ("box", 300 * 2**20)
    assert box.mesh == Mesh(3, pytest.approx(4 * 1e-5), pytest.approx(0.95 * 40e9 / 8))
    assert home == fleet.devices[3]
    assert np.array_equal(found.effective_bps[0, 1:], fleet.effective_bps[0, 3:])
    assert [line.members for line in found.uplinks] == [("box",)]


@pytest.mark.parametrize(
    "described",
    [
        grouped(mbit=1000),
        grouped(ms=5),
        {"device": [{"name": "a"}, {"name": "b"}], "default": {"mbit": 40_000, "ms": 0}},
        {"device": [RACK, {**RACK, "name": "other"}]},
    ],
    ids=["slow", "far", "no group", "sites"],
)
def test_others_may_not(described: dict[str, Any]) -> None:
    assert near_cards(parse_fleet(described)) == {}


def test_of_a_group_of_unlike_cards_those_that_are_most_are_joined() -> None:
    fleet = parse_fleet(grouped(40_000, 0.01, {"name": "old", "group": "box", "memory_mib": 10}))
    assert near_cards(fleet) == {"box": ("gpu0", "gpu1", "gpu2")}
    assert [device.worker for device in joined_fleet(fleet, near_cards(fleet)).devices] == [
        "box",
        "home",
        "old",
    ]
    own = grouped()
    own["device"][2]["up_mbit"] = 20
    assert near_cards(parse_fleet(own)) == {"box": ("gpu0", "gpu1")}
