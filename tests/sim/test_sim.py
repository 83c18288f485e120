"""Seeded worlds: whatever dies, freezes or is cut off, no step is lost, doubled or spoiled."""

from __future__ import annotations

import pytest

from tests.parameters import sampled
from tests.sim.faults import Fault
from tests.sim.planted import PLANTED, SHOWN_BY, SHOWN_IN, Plant
from tests.sim.shrink import holding
from tests.sim.world import Scenario, World, scenario, violation_of

SEEDS = 300
SLOW_SEEDS = 10_000
CHUNK = 25
SHOWN = 40


FOUND = (767, 1336, 2238, 2240, 2527, 7944, 8525, 9216, 9645, 20321, 20326, 28789, 28929)
"""Worlds that once broke a promise, or a check of ours, among the first 32,000."""


def holds(seed: int) -> None:
    found = scenario(seed)
    holding(found)


@pytest.mark.parametrize("first", sampled(1, range(0, SEEDS, CHUNK)))
def test_everything_holds_in_worlds_drawn_by_seed(first: int) -> None:
    for seed in range(first, first + CHUNK):
        holds(seed)


@pytest.mark.parametrize("seed", FOUND)
def test_everything_holds_where_something_once_did_not(seed: int) -> None:
    holds(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, SLOW_SEEDS, 20 * CHUNK))
def test_everything_holds_in_ten_thousand_worlds(first: int) -> None:
    for seed in range(first, min(SLOW_SEEDS, first + 20 * CHUNK)):
        holds(seed)


def test_the_same_seed_tells_the_same_story() -> None:
    for seed in range(5):
        first, again = (violation_of(scenario(seed))[1] for _ in range(2))
        assert first.clock.fingerprint() == again.clock.fingerprint()
    assert violation_of(scenario(5))[1].clock.fingerprint() != first.clock.fingerprint()


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_within_a_thousand_worlds(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    needed = SHOWN_BY.get(plant, Fault)
    seeds = (SHOWN_IN.get(plant, 0), *range(1000))
    worlds = (world for world in map(scenario, seeds) if any(isinstance(f, needed) for f in world.faults))
    found = next(filter(None, (violation_of(world)[0] for world in worlds)), "")
    assert any(word in found for word in ("job-", "update of", "is honest")), found
    assert "Error" not in found


def test_a_checkpoint_keeps_its_blobs_though_another_job_has_replaced_the_same_ones() -> None:
    """At any moment all that no fact names yet may be replaced elsewhere, and swept."""
    world = World(Scenario(seed=1, workers=4, pipeline=1))
    world.begin()
    coordinator = world.coordinator
    until_s = world.clock.now_s + 120.0
    while world.clock.step(until_s) and not world.over:
        if "job-1" in coordinator.scheduler.jobs:
            coordinator.scheduler.ledger.superseded |= coordinator.folder.blobs
            coordinator.sweep()
    assert coordinator.shadow.jobs["job-1"].outcome == "finished"
    assert len(coordinator.shadow.jobs["job-1"].checkpoints) == 3, "the newest two, and the best"


def test_an_undisturbed_world_needs_no_more_plans_than_one() -> None:
    world = holding(Scenario(seed=1, workers=4, pipeline=1))
    assert world.coordinator.shadow.jobs["job-1"].version == 1
