"""Which devices are joined by fast links, and in which order a pipeline should visit them.

Groups: Louvain communities on log2 of the bandwidth, or the largest gap in single linkage where
Louvain sees one community. Orders: shortest open path, exact (Held-Karp) up to 12 nodes, else
nearest neighbour with 2-opt. Source: papers/decentralized.md 1.6 steps 1 and 2.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

from coordinator.planning import TUNED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

SEED = 4711


def groups(bandwidth_bps: Floats) -> tuple[tuple[int, ...], ...]:
    """Devices grouped by fast links, each ascending, ordered by first member.

    ``bandwidth_bps`` [n, n] in each direction; the slower one counts. Nearly equal links (within
    a factor of 1.5) are one group.
    """
    n = len(bandwidth_bps)
    if n <= 2:
        return (tuple(range(n)),) if n else ()
    rate = np.minimum(bandwidth_bps, bandwidth_bps.T)
    upper = rate[np.triu_indices(n, 1)]
    if upper.max() < TUNED.bandwidth_gap * upper.min():
        return (tuple(range(n)),)
    found = _louvain(rate)
    if len(found) == 1:
        found = _largest_gap(rate)
    return tuple(sorted(tuple(sorted(int(i) for i in group)) for group in found))


def _louvain(rate: Floats) -> list[set[int]]:
    """Communities under log2(rate / slowest) + a little; sparse in large fleets."""
    n = len(rate)
    off = ~np.eye(n, dtype=bool)
    slowest = rate[off].min()
    weight = np.log2(np.maximum(rate, slowest) / slowest)
    weight[~off] = 0.0
    keep = weight > 0
    if n > TUNED.dense_nodes:
        keep &= _fastest_links(weight)
    graph = nx.Graph()
    graph.add_nodes_from(range(n))
    rows, columns = np.nonzero(np.triu(keep | keep.T, 1))
    graph.add_weighted_edges_from(
        zip(rows.tolist(), columns.tolist(), weight[rows, columns].tolist(), strict=True)
    )
    return [
        set(c) for c in nx.community.louvain_communities(graph, weight="weight", resolution=1.0, seed=SEED)
    ]


def _fastest_links(weight: Floats) -> NDArray[np.bool_]:
    """Each device's fastest links, of those at least half as fast (in log) as its best:
    what joins islands is dropped, what holds one together is not."""
    n = len(weight)
    k = min(TUNED.neighbours, n - 1)
    cutoff = np.partition(weight, n - k, axis=1)[:, n - k]
    best = weight.max(axis=1)
    keep: NDArray[np.bool_] = weight >= np.maximum(cutoff, 0.5 * best)[:, None]
    return keep


def _largest_gap(rate: Floats) -> list[set[int]]:
    """Single linkage: cut the maximum spanning tree at the largest ratio of its sorted rates."""
    n = len(rate)
    tree = _spanning_tree(rate)
    speeds = sorted((rate[a, b] for a, b in tree), reverse=True)
    ratios = [speeds[i] / max(speeds[i + 1], 1e-9) for i in range(len(speeds) - 1)]
    if not ratios or max(ratios) < TUNED.bandwidth_gap:
        return [set(range(n))]
    floor = speeds[int(np.argmax(ratios))]
    graph = nx.Graph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from((a, b) for a, b in tree if rate[a, b] >= floor)
    return [set(c) for c in nx.connected_components(graph)]


def _spanning_tree(rate: Floats) -> list[tuple[int, int]]:
    """Prim's maximum spanning tree in O(n^2)."""
    n = len(rate)
    best, parent = rate[0].copy(), np.zeros(n, dtype=np.intp)
    left = np.ones(n, dtype=bool)
    left[0] = False
    edges = []
    for _ in range(n - 1):
        node = int(np.where(left, best, -1.0).argmax())
        edges.append((int(parent[node]), node))
        left[node] = False
        closer = left & (rate[node] > best)
        best[closer], parent[closer] = rate[node][closer], node
    return edges


def shortest_path(cost: Floats, start: int | None = None, end: int | None = None) -> list[int]:
    """Order of all nodes minimising the sum of cost[a, b] along it; ends fixed where given.

    Exact up to 12 nodes; else the best nearest-neighbour path improved by 2-opt.
    """
    n = len(cost)
    if n <= 2:
        order = list(range(n))
        backwards = n == 2 and (start == 1 or end == 0 or (start is end is None and cost[1, 0] < cost[0, 1]))
        return order[::-1] if backwards else order
    if start is not None and start == end:
        end = None
    return _held_karp(cost, start, end) if n <= TUNED.exact_nodes else _two_opt(cost, start, end)


def _held_karp(cost: Floats, start: int | None, end: int | None) -> list[int]:
    """Dynamic program over subsets, O(2^n n^2), rows vectorised."""
    n = len(cost)
    best = np.full((1 << n, n), np.inf)
    for i in range(n):
        if start is None or i == start:
            best[1 << i, i] = 0.0
    came = np.zeros((1 << n, n), dtype=np.int8)
    sets = np.arange(1 << n)
    sizes = np.array([int(s).bit_count() for s in sets])
    for size in range(1, n):
        chosen = sets[sizes == size]
        for node in range(n):
            outside = chosen[(chosen >> node) & 1 == 0]
            value = best[outside] + cost[:, node]
            source = value.argmin(axis=1)
            target = outside | (1 << node)
            best[target, node] = value[np.arange(len(outside)), source]
            came[target, node] = source
    full = (1 << n) - 1
    node = end if end is not None else int(best[full].argmin())
    order, rest = [], full
    while True:
        order.append(node)
        previous = int(came[rest, node])
        rest &= ~(1 << node)
        if not rest:
            return order[::-1]
        node = previous


def _two_opt(cost: Floats, start: int | None, end: int | None) -> list[int]:
    n = len(cost)
    firsts = [start] if start is not None else list(range(0, n, max(1, n // 8)))
    paths = [_nearest_neighbour(cost, first, end) for first in firsts]
    path = min(paths, key=lambda p: _length(cost, p))
    symmetric = np.minimum(cost, cost.T)
    for _ in range(50):  # sweeps; a handful suffice in practice
        improved = False
        for i in range(0 if start is None else 1, n - 1):
            order = np.array(path)
            stop = n if end is None else n - 1
            j = np.arange(i + 1, stop)
            if not len(j):
                continue
            before = symmetric[order[i - 1], order[i]] if i else 0.0
            after_now = np.where(j + 1 < n, symmetric[order[j], order[np.minimum(j + 1, n - 1)]], 0.0)
            joined = symmetric[order[i - 1], order[j]] if i else np.zeros(len(j))
            after_new = np.where(j + 1 < n, symmetric[order[i], order[np.minimum(j + 1, n - 1)]], 0.0)
            gain = before + after_now - joined - after_new
            pick = int(gain.argmax())
            if gain[pick] > 1e-12:
                path[i : j[pick] + 1] = path[i : j[pick] + 1][::-1]
                improved = True
        if not improved:
            break
    return path


def _nearest_neighbour(cost: Floats, first: int, end: int | None) -> list[int]:
    n = len(cost)
    left = np.ones(n, dtype=bool)
    left[first] = False
    if end is not None:
        left[end] = False
    path = [first]
    while left.any():
        node = int(np.where(left, cost[path[-1]], np.inf).argmin())
        path.append(node)
        left[node] = False
    return path if end is None else [*path, end]


def _length(cost: Floats, path: list[int]) -> float:
    return float(sum(cost[a, b] for a, b in pairwise(path)))


def visiting_order(found: tuple[tuple[int, ...], ...], cost: Floats) -> tuple[tuple[int, ...], ...]:
    """Groups in the order a pipeline should pass them, each with its devices in order.

    ``cost`` [n, n]: seconds to send one boundary. Groups are ordered by the cheapest link between
    them; its ends are the gateways where a group's inner path begins and stops.
    """
    k = len(found)
    if k == 1:
        members = np.array(found[0])
        return (tuple(int(members[i]) for i in shortest_path(cost[np.ix_(members, members)])),)
    between, gateway = np.zeros((k, k)), {}
    for a, left in enumerate(found):
        for b, right in enumerate(found):
            if a != b:
                block = cost[np.ix_(left, right)]
                at = int(block.argmin())
                between[a, b] = block.flat[at]
                gateway[a, b] = (left[at // len(right)], right[at % len(right)])
    order = shortest_path(between)
    return tuple(
        _inner_order(
            found[g],
            cost,
            gateway[order[i - 1], g][1] if i else None,
            gateway[g, order[i + 1]][0] if i + 1 < k else None,
        )
        for i, g in enumerate(order)
    )


def _inner_order(
    members: tuple[int, ...], cost: Floats, enter: int | None, leave: int | None
) -> tuple[int, ...]:
    place = {member: i for i, member in enumerate(members)}
    start = place[enter] if enter is not None else None
    end = place[leave] if leave is not None else None
    inner = cost[np.ix_(members, members)]
    return tuple(members[i] for i in shortest_path(inner, start, end))
