"""The two partitions a user would try first, both with the devices in the order they joined.

``even``: as many layers for each device; a layer is a repeated block of the model
(``transformer.h.0``) where there are at least as many as devices, else a parametric op; stages
begin where a layer does. ``proportional``: compute in proportion to speed (decentralized.md 1.8,
3). Neither looks at links. Under memory limits both become the nearest partition that fits: the
min-max of layers or seconds over the cuts that do.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from atoll.opdag import Kind, OpDag
from coordinator.planning import TUNED
from coordinator.planning.chain import Chain, min_max, min_sum
from coordinator.planning.problem import Candidate, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Positions = NDArray[np.intp]
    WeightsOf = Callable[[int], Floats]  # number of devices -> [devices, positions] prefix sums

_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")
PROPORTIONAL_POSITIONS = 256


def layer_starts(dag: OpDag, at_least: int) -> list[int]:
    """Positions where a layer begins, ascending: blocks, or parametric ops when too few."""
    blocks: dict[str, int] = {}
    for op, node in enumerate(dag.ops):
        found = _BLOCK.match(node.module_path)
        if found:
            blocks.setdefault(found.group(), op)
    if len(blocks) >= at_least:
        return sorted(blocks.values())
    return [op for op, node in enumerate(dag.ops) if node.kind is Kind.PARAMETRIC]


def even(problem: Problem) -> Candidate | None:
    """Equal layer counts in join order; None when no such cut fits."""
    n_devices = len(problem.fleet.devices)
    starts = layer_starts(problem.dag, n_devices)
    allowed = problem.positions
    # A layer's first op may lie inside a group that must stay whole: begin just before it.
    places = np.searchsorted(allowed, starts, side="right") - 1
    borders = np.unique(np.concatenate(([0], places, [len(allowed) - 1])))
    counts = np.searchsorted(np.sort(places), borders).astype(np.float64)
    positions = allowed[borders]
    return _in_join_order(problem, positions, lambda n: np.tile(counts, (n, 1)))


def proportional(problem: Problem) -> Candidate | None:
    """Compute in proportion to speed, in join order; None when no such cut fits."""
    positions = problem.coarse(PROPORTIONAL_POSITIONS)
    return _in_join_order(
        problem, positions, lambda n: problem.compute[:n][:, positions], TUNED.balance_slack
    )


def _in_join_order(
    problem: Problem, positions: Positions, weights: WeightsOf, slack: float = 1e-9
) -> Candidate | None:
    """Min-max of the weights over the first devices, all of them if the model has the layers.

    Of the cuts within ``slack`` of the least maximum the one with the fewest bytes across.
    """
    n_devices = min(len(problem.fleet.devices), len(positions) - 1)
    bytes_across = problem.traffic.live_bytes[positions].astype(np.float64)
    for depths in _depths(n_devices, problem.n_micro):
        fits = [problem.fits(d, positions, q) for d, q in enumerate(depths)]
        none = np.zeros((n_devices, len(positions)))
        toll = np.tile(bytes_across, (n_devices, 1))
        chain = Chain(weights(n_devices), none, toll, fits)
        largest = min_max(chain)
        if largest is None:
            continue
        # A sum of bytes only: the stage seconds add up to nearly the same whatever the cut.
        scale = 1e-12 * max(float(chain.compute.max()), 1e-12)
        shrunk = Chain(chain.compute, none, toll * scale, fits)
        best = min_sum(shrunk, largest.value * (1 + slack)) or largest
        return Candidate(tuple(range(n_devices)), tuple(int(positions[i]) for i in best.starts))
    return None


def _depths(n_devices: int, n_micro: int) -> Iterator[list[int]]:
    yield [n_micro] * n_devices
    yield [min(n_micro, 2 * (n_devices - s) - 1) for s in range(n_devices)]
    yield [min(n_micro, n_devices - s) for s in range(n_devices)]
    yield [1] * n_devices
