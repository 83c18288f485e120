"""Published planners as their papers and code describe them, on cases small enough to see or to try out."""

from __future__ import annotations

from itertools import combinations, product
from math import inf

import numpy as np
import pytest

from atoll.job import Optimizer, TrainingSpec
from benchmarks import published_planners
from benchmarks.rivals.alpa import sliced
from benchmarks.rivals.parallax import Holds, dealt, filled
from tests.worker.mesh.site import plain as captured


def plain(*layers: int) -> list[Holds]:
    return [Holds(n, n, n) for n in layers]


def test_nodes_are_dealt_to_two_pipelines_of_three_rather_than_one_of_two() -> None:
    """The example in the public code's own words: 70 layers on 40, 40, 20, 20, 10 and 10."""
    nodes = plain(10, 40, 20, 40, 10, 20)
    found = dealt(nodes, 70)
    assert sorted(sorted(nodes[at].layers for at in one) for one in found) == [[10, 20, 40]] * 2
    assert sorted(at for one in found for at in one) == list(range(6))


def test_a_pipeline_begins_with_the_embedding_and_ends_with_the_head() -> None:
    assert dealt([Holds(8, 7, 7)] * 2, 14) == [[0, 1]]
    assert dealt([Holds(8, 6, 7)] * 2, 14) == []
    assert dealt([Holds(8, 7, 6)] * 2, 14) == []
    assert dealt(plain(3, 3), 7) == []


def test_water_fills_nodes_by_their_speed_up_to_what_they_hold() -> None:
    assert filled([100, 100], [3.0, 1.0], 40) == [30, 10]
    assert filled([20, 100], [3.0, 1.0], 40) == [20, 20]
    assert filled([10, 10, 10], [1.0, 1.0, 1.0], 20) == [7, 7, 6]
    assert sum(filled([5, 9, 30], [7.0, 2.0, 4.0], 44)) == 44


@pytest.mark.parametrize("seed", range(5))
def test_slicing_finds_what_trying_out_every_cut_finds(seed: int) -> None:
    draw, layers, sizes, n_micro = np.random.default_rng(seed), 5, [1, 2, 4], 6
    seconds = np.full((layers, layers + 1, 3), inf)
    caps = np.zeros((layers, layers + 1, 3), dtype=np.intp)
    for (i, k), m in product(combinations(range(layers + 1), 2), range(3)):
        seconds[i, k, m] = (k - i) * draw.uniform(1, 2) / sizes[m]
        caps[i, k, m] = draw.integers(1, 5)
    best = inf
    for count in range(1, layers + 1):
        for cut in combinations(range(1, layers), count - 1):
            ends = list(zip((0, *cut), (*cut, layers), strict=True))
            for options in product(range(3), repeat=count):
                held = all(
                    caps[i, k, m] >= count - at
                    for at, ((i, k), m) in enumerate(zip(ends, options, strict=True))
                )
                if held and sum(sizes[m] for m in options) == 4:
                    took = [seconds[i, k, m] for (i, k), m in zip(ends, options, strict=True)]
                    best = min(best, sum(took) + (n_micro - 1) * max(took))
    total, stages = sliced(seconds, caps, sizes, 4, n_micro)
    assert best <= total <= best * 1.005
    assert [i for i, _, _ in stages] == [0, *(k for _, k, _ in stages[:-1])]
    assert sum(sizes[m] for _, _, m in stages) == 4


def test_where_nothing_fits_there_are_no_stages() -> None:
    seconds, caps = np.full((2, 3, 1), 1.0), np.zeros((2, 3, 1), dtype=np.intp)
    assert sliced(seconds, caps, [1], 2, 4) == (inf, [])


def small() -> published_planners.Model:
    """The tests' Llama."""
    training = TrainingSpec(steps=1, n_micro=16, seed=0, optimizer=Optimizer(lr=1e-3), eval_batches=0)
    return published_planners.bordered(captured("llama").dag, training)


def test_each_planner_chooses_for_two_sites_and_is_timed_on_the_same_links() -> None:
    """Links that are too slow to cross: only the planner that looks at them stays at one site."""
    fleet, model = published_planners.twins(0.1), small()
    single = published_planners.cards(fleet)
    assert len(single.devices) == 16
    assert single.bandwidth_bps[0, 1] > 1e6 * single.bandwidth_bps[0, 8]
    assert single.devices[0].memory_limit_bytes * 8 == fleet.devices[0].memory_limit_bytes
    own, alpa = published_planners.ours(model, fleet), published_planners.alpa(model, fleet)
    dealt_out = published_planners.parallax(model, single)
    assert own["choice"].startswith("one machine")
    assert 0 < own["step_s"] < alpa["step_s"]
    assert own["step_s"] < dealt_out["step_s"]
    assert alpa["own_s"] < alpa["step_s"]  # what it expects has no links
    assert dealt_out["choice"].startswith("16 pipelines of single devices")


def test_a_pool_of_unequal_devices_is_none_of_alpas() -> None:
    pool = published_planners.pool()
    assert len(pool.devices) == 8
    assert "equal devices" in published_planners.alpa(small(), pool)["choice"]
