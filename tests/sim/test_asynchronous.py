"""Asynchronous jobs in seeded worlds: whatever dies, every update counts at most once and the job ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.messages.facts import RoundClosed
from tests.parameters import sampled
from tests.sim.shrink import holding
from tests.sim.world import Scenario, World, scenario

SEEDS = 120
SLOW_SEEDS = 3000
CHUNK = 20


def drawn(seed: int, populations: int = 0) -> Scenario:
    found = replace(scenario(seed), pipeline=0, federated=1 + seed % 2, buffer=1 + seed % 3, standbys=0)
    return replace(found, buffer=2 + seed % 6, populations=populations) if populations else found


def holds(seed: int) -> None:
    holding(drawn(seed))


@pytest.mark.parametrize("first", sampled(1, range(0, SEEDS, CHUNK)))
def test_everything_holds_in_asynchronous_worlds(first: int) -> None:
    for seed in range(first, first + CHUNK):
        holds(seed)


@pytest.mark.parametrize("first", sampled(1, range(0, SEEDS, CHUNK)))
def test_everything_holds_in_asynchronous_worlds_of_populations(first: int) -> None:
    for seed in range(first, first + CHUNK):
        holding(drawn(seed, populations=1 + seed % 2))


def test_an_undisturbed_world_counts_the_clients_of_hosts() -> None:
    world = World(replace(drawn(4, populations=1), workers=3, federated=1, faults=()))
    world.run()
    closed = world.facts(RoundClosed)
    assert len(closed) == 6
    clients = [sum(len(told["clients"]) for told in fact.participants.values()) for fact in closed]
    assert min(clients) >= world.scenario.buffer
    assert max(clients) < 2 * world.scenario.buffer


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, SLOW_SEEDS, 20 * CHUNK))
def test_everything_holds_in_three_thousand_asynchronous_worlds(first: int) -> None:
    for seed in range(first, min(SLOW_SEEDS, first + 20 * CHUNK)):
        holds(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, SLOW_SEEDS, 20 * CHUNK))
def test_everything_holds_in_three_thousand_asynchronous_worlds_of_populations(first: int) -> None:
    for seed in range(first, min(SLOW_SEEDS, first + 20 * CHUNK)):
        holding(drawn(seed, populations=1 + seed % 2))
