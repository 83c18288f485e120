"""What one worker takes of a node of a Ray cluster."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.errors import UsageError
from coordinator.cli.on_ray.bundles import Bundle, Node, like_bundles, nodes_in, whole_nodes, widest

GIB = 1 << 30
SMALL, LARGE = Node("10.0.0.1", 4, 0, 8 * GIB), Node("10.0.0.2", 16, 0, 64 * GIB)
CARDS = Node("10.0.0.3", 10, 4, 100 * GIB)


def listed(address: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": resources}


def test_dead_nodes_do_not_count_and_a_resource_that_is_not_listed_is_none() -> None:
    found = nodes_in(
        [listed("b", CPU=2.0), listed("c", alive=False, CPU=64.0), listed("a", GPU=1.0, memory=5)]
    )
    assert found == [Node("a", 0, 1, 5), Node("b", 2, 0, 0)]


def test_by_default_a_gpu_is_a_worker_and_a_node_without_is_one() -> None:
    assert whole_nodes([SMALL, CARDS, Node("head", 0, 0, GIB)]) == [Bundle(4), *[Bundle(2, 1)] * 4]
    assert whole_nodes([Node("few", 1, 2, GIB)]) == [Bundle(1, 1)] * 2


def test_nodes_that_give_nothing_are_an_error() -> None:
    with pytest.raises(UsageError, match="no node"):
        whole_nodes([Node("head", 0, 0, GIB)])


def test_workers_as_asked_fill_what_is_there() -> None:
    assert like_bundles([SMALL, LARGE], None, 4, None, 7) == [Bundle(4, 0, 7)] * 5
    assert like_bundles([SMALL, LARGE], 2, 4, None, 7) == [Bundle(4, 0, 7)] * 2
    assert like_bundles([CARDS, SMALL], None, None, 2) == [Bundle(5, 2)] * 2


def test_workers_that_share_a_node_reserve_their_part_of_the_least_memory() -> None:
    assert like_bundles([SMALL, LARGE], 3, 2, None) == [Bundle(2, 0, 4 * GIB)] * 3
    assert like_bundles([SMALL], 1, 4, None) == [Bundle(4)]


def test_more_than_any_node_has_is_an_error_with_what_they_have() -> None:
    with pytest.raises(UsageError, match="4 CPUs and 0 GPUs, 10 CPUs and 4 GPUs"):
        like_bundles([SMALL, CARDS], 1, 8, 8)


@pytest.mark.parametrize(("hosts", "cpus"), [(1, 16), (2, 8), (3, 5), (5, 4), (20, 1)])
def test_hosts_share_the_cluster_evenly_and_none_spans_nodes(hosts: int, cpus: int) -> None:
    assert widest([SMALL, LARGE], hosts) == cpus


def test_more_hosts_than_cpus_are_an_error() -> None:
    with pytest.raises(UsageError, match="--hosts 20"):
        widest([SMALL, LARGE], 21)
