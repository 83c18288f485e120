"""Reasons why a device is not in the plan: the step's duration with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from coordinator.planning.chain import min_max
from coordinator.planning.problem import Candidate, Problem, Scored

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIED = 8  # devices asked about one by one
POSITIONS = 48


def left_out(problem: Problem, best: Scored) -> tuple[tuple[str, str], ...]:
    """(worker, reason) of every device that the plan does not use."""
    used = set(best.candidate.devices)
    spare = [d for d in range(len(problem.fleet.devices)) if d not in used]
    found = []
    for i, d in enumerate(spare):
        worker = problem.fleet.devices[d].worker
        if i < TRIED and len(used) <= 24:
            found.append((worker, _reason(problem, best, d)))
        else:
            found.append((worker, f"{len(used)} devices suffice; each further one slows the step"))
    return tuple(found)


def _reason(problem: Problem, best: Scored, device: int) -> str:
    judged = [
        problem.deferring(s) for c in _with(problem, best, device) if (s := problem.score(c)) is not None
    ]
    if not judged:
        limit = problem.limits[device] / 2**20
        return f"no place for it: its {limit:.0f} MiB hold no useful share of the model"
    step = min(s.step_s for s in judged)
    if step > best.step_s * 1.001:
        return f"it would slow the step from {best.step_s:.3g} s to {step:.3g} s"
    return f"it would not help: {step:.3g} s a step with it, {best.step_s:.3g} s without"


def _with(problem: Problem, best: Scored, device: int) -> Iterator[Candidate]:
    """The best plan with ``device`` inserted anywhere, cut anew."""
    positions = problem.coarse(POSITIONS)
    devices = best.candidate.devices
    for i in range(len(devices) + 1):
        order = (*devices[:i], device, *devices[i:])
        fits = [problem.fits(d, positions, 1) for d in order]
        cut = min_max(problem.chain(order, positions, fits))
        if cut is not None and np.isfinite(cut.value):
            yield Candidate(order, tuple(int(positions[s]) for s in cut.starts))
