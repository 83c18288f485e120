"""Alpa's pass between operators: stages of layers on submeshes.

    T = min over stages of  sum t_i + (B - 1) max t_i,   all devices used

by dynamic programming for each bound on max t_i. A stage with s stages behind it holds s + 1 micro-batches in
flight. Neither the sum nor the public code has a term for what stages send each other.

Source: Zheng 2022, "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning"
(OSDI), section 5; alpa-projects/alpa, pipeline_parallel/stage_construction.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Stages = list[tuple[int, int, int]]  # layers [from, to) and the option of a stage

GAP = 1.005  # bounds on the slowest stage closer than this are one


def sliced(
    seconds: Floats, caps: NDArray[np.intp], sizes: Sequence[int], devices: int, n_micro: int
) -> tuple[float, Stages]:
    """Return the least sum t_i + (B - 1) max t_i, and its stages: layers [i, k) on option m.

    ``seconds``, ``caps`` [layers, layers + 1, options]: of a stage, inf where it has no layer, and the most
    micro-batches that it holds. (inf, []) where nothing fits.
    """
    best: tuple[float, Stages] = (inf, [])
    last = 0.0
    for bound in np.unique(seconds[np.isfinite(seconds)]):
        if bound * n_micro >= best[0]:
            break
        if bound < last * GAP:
            continue
        last = float(bound)
        allowed = np.where(seconds <= bound, seconds, inf)
        total, stages = _under(allowed, caps, sizes, devices)
        if stages:
            slowest = max(float(seconds[stage]) for stage in stages)
            best = min(best, (total + (n_micro - 1) * slowest, stages), key=lambda one: one[0])
    return best


def _under(
    seconds: Floats, caps: NDArray[np.intp], sizes: Sequence[int], devices: int
) -> tuple[float, Stages]:
    """Return the least sum of stages that use all devices. F(s, i, d): of s stages, from layer i on, on d."""
    layers = seconds.shape[0]
    least = np.full((layers + 1, devices + 1), inf)
    least[layers, 0] = 0.0
    tables, choices = [least], [np.zeros((0, 0, 2), dtype=np.intp)]
    for s in range(1, min(layers, devices) + 1):
        now, chosen = np.full_like(least, inf), np.zeros((layers + 1, devices + 1, 2), dtype=np.intp)
        for m, size in enumerate(sizes):
            own = np.where(caps[:, :, m] >= s, seconds[:, :, m], inf)  # s - 1 stages are behind it
            for d in range(size, devices + 1):
                sums = own + tables[-1][np.newaxis, :, d - size]
                k = sums.argmin(axis=1)
                found = sums[np.arange(layers), k]
                better = found < now[:layers, d]
                now[:layers, d][better] = found[better]
                chosen[:layers, d][better] = np.stack((k, np.full(layers, m)), axis=1)[better]
        tables.append(now)
        choices.append(chosen)
    s = int(np.argmin([table[0, devices] for table in tables]))
    total, stages, at, left = float(tables[s][0, devices]), [], 0, devices
    while np.isfinite(total) and s:
        k, m = (int(one) for one in choices[s][at, left])
        stages.append((at, k, m))
        at, left, s = k, left - sizes[m], s - 1
    return total, stages
