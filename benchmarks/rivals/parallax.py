"""Parallax's first phase: which GPUs make a pipeline, and how many layers each has.

GPUs, sorted by the layers that they hold, are dealt to k pipelines by dynamic programming over (GPU, layers
that open pipelines lack, pipelines closed): skip it, extend an open pipeline, or begin one. s*(k) is the
least number of stages. Of all k the one with the largest k^2 / s*(k) is taken, as the public code does; the
paper has k^a / (T_comp + s*(k) / k r_RTT) with a setting a. A pipeline is then filled in
proportion to FLOP/s, up to what each GPU holds ("water-filling").

Source: Tong 2025, "Parallax: Efficient LLM Inference Service over Decentralized Environment"
(arXiv 2509.26182), phase 1; GradientHQ/parallax, src/scheduling/layer_allocation.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import floor, inf


@dataclass(frozen=True)
class Holds:
    """Most layers of a node: between others, with the embedding, with the head."""

    layers: int
    first: int
    last: int


def dealt(nodes: Sequence[Holds], layers: int) -> list[list[int]]:
    """Return the nodes of each of k pipelines, of the k with the largest k^2 / s*(k); [] where none fits."""
    order = sorted(range(len(nodes)), key=lambda at: -nodes[at].layers)
    best: tuple[float, list[list[int]]] = (0.0, [])
    for k in range(1, min(len(nodes), sum(node.layers for node in nodes) // layers) + 1):
        stages, moves = _least([nodes[at] for at in order], layers, k)
        if stages < inf and k * k / stages > best[0]:
            best = k * k / stages, _pipelines(moves, order, k)
    return best[1]


Moves = tuple[tuple[int, int], ...]  # of each node: residual of the pipeline it goes to (-1: none), and then


def _least(nodes: Sequence[Holds], layers: int, k: int) -> tuple[float, Moves]:
    """Return s*(k), and what is done with each node; residuals of open pipelines are ascending."""
    rest = [*accumulate([node.layers for node in reversed(nodes)], initial=0)][::-1]

    @cache
    def least(at: int, lacking: tuple[int, ...], closed: int) -> tuple[float, Moves]:
        if closed == k and not lacking:
            return 0.0, ()
        new = k - closed - len(lacking)
        if at == len(nodes) or new < 0 or rest[at] < sum(lacking) + new * layers:
            return inf, ()
        options = [_then(least(at + 1, lacking, closed), 0, (-1, -1))]
        starts = [(layers, nodes[at].first)] if new and nodes[at].first else []
        for before, holds in (*((one, nodes[at].layers) for one in dict.fromkeys(lacking)), *starts):
            left = before - holds
            if left <= 0 and before < layers:  # whoever closes a pipeline has the head
                left = before - nodes[at].last
            others = list(lacking)
            if before < layers:
                others.remove(before)
            if left > 0:
                others.append(left)
            found = least(at + 1, tuple(sorted(others)), closed + (left <= 0))
            options.append(_then(found, 1, (before, max(0, left))))
        return min(options, key=lambda option: option[0])

    return least(0, (), 0)


def _then(found: tuple[float, Moves], cost: int, move: tuple[int, int]) -> tuple[float, Moves]:
    return found[0] + cost, (move, *found[1])


def _pipelines(moves: Moves, order: Sequence[int], k: int) -> list[list[int]]:
    found: list[tuple[int, list[int]]] = []  # what each lacks, and its nodes
    for node, (before, after) in zip(order, moves, strict=False):
        if before < 0:
            continue
        at = next((n for n, one in enumerate(found) if one[0] == before), None)
        if at is None:
            found.append((after, [node]))
        else:
            found[at] = after, [*found[at][1], node]
    assert len(found) == k
    return [nodes for _, nodes in found]


def filled(holds: Sequence[int], flops: Sequence[float], layers: int) -> list[int]:
    """Return the layers of each: min(c_i, l F_i) with the l at which they are all, rounded by remainders."""
    low, high = 0.0, max(c / f for c, f in zip(holds, flops, strict=True))
    for _ in range(100):
        level = (low + high) / 2
        enough = sum(min(c, level * f) for c, f in zip(holds, flops, strict=True)) >= layers
        low, high = (low, level) if enough else (level, high)
    wanted = [min(c, high * f) for c, f in zip(holds, flops, strict=True)]
    found = [floor(share + 1e-9) for share in wanted]
    by_remainder = sorted(range(len(found)), key=lambda at: found[at] - wanted[at])
    for at in (at for at in by_remainder if found[at] < holds[at]):
        found[at] += sum(found) < layers
    return found
