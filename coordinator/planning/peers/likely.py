"""Ways to share out a large fleet's machines among replicas, of which a sketch picks the ones to plan.

Planning a way takes seconds, and of fleets joined by thin links most ways are hopeless: an exchange alone
takes longer than one pipeline's step. In a small fleet every way is planned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.exchange import Exchange
from coordinator.planning import TUNED
from coordinator.planning.peers.partitions import Rooms, partitions
from coordinator.planning.peers.sketches import Sketches
from coordinator.planning.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from coordinator.planning.peers.partitions import Parts
    from coordinator.planning.planner import PlanRequest


def large(request: PlanRequest) -> bool:
    """Return whether not every way is planned."""
    return len(request.fleet.devices) > TUNED.every_count


def likely_ways(request: PlanRequest, counts: Iterable[int], within_s: float = float("inf")) -> list[Parts]:
    """Return parts for so many replicas each: all of a small fleet; of a large one those whose sketch ends a
    step first, none that takes much longer than ``within_s``."""
    ways = [parts for count in counts for parts in partitions(request.fleet, count)]
    if not large(request):
        return ways
    training = request.training
    problem = Problem(
        request.dag, replace(training, n_micro=1, blocks=1), request.fleet, divisions=request.divisions
    )
    need = problem.memory.state_bytes(0, problem.n_ops)
    room = {d.worker: float(limit) for d, limit in zip(request.fleet.devices, problem.limits, strict=True)}
    rooms = Rooms(room, need, need)
    exchange = training.gradient_exchange or Exchange()
    sketches = Sketches(problem, exchange, training.n_micro, training.seed, rooms)
    held = (parts for parts in ways if all(map(rooms.hold, parts)))
    found = {parts: sketches.of(parts).step_s for parts in held}
    most_s = TUNED.sketched_apart * within_s
    ranked = sorted((parts for parts, step_s in found.items() if step_s <= most_s), key=found.__getitem__)
    return ranked[: TUNED.likely_ways]


def likely_counts(request: PlanRequest, most: int) -> Sequence[int]:
    """Return numbers of replicas that are compared: each in a small fleet, in a large one the likeliest."""
    counts = range(2, most + 1)
    return list(dict.fromkeys(map(len, likely_ways(request, counts)))) if large(request) else counts
