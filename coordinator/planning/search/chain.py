"""Cutting a chain of positions over devices in a fixed order, exactly.

The surrogate of a pipeline: stage j runs the ops between two positions in P_j[i] - P_j[l]
seconds and receives at l over a link of R_j[l] seconds. ``min_max`` minimises the largest of
them, ``min_sum`` their sum under a ceiling, both by dynamic programming in O(D n^2);
``threshold`` finds the min-max by bisection in O(D n) a probe, for fleets where n^2 is too much.
Tensors that skip stages and shared uplinks make the true cost non-separable: the timeline ranks
what comes from here (DESIGN section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Chain:
    """An order of devices over n positions.

    ``compute``: [devices, n] prefix seconds. ``link``: [devices, n] seconds a micro-batch occupies
    the link into a device that begins at a position; ``toll``: what that link adds to one
    micro-batch's way, both directions and latencies (row 0 of both unused). ``fits``: one [n, n]
    mask per device, True where the stage from l to i is within memory; None: it always is.
    """

    compute: Floats
    link: Floats
    toll: Floats
    fits: Sequence[Bools | None]

    @property
    def shape(self) -> tuple[int, int]:
        devices, positions = self.compute.shape
        return devices, positions


@dataclass(frozen=True, slots=True)
class ChainCut:
    """Position index where each device begins, and the value of the objective."""

    starts: tuple[int, ...]
    value: float


def min_max(chain: Chain) -> ChainCut | None:
    """Minimise max(stage seconds, link seconds); every device gets at least one position.

    f[j][i] = min_l max(f[j-1][l], R_j[l], P_j[i] - P_j[l]) over l < i that fit. None when no cut
    fits. Source: decentralized.md 1.6 step 4.
    """
    return _dynamic(chain, None)


def min_sum(chain: Chain, ceiling: float) -> ChainCut | None:
    """Minimise the sum of stage seconds and tolls, no stage or link above ``ceiling``."""
    return _dynamic(chain, ceiling)


def step_bound(chain: Chain, n_micro: int) -> float:
    """Return min sum + (M - 1) min max, each on its own: seconds of a step; inf where no cut fits."""
    largest, total = min_max(chain), min_sum(chain, 1e18)
    if largest is None or total is None:
        return float("inf")
    return total.value + (n_micro - 1) * largest.value


def _dynamic(chain: Chain, ceiling: float | None) -> ChainCut | None:
    devices, n = chain.shape
    best = np.full(n, np.inf)
    best[0] = 0.0
    came: list[NDArray[np.intp]] = []
    blocked = backwards(n)
    for j in range(devices):
        best, source = extend(chain, j, best, blocked, ceiling)
        came.append(source)
    if not np.isfinite(best[-1]):
        return None
    starts = [n - 1]
    for source in reversed(came):
        starts.append(int(source[starts[-1]]))
    return ChainCut(tuple(reversed(starts[1:])), float(best[-1]))


def backwards(n: int) -> Bools:
    """[l, i] mask of the stages that are no stage: i <= l."""
    return np.tri(n, dtype=bool)


def extend(
    chain: Chain, j: int, best: Floats, blocked: Bools, ceiling: float | None
) -> tuple[Floats, NDArray[np.intp]]:
    """Compute a row of the dynamic program: the best value of ending device j at each position, and the
    position where it then begins. ``ceiling`` None: min-max, else min-sum below it."""
    p = chain.compute[j]
    stage = p[None, :] - p[:, None]
    fits = chain.fits[j]
    bad = blocked if fits is None else blocked | ~fits
    if ceiling is None:
        head = np.maximum(best, chain.link[j]) if j else best
        total = np.maximum(head[:, None], stage)
    else:
        head = np.where(chain.link[j] > ceiling, np.inf, best + chain.toll[j]) if j else best
        total = head[:, None] + stage
        bad = bad | (stage > ceiling)
    total[bad] = np.inf
    source = total.argmin(axis=0)
    return total[source, np.arange(len(p))], source


def threshold(
    compute: Floats,
    link: Floats,
    reach: Callable[[int], NDArray[np.intp]],
    floor: float = 0.0,
    tolerance: float = 1e-3,
) -> ChainCut | None:
    """The min-max by bisection, to a relative ``tolerance`` above the optimum.

    ``compute`` and ``link`` as in Chain; ``reach(j)`` gives for every position the farthest one
    that device j can hold from it in memory (at least itself); ``floor`` is a value known to be no
    larger than the optimum. As few devices are used as reach the end, so the cut may have fewer
    starts than there are devices.
    """
    limits = [reach(j) for j in range(len(compute))]
    # Even if work could be split at will, all devices together need this long.
    low = max(floor, 1.0 / float((1.0 / np.maximum(compute[:, -1], 1e-30)).sum()))
    widest = link.max(initial=0.0, where=np.isfinite(link))
    ceiling = max(float(compute[:, -1].max()), float(widest))
    if _within(compute, link, limits, ceiling) is None:
        return None
    high = 1.25 * low
    while (found := _within(compute, link, limits, high)) is None:
        low, high = high, 1.5 * high
    while high - low > tolerance * high:
        middle = 0.5 * (low + high)
        attempt = _within(compute, link, limits, middle)
        if attempt is None:
            low = middle
        else:
            high, found = middle, attempt
    return ChainCut(found, high)


def _within(
    compute: Floats, link: Floats, limits: Sequence[NDArray[np.intp]], ceiling: float
) -> tuple[int, ...] | None:
    """Starts of a cut none of whose terms exceeds ``ceiling``, using as few devices as reach
    the end; None when there is none."""
    devices, n = compute.shape
    reached = np.zeros(n, dtype=bool)
    reached[0] = True
    layers: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
    here = np.arange(1, n)
    for j in range(devices):
        begin = np.flatnonzero(reached if j == 0 else reached & (link[j] <= ceiling))
        if not len(begin):
            return None
        far = np.searchsorted(compute[j], compute[j][begin] + ceiling * (1 + 1e-12), side="right") - 1
        far = np.minimum(far, limits[j][begin])
        layers.append((begin, far))
        farthest = np.zeros(n, dtype=np.intp)
        farthest[begin] = far
        reached = np.zeros(n, dtype=bool)
        # A position is reached when some earlier beginning reaches as far.
        reached[1:] = np.maximum.accumulate(farthest)[:-1] >= here
        if reached[n - 1]:
            return _walk_back(layers, n - 1)
    return None


def _walk_back(layers: list[tuple[NDArray[np.intp], NDArray[np.intp]]], end: int) -> tuple[int, ...]:
    starts: list[int] = []
    for begin, far in reversed(layers):
        able = np.flatnonzero((begin < end) & (far >= end))
        # Every one of them is within the ceiling; the middle one shares the slack.
        end = int(begin[able[len(able) // 2]])
        starts.append(end)
    return tuple(reversed(starts))
