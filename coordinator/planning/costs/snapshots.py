"""How often the ranks of a plan keep snapshots for each other, and what a loss costs then. Pure.

Source of the interval: Young (1974); decision 058.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

from atoll.opdag import OpDag, leaf_refs
from coordinator.planning.costs.memory import leaf_bytes

if TYPE_CHECKING:
    from atoll.job import Optimizer
    from atoll.opdag import OpDag
    from atoll.plan import Prediction
    from coordinator.planning.costs.fleet import Fleet

EVERY_S = 20.0  # at least so often while that costs less than ...
CHEAP = 0.01  # ... this share of the time
SLOWED = 0.05  # of the time that one is under way, what training loses by it
DISK_BYTES_PER_S = 8e6  # that snapshots write to a worker's disk: 0.7 TB a day
PACE = 0.5  # of the time in which a rank fetches another's part
ORDERS_S = 1.0  # until every rank has written its part, and heard whose it is to fetch
LEAST_FREE = 0.1  # of a line that training keeps busy
USUAL_LOSSES_PER_S = 1.0 / (4.0 * 3600.0)  # of a worker of which nothing is known


def every_s(took_s: float, part_bytes: int, losses_per_s: float) -> float:
    """Return the seconds between two snapshots of a plan of which ``losses_per_s`` ranks are lost a second;
    ``took_s``: until the last one was whole, ``part_bytes``: of the largest part."""
    cost_s = SLOWED * took_s
    least_s = max(2.0 * took_s, 2.0 * part_bytes / DISK_BYTES_PER_S)  # a worker writes two parts
    most_s = max(EVERY_S, cost_s / CHEAP)
    return max(least_s, min(sqrt(2.0 * cost_s / losses_per_s), most_s))


class DoneAgain(NamedTuple):
    """Seconds of training that a loss costs where nobody idle can take over."""

    usual_s: float
    most_s: float
    every_s: float  # between two snapshots
    took_s: float  # until one is whole

    @property
    def words(self) -> str:
        return (
            f"nobody is idle: the loss of a worker costs about {self.usual_s:.0f} s of training, at most "
            f"{self.most_s:.0f} s (a snapshot every {self.every_s:.0f} s, whole after {self.took_s:.0f} s)"
        )


def done_again(
    dag: OpDag,
    optimizer: Optimizer,
    intervals: Sequence[tuple[int, int]],
    prediction: Prediction,
    fleet: Fleet,
) -> DoneAgain | None:
    """Return what a loss costs in a pipeline over every worker of a fleet, its stages in order; None of one
    worker, whose state nobody else can have."""
    workers = [stage.worker for stage in prediction.stages]
    if len(workers) < 2:
        return None
    parts = [_part_bytes(dag, optimizer, *interval) for interval in intervals]
    took_s = 0.0
    for rank, worker in enumerate(workers):
        at, to = fleet.index[worker], fleet.index[workers[(rank + 1) % len(workers)]]
        busy_s = sum(link.busy_s for link in prediction.links if link.source == worker)
        free = max(LEAST_FREE, 1.0 - busy_s / prediction.step_s) if prediction.step_s > 0 else 1.0
        bps = float(fleet.bandwidth_bps[at, to]) * fleet.payload_share * min(PACE, free)
        took_s = max(took_s, 8.0 * parts[rank] / bps)
    took_s += ORDERS_S
    apart_s = every_s(took_s, max(parts), len(workers) * USUAL_LOSSES_PER_S)
    return DoneAgain(
        apart_s / 2 + took_s + prediction.step_s, apart_s + took_s + 2 * prediction.step_s, apart_s, took_s
    )


def _part_bytes(dag: OpDag, optimizer: Optimizer, start: int, stop: int) -> int:
    """Return the bytes of what a stage stores: its tensors with the optimizer's state, no gradients."""
    leaves = {leaf for node in dag.ops[start:stop] for leaf in leaf_refs(node)}
    return int(sum(held - trained for held, trained in (leaf_bytes(dag, leaf, optimizer) for leaf in leaves)))
