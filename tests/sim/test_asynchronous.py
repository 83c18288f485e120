"""Asynchronous jobs in seeded worlds: whatever dies, every update counts at most once and the job ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parameters import sampled
from tests.sim.shrink import holding
from tests.sim.world import scenario

SEEDS = 120
SLOW_SEEDS = 3000
CHUNK = 40


def holds(seed: int) -> None:
    holding(replace(scenario(seed), pipeline=0, federated=1 + seed % 2, buffer=1 + seed % 3, standbys=0))


@pytest.mark.parametrize("first", sampled(1, range(0, SEEDS, CHUNK)))
def test_everything_holds_in_asynchronous_worlds(first: int) -> None:
    for seed in range(first, first + CHUNK):
        holds(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, SLOW_SEEDS, 10 * CHUNK))
def test_everything_holds_in_three_thousand_asynchronous_worlds(first: int) -> None:
    for seed in range(first, min(SLOW_SEEDS, first + 10 * CHUNK)):
        holds(seed)
