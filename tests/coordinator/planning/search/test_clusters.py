import itertools

import numpy as np
import pytest

from coordinator.planning.search.clusters import groups, shortest_path, visiting_order
from tests.coordinator.planning.fleets import islands, two_islands


def path_length(cost, order):
    return sum(cost[a, b] for a, b in itertools.pairwise(order))


def test_fifty_islands_of_twenty_are_found_among_a_thousand_devices():
    fleet, home = islands(seed=1, n_islands=50, size=20, memory_mib=100)
    found = groups(fleet.effective_bps)
    assert len(found) == 50
    assert all(len(group) == 20 and len({home[d] for d in group}) == 1 for group in found)


def test_two_islands_that_joined_alternately_are_two_groups():
    assert groups(two_islands().effective_bps) == ((0, 2), (1, 3))


def test_equal_links_are_one_group():
    rate = np.random.default_rng(3).uniform(90e6, 110e6, (8, 8))
    assert groups(rate) == (tuple(range(8)),)


def test_one_community_is_split_at_the_largest_gap():
    rate = np.full((4, 4), 1e6)
    rate[:2, :2] = rate[2:, 2:] = 1e8
    assert groups(rate) == ((0, 1), (2, 3))


@pytest.mark.parametrize("ends", [(None, None), (2, None), (None, 4), (1, 5)])
def test_the_path_over_few_nodes_is_the_shortest(ends):
    start, end = ends
    for seed in range(10):
        cost = np.random.default_rng(seed).uniform(0, 1, (6, 6))
        best = min(
            (
                order
                for order in itertools.permutations(range(6))
                if (start is None or order[0] == start) and (end is None or order[-1] == end)
            ),
            key=lambda order: path_length(cost, order),
        )
        found = shortest_path(cost, start, end)
        assert sorted(found) == list(range(6))
        assert path_length(cost, found) == pytest.approx(path_length(cost, best)), f"seed {seed}"
        assert start in (None, found[0])
        assert end in (None, found[-1])


def test_a_long_path_visits_all_once_and_is_near_the_obvious_one():
    where = np.random.default_rng(7).permutation(40)
    cost = np.abs(where[:, None] - where[None, :]).astype(float)
    found = shortest_path(cost, start=int(np.argmin(where)))
    assert sorted(found) == list(range(40))
    assert path_length(cost, found) <= 1.3 * 39


def test_the_visiting_order_keeps_groups_together():
    fleet, home = islands(seed=2, n_islands=5, size=4, memory_mib=100)
    order = visiting_order(groups(fleet.effective_bps), fleet.latency_s + 8e6 / fleet.effective_bps)
    assert sorted(d for group in order for d in group) == list(range(20))
    assert [len({home[d] for d in group}) for group in order] == [1] * 5
