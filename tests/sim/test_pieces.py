"""Worlds whose first stage also has the last piece: everything holds that holds of one piece a stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parameters import sampled
from tests.sim.shrink import holding
from tests.sim.test_sim import CHUNK, SLOW_SEEDS
from tests.sim.world import Scenario, scenario

SEEDS = 300


def ring(seed: int) -> Scenario:
    """A world drawn by its seed that has pipelines, in rings."""
    drawn = scenario(seed)
    return replace(drawn, pipeline=max(1, drawn.pipeline), rings=True, local_steps=0)


def test_a_ring_ends_as_an_undisturbed_chain_does() -> None:
    for workers in (2, 3):
        world = holding(Scenario(seed=1, workers=workers, rings=True))
        plan = world.coordinator.shadow.jobs["job-1"].plan
        assert plan is not None
        assert [len(stage.pieces) for stage in plan.stages] == [2, *([1] * (workers - 1))]


@pytest.mark.parametrize("first", sampled(1, range(0, SEEDS, CHUNK)))
def test_everything_holds_where_a_worker_has_several_pieces(first: int) -> None:
    for seed in range(first, first + CHUNK):
        holding(ring(seed))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, SLOW_SEEDS, 20 * CHUNK))
def test_everything_holds_in_ten_thousand_worlds_of_several_pieces(first: int) -> None:
    for seed in range(first, min(SLOW_SEEDS, first + 20 * CHUNK)):
        holding(ring(seed))
