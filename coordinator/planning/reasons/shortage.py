"""Reasons why no cut fits a fleet's memory: by how much, and where."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import NotEnoughMemory
from atoll.job import Recompute
from coordinator.planning.search.keepings import would_fit
from hostos.units import MIB

if TYPE_CHECKING:
    from coordinator.planning.problem import Problem


class NoCutFits(NotEnoughMemory):
    """Refusal of a search, with ``shortage`` as its sentence once somebody reads it. Most are never read, for
    the search goes on with another form or other devices, and a sentence costs the tables of five forms."""

    def __init__(self, problem: Problem, partitioner: str) -> None:
        super().__init__()
        self._unread: tuple[Problem, str] | None = (problem, partitioner)

    def __str__(self) -> str:
        if self._unread is not None:
            self.args, self._unread = (shortage(*self._unread),), None
        return str(self.args[0])


def shortage(problem: Problem, partitioner: str) -> str:
    """Return a sentence with the numbers and the remedy: as measured, where that was learnt of the job."""
    factor = max(device.memory_scale for device in problem.fleet.devices)
    mib = MIB / factor
    need = problem.memory.bytes(0, problem.n_ops, 1)
    order, over = _worst_overflow(problem)
    device = problem.fleet.devices[order]
    raised = over * (1.0 + device.heap_share) * device.memory_scale
    enough = f" ({raised / MIB + 1:.0f} MiB more on each are enough)" if raised > 0 else ""
    fits = would_fit(problem, lambda other: _worst_overflow(other)[1] <= 0.0)
    remedy = (
        f"{fits}lower the micro-batch size, {recompute_hint(problem)}raise --memory{enough} or add workers"
    )
    if factor > 1.0:
        remedy = f"stages of this job take {factor:.2f} x the model's figure, as measured; {remedy}"
    have = float(problem.limits.sum())
    limits = ", ".join(
        f"{device.label} {limit / mib:.0f}"
        for device, limit in zip(problem.fleet.devices[:6], problem.limits, strict=False)
    )
    more = len(problem.fleet.devices) - 6
    limits += f" and {more} more" if more > 0 else ""
    if need > have:
        return (
            f"the model needs {need / mib:.0f} MiB with one micro-batch in flight, the fleet has "
            f"{have / mib:.0f} MiB ({limits}): {(need - have) / mib:.1f} MiB short; {remedy}"
        )
    a, b, size = _largest_piece(problem)
    most = int(problem.limits.argmax())
    if size > problem.limits[most]:
        node = problem.dag.ops[a]
        where = node.module_path or node.name
        return (
            f"ops {a} to {b - 1} ({where}) must stay together and need {size / mib:.1f} MiB; the largest "
            f"worker, {problem.fleet.devices[most].label}, has {problem.limits[most] / mib:.1f}: "
            f"{(size - problem.limits[most]) / mib:.1f} MiB short; {remedy}"
        )
    if problem.schedule is not None and problem.schedule.value == "gpipe":
        return (
            f"GPipe keeps all {problem.n_micro} micro-batches in flight, which no cut into stages fits "
            f"({limits} MiB); use --schedule 1f1b, or {remedy}"
        )
    other = partitioner not in ("op_fence", "one_piece")
    if over <= 0.0:
        hint = "try --partitioner op_fence, which looks at more; " if other else ""
        return (
            f"memory would do for some cut, but for none that {partitioner} has tried (limits in MiB: "
            f"{limits}): {hint}{remedy}"
        )
    hint = "; try --partitioner op_fence, which may reorder devices" if other else ""
    return (
        f"no cut into stages fits: the best is {over / mib:.1f} MiB short on "
        f"{problem.fleet.devices[order].label} (limits in MiB: {limits}); {remedy}{hint}"
    )


def recompute_hint(problem: Problem) -> str:
    """The advice to compute more again, where there is more."""
    return "" if problem.keeping.recompute is Recompute.FULL else "set recompute=full, "


def _largest_piece(problem: Problem) -> tuple[int, int, float]:
    """(begin, end, bytes) of the largest interval that no cut may divide."""
    p = problem.positions
    sizes = [problem.memory.bytes(int(a), int(b), 1) for a, b in pairwise(p)]
    at = int(np.argmax(sizes))
    return int(p[at]), int(p[at + 1]), sizes[at]


def _worst_overflow(problem: Problem) -> tuple[int, float]:
    """(device, bytes) of the least possible largest overflow, devices in join order."""
    p = problem.coarse(128)
    held = problem.memory.matrix(p, 1)
    held[np.tri(len(p), k=-1, dtype=bool)] = np.inf
    np.fill_diagonal(held, 0.0)  # a device may stay empty
    best = np.full(len(p), np.inf)
    best[0] = -np.inf
    came = []
    for limit in problem.limits:
        over = held - limit
        np.fill_diagonal(over, -np.inf)
        total = np.maximum(best[:, None], over)
        came.append(total.argmin(axis=0))
        best = total.min(axis=0)
    at, worst = len(p) - 1, (0, -np.inf)
    for device in reversed(range(len(came))):
        begin = int(came[device][at])
        over_here = held[begin, at] - problem.limits[device] if begin < at else -np.inf
        worst = max(worst, (device, float(over_here)), key=lambda w: w[1])
        at = begin
    return worst
