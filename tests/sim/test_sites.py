"""Sites with gateways in seeded worlds: whatever dies, every update counts at most once and the job ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parameters import sampled
from tests.sim.shrink import holding
from tests.sim.world import World, scenario

SEEDS = 120
SLOW_SEEDS = 3000
CHUNK = 20


def holds(seed: int) -> None:
    holding(replace(scenario(seed), pipeline=0, federated=1 + seed % 2, sites=1 + seed % 3, standbys=0))


@pytest.mark.parametrize("first", sampled(1, range(0, SEEDS, CHUNK)))
def test_everything_holds_in_worlds_of_sites(first: int) -> None:
    for seed in range(first, first + CHUNK):
        holds(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, SLOW_SEEDS, 20 * CHUNK))
def test_everything_holds_in_three_thousand_worlds_of_sites(first: int) -> None:
    for seed in range(first, min(SLOW_SEEDS, first + 20 * CHUNK)):
        holds(seed)


def test_an_undisturbed_world_sums_at_its_gateways() -> None:
    world = World(replace(scenario(3), pipeline=0, federated=1, workers=6, sites=2, standbys=0, faults=()))
    world.run()
    (job,) = world.coordinator.scheduler.jobs
    assert world.checks.closed[job] == 6
    assert set(world.checks.sums) == {"sum of w0", "sum of w1"}
