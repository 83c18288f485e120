"""The two partitions a user would try first, and given ones, with the devices in the order they joined.

``even``: as many layers for each device; a layer is a repeated block of the model
(``transformer.h.0``) where there are at least as many as devices, else a parametric op; stages
begin where a layer does. ``proportional``: compute in proportion to speed (decentralized.md 1.8,
3). Neither looks at links. Under memory limits both become the nearest partition that fits: the
min-max of layers or seconds over the cuts that do. A given cut (``cut:26,65``,
``cut:26,65:0,1,0``) says where pieces begin and whose they are.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import PlanError, UsageError
from atoll.opdag import Kind, OpDag
from coordinator.planning import TUNED
from coordinator.planning.problem import Candidate, Problem
from coordinator.planning.search.chain import Chain, min_max, min_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Positions = NDArray[np.intp]
    WeightsOf = Callable[[int], Floats]  # number of devices -> [devices, positions] prefix sums

_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")
PROPORTIONAL_POSITIONS = 256
GIVEN_CUT = "cut:"  # then where pieces begin, and whose they are: for experiments and for the oracle


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


def given_pieces(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where pieces begin, and the number of the device that has each, of ``26,65`` or
    ``26,65:0,1,0``. UsageError for another form."""
    cut, _, owners = text.partition(":")
    try:
        starts = (0, *sorted({int(part) for part in cut.split(",") if part.strip()}))
        whose = tuple(int(part) for part in owners.split(",")) if owners else tuple(range(len(starts)))
    except ValueError:
        raise UsageError(f"{GIVEN_CUT}{text}: give op positions, for example {GIVEN_CUT}26,65") from None
    if len(whose) != len(starts) or list(dict.fromkeys(whose)) != list(range(len(set(whose)))):
        raise UsageError(
            f"{GIVEN_CUT}{text}: give the device of each of the {len(starts)} pieces, numbered as they first "
            f"come, for example {GIVEN_CUT}26,65:0,1,0"
        )
    if any(a == b for a, b in pairwise(whose)):
        raise UsageError(f"{GIVEN_CUT}{text}: two consecutive pieces are on one device; join them")
    return starts, whose


def given_cut(problem: Problem, text: str) -> Candidate:
    """Pieces that begin at 0 and at the given op positions, on the devices as they joined, first the one that
    has the data where these are pinned.

    UsageError when the model cannot be cut there, PlanError while there are fewer devices than are named.
    """
    starts, owners = given_pieces(text)
    allowed = set(problem.dag.cuttable())
    wrong = [start for start in starts[1:] if start not in allowed]
    if wrong:
        raise UsageError(f"{GIVEN_CUT}{text}: the model cannot be cut at op {wrong[0]} of {problem.n_ops}")
    wanted, devices = len(set(owners)), len(problem.fleet.devices)
    if wanted > devices:
        raise PlanError(f"{GIVEN_CUT}{text} makes {wanted} stages, {devices} devices are free")
    order = list(range(devices))
    if problem.pinned:
        order.insert(0, order.pop(problem.owner))
    found = Candidate(tuple(order[at] for at in owners), starts)
    if not problem.keeps_pins(found):
        raise PlanError(f"{GIVEN_CUT}{text}: device 0 has the data, but not all ops that read it")
    return found
