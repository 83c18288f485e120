"""Which machines should start other workers: a site as one per card, cards that are joined fast as a site."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.errors import NotEnoughMemory
from coordinator.planning import TUNED
from coordinator.planning.costs.fleet import Device, Mesh
from coordinator.planning.inside.cards import card_fleet, near_cards
from coordinator.planning.planner import PlanRequest
from coordinator.planning.readings import Reading, other_readings
from coordinator.planning.ways import compare_ways
from tests.coordinator.planning.inside.test_costs import FAST, TRAINING, dag, device
from tests.coordinator.planning.search.test_sites import joined

THIN = Mesh(2, 1e-4, 3e6)  # bytes a second inside, far fewer than a stage's matrices need
LINK = 24e6  # bits a second


def request(*devices: Device, bps: float = LINK) -> PlanRequest:
    return PlanRequest("job", 1, dag(), None, TRAINING, joined(*devices, bps=bps), standbys=0)


def readings(asked: PlanRequest) -> tuple[Reading, ...]:
    return other_readings(asked, compare_ways(asked))


def test_a_site_on_thin_links_whose_cards_do_not_hold_the_model_is_better_as_a_pipeline_of_them() -> None:
    asked = request(device("box", THIN, share=0.8))
    (found,) = readings(asked)
    assert (found.sites, found.cards, found.joined) == (("box",), (2,), False)
    assert found.better
    assert found.way.workers == (("box/0", "box/1"),) or found.way.workers == (("box/1", "box/0"),)
    again = compare_ways(replace(asked, fleet=card_fleet(asked.fleet, ["box"])))
    assert found.way.step_s == again[0].step_s
    assert found.given is not None
    assert found.gain == pytest.approx(found.given.step_s / found.way.step_s)
    assert found.gain > 1 / TUNED.other_reading


def test_a_site_whose_cards_hold_the_model_and_are_joined_fast_stays_one_worker() -> None:
    (found,) = readings(request(device("box", FAST)))
    assert not found.better


def test_of_a_mixed_fleet_only_the_site_is_read_otherwise() -> None:
    asked = request(device("home", share=0.5), device("box", THIN, share=0.6))
    (found,) = readings(asked)
    assert found.sites == ("box",)
    assert found.better
    assert {worker for replica in found.way.workers for worker in replica} <= {"home", "box/0", "box/1"}


def test_sites_of_two_kinds_are_read_each_by_itself_and_together() -> None:
    asked = request(device("east", FAST, share=0.8), device("west", THIN, share=0.8))
    found = readings(asked)
    assert {reading.sites for reading in found} == {("east",), ("west",), ("east", "west")}
    assert list(found) == sorted(found, key=lambda reading: -reading.gain)


def test_alike_sites_are_read_together() -> None:
    (found,) = readings(request(*(device(name, THIN, share=0.8) for name in ("east", "west"))))
    assert (found.sites, found.cards) == (("east", "west"), (2, 2))


def test_cards_joined_fast_are_better_as_one_worker_where_a_step_has_one_micro_batch() -> None:
    """Which no pipeline divides, and no replicas share out."""
    cards = (replace(device(name, share=0.8), site="box") for name in ("one", "two"))
    asked = request(*cards, bps=1e12)
    fleet = replace(asked.fleet, latency_s=asked.fleet.latency_s * 1e-3)
    (found,) = readings(replace(asked, fleet=fleet, training=replace(TRAINING, n_micro=1)))
    assert (found.sites, found.cards, found.joined) == (("box",), (2,), True)
    assert found.better
    assert found.way.workers == (("box",),)


def test_a_fleet_of_single_machines_has_no_other_reading() -> None:
    assert readings(request(device("one"), device("two"))) == ()


def test_more_workers_than_are_planned_in_a_bounded_time_are_not_planned_and_that_is_said() -> None:
    size = TUNED.read_workers + 1
    asked = request(device("box", Mesh(size, 1e-6, 1e12), share=0.5))
    (found,) = readings(asked)
    assert (found.sites, found.cards, found.better) == (("box",), (size,), False)
    assert found.way.why_not.startswith(f"{size} workers are more than {TUNED.read_workers}; describe ")
    (without,) = other_readings(asked, ())
    assert not without.better, "a fleet without room is not told to start what was not planned"


def test_a_reading_without_room_for_the_model_is_none() -> None:
    """Eight cards hold it as a pipeline, but what every process of a site has is too much for each."""
    cards = [replace(device(f"card{n}", share=0.3), site="box") for n in range(8)]
    asked = request(*cards, bps=1e12)
    asked = replace(asked, fleet=replace(asked.fleet, latency_s=asked.fleet.latency_s * 1e-3))
    assert near_cards(asked.fleet)
    assert readings(asked) == ()


def test_where_a_site_has_no_room_its_cards_may_have_it() -> None:
    asked = request(device("box", THIN, share=0.575))
    with pytest.raises(NotEnoughMemory):
        compare_ways(asked)
    (found,) = other_readings(asked, ())
    assert found.given is None
    assert found.better
    assert len(found.way.workers[0]) == 2
