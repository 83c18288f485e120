"""Makes a failing run smaller: fewer faults, jobs and workers, as long as something does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.sim.faults import OnWorker
from tests.sim.world import Scenario, World, told, violation_of

MOST_RUNS = 300


def holding(found: Scenario, shown: int = 60) -> World:
    """Run a scenario in which everything holds, or fail with the smallest one in which something does not."""
    why, world = violation_of(found)
    if why:
        small = shrunk(found)
        why, world = violation_of(small)
        pytest.fail(f"seed {found.seed}: {why}\n{small!r}\n{told(world, shown)}", pytrace=False)
    return world


def shrunk(found: Scenario, fails: Callable[[Scenario], bool] | None = None) -> Scenario:
    """Return the smallest failing run met on the way down from ``found``, which fails."""
    fails = fails or (lambda candidate: bool(violation_of(candidate)[0]))
    runs = 0
    smaller = True
    while smaller and runs < MOST_RUNS:
        smaller = False
        for candidate in _smaller(found):
            runs += 1
            if fails(candidate):
                found, smaller = candidate, True
                break
            if runs >= MOST_RUNS:
                break
    return found


def _smaller(found: Scenario) -> Iterator[Scenario]:
    for at in range(len(found.faults)):
        yield replace(found, faults=found.faults[:at] + found.faults[at + 1 :])
    if found.pipeline + found.federated > 1:
        if found.pipeline:
            yield replace(found, pipeline=found.pipeline - 1)
        if found.federated:
            yield replace(found, federated=found.federated - 1)
    last = f"w{found.workers - 1}"
    if found.workers > 1 and all(getattr(fault, "worker", "") != last for fault in found.faults):
        yield replace(found, workers=found.workers - 1)
    for at, fault in enumerate(found.faults):
        if isinstance(fault, OnWorker) and fault.worker != "w0":
            renamed = replace(fault, worker="w0")
            yield replace(found, faults=(*found.faults[:at], renamed, *found.faults[at + 1 :]))
