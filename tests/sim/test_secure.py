"""Secure rounds in seeded worlds: whoever is killed, an opened sum is that of its members, or none is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.messages.jobs import Phase
from tests.parameters import sampled
from tests.sim.shrink import holding
from tests.sim.world import Scenario, World, scenario

SEEDS = 80
SLOW_SEEDS = 1000
CHUNK = 10


def drawn(seed: int) -> Scenario:
    found = scenario(seed)
    workers = max(4, found.workers)
    return replace(found, workers=workers, pipeline=0, federated=1, secure=True, standbys=0)


@pytest.mark.parametrize("first", sampled(1, range(0, SEEDS, CHUNK)))
def test_everything_holds_in_worlds_of_masked_sums(first: int) -> None:
    for seed in range(first, first + CHUNK):
        holding(drawn(seed))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, SLOW_SEEDS, 10 * CHUNK))
def test_everything_holds_in_a_thousand_worlds_of_masked_sums(first: int) -> None:
    for seed in range(first, min(SLOW_SEEDS, first + 10 * CHUNK)):
        holding(drawn(seed))


def test_an_undisturbed_world_opens_the_sum_of_each_round_once() -> None:
    world = World(replace(drawn(3), workers=5, faults=()))
    world.run()
    (state,) = world.coordinator.scheduler.jobs.values()
    assert state.phase is Phase.FINISHED
    assert world.vectors.opened == 6
