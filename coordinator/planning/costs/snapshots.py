"""What a stage stores and sends of its state, how often ranks keep snapshots for each other, and what a loss
costs then. Pure.

Source of the interval: Young (1974); decision 058.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

from atoll.opdag import DTYPE_BYTES, LeafRef, OpDag, Source, leaf_refs
from atoll.spare import DELAY_SHARE, spare_share
from compressors.deltas import MOST_BYTES_PER_S
from coordinator.planning.costs.memory import leaf_bytes
from coordinator.planning.costs.op_seconds import leaf_meta

if TYPE_CHECKING:
    from atoll.job import Optimizer, TrainingSpec
    from coordinator.planning.costs.fleet import Fleet
    from coordinator.planning.costs.timeline import LinkUse

EVERY_S = 20.0  # at least so often while that costs less than ...
CHEAP = 0.01  # ... this share of the time
SLOWED = 2 * DELAY_SHARE  # of the time that one is under way, the most that training loses by it
DISK_BYTES_PER_S = 8e6  # that snapshots write to a worker's disk: 0.7 TB a day
SHARE = 0.7  # of a link that carries nothing else, as measured behind 8 Mbit/s
ORDERS_S = 1.0  # until every rank has written its part, and heard whose it is to fetch
CODED_MOMENTS = 2.03  # bytes a parameter, of both in 8 bits: ``compressors.moments``
# What deltas against 10 steps before leave: 0.71 to 0.83 in float32, 0.45 to 0.67 in 16 bits (decision 083).
USUAL_SHARE, NARROW_SHARE = 0.8, 0.57


class Rank(NamedTuple):
    """A stage's worker in a plan."""

    device: int  # in the fleet
    part_bytes: int  # that its stage stores
    compute_s: float  # a step
    takers: int  # idle workers whose memory holds its stage


def every_s(took_s: float, part_bytes: int, losses_per_s: float) -> float:
    """Return the seconds between two snapshots of a plan of which ``losses_per_s`` ranks are lost a second;
    ``took_s``: until the last one was whole, ``part_bytes``: of the largest part."""
    cost_s = SLOWED * took_s
    least_s = max(2.0 * took_s, 2.0 * part_bytes / DISK_BYTES_PER_S)  # a worker writes two parts
    most_s = max(EVERY_S, cost_s / CHEAP)
    return max(least_s, min(sqrt(2.0 * cost_s / losses_per_s), most_s))


def worth_it(took_s: float, part_bytes: int, losses_per_s: float, age_s: float) -> bool:
    """Return whether snapshots cost less than what they save; ``age_s``: of the newest checkpoint, on
    average, which a loss goes back to without them. One of which nothing is known is tried."""
    if took_s <= 0.0:
        return True
    apart_s = every_s(took_s, part_bytes, losses_per_s)
    return SLOWED * took_s / apart_s + losses_per_s * (apart_s / 2 + took_s) < losses_per_s * age_s


class Part(NamedTuple):
    """A rank's part of a snapshot, and its way to who keeps it."""

    n_bytes: int
    bps: float
    latency_s: float
    busy_s: float  # of a step, that the rank's messages are on links


def taken_s(parts: Sequence[Part], step_s: float, n_micro: int) -> float:
    """Return the seconds until a snapshot is whole, in the time that links have to spare."""
    slowest_s = 0.0
    for part in parts:
        busy = (part.busy_s + 2 * n_micro * part.latency_s) / step_s if step_s > 0 else 0.0
        often = n_micro / step_s if step_s > 0 else 0.0
        share = min(SHARE, spare_share(part.bps / 8.0, busy, often))
        slowest_s = max(slowest_s, 8.0 * part.n_bytes / (part.bps * share))
    return slowest_s + ORDERS_S


class DoneAgain(NamedTuple):
    """Seconds of training that a loss costs where nobody idle can take over: since the newest snapshot, or
    the newest checkpoint where snapshots are not worth what they cost."""

    usual_s: float
    most_s: float
    every_s: float  # between two of these
    took_s: float  # until one is whole
    losses_per_s: float  # of all workers of the plan
    snapshot_s: float  # until a snapshot would be whole
    kept: bool  # there are snapshots

    @property
    def words(self) -> str:
        often = in_hours(1.0 / self.losses_per_s)
        if self.kept:
            name, more = "snapshot", f"; a step takes up to {SLOWED:.0%} longer meanwhile"
        else:
            name, more = "checkpoint", f"; no snapshots: one takes {self.snapshot_s:.0f} s beside training"
        return (
            f"nobody idle can take over every stage: a loss, one in {often}, costs about "
            f"{self.usual_s:.0f} s of training, at most {self.most_s:.0f} s (a {name} every "
            f"{self.every_s:.0f} s, whole after {self.took_s:.0f} s{more})"
        )


def in_hours(seconds: float) -> str:
    """Return a time between losses in words."""
    return f"{seconds / 60.0:.0f} min" if seconds < 5400.0 else f"{seconds / 3600.0:.3g} h"


class Checkpoints(NamedTuple):
    """How old the newest checkpoint is, in seconds."""

    every_s: float
    took_s: float  # until one is whole
    steps_s: float  # of the whole job

    @property
    def age_s(self) -> float:
        """On average; no more than half of the job."""
        return min(self.every_s / 2 + self.took_s, self.steps_s / 2)


def done_again(
    ranks: Sequence[Rank],
    links: Sequence[LinkUse],
    step_s: float,
    fleet: Fleet,
    n_micro: int,
    checkpoints: Checkpoints,
) -> DoneAgain:
    """Return what a loss costs in a pipeline of which nobody idle can take a stage over; of two ranks at
    least, as nobody else can have the state of one."""
    parts = []
    for stage, rank in enumerate(ranks):
        to = ranks[(stage + 1) % len(ranks)].device
        busy_s = sum(link.busy_s for link in links if link.source == stage)
        bps = float(fleet.bandwidth_bps[rank.device, to]) * fleet.payload_share
        parts.append(Part(rank.part_bytes, bps, float(fleet.latency_s[rank.device, to]), busy_s))
    took_s, losses_per_s = taken_s(parts, step_s, n_micro), len(ranks) * fleet.losses_per_s
    largest = max(rank.part_bytes for rank in ranks)
    if worth_it(took_s, largest, losses_per_s, checkpoints.age_s):
        apart_s = every_s(took_s, largest, losses_per_s)
        usual_s, most_s = apart_s / 2 + took_s + step_s, apart_s + took_s + 2 * step_s
        return DoneAgain(usual_s, most_s, apart_s, took_s, losses_per_s, took_s, kept=True)
    apart_s, stored_s = checkpoints.every_s, checkpoints.took_s
    most_s = min(apart_s + stored_s + 2 * step_s, checkpoints.steps_s)
    return DoneAgain(checkpoints.age_s, most_s, apart_s, stored_s, losses_per_s, took_s, kept=False)


def part_bytes(dag: OpDag, optimizer: Optimizer, pieces: Sequence[tuple[int, int]]) -> int:
    """Return the bytes of what a stage stores: its tensors with the optimizer's state, no gradients."""
    leaves = {leaf for a, b in pieces for node in dag.ops[a:b] for leaf in leaf_refs(node)}
    return int(sum(held - trained for held, trained in (leaf_bytes(dag, leaf, optimizer) for leaf in leaves)))


class Sent(NamedTuple):
    """What a checkpoint behind another sends to the store, and what a copy of it fetches."""

    by_stage: tuple[int, ...]  # bytes of what training changes: at most so much
    share: float  # of that, usually left of it as deltas
    still_bytes: int  # of what training does not change, and nobody sends again

    @property
    def whole_bytes(self) -> int:
        return sum(self.by_stage)

    @property
    def words(self) -> str:
        most, largest = self.whole_bytes / 1e6, max(self.by_stage)
        usual = f"about {most * self.share:.3g} MB as deltas, " if self.share < 1 else ""
        still = f", and nothing of {self.still_bytes / 1e6:.3g} MB frozen" if self.still_bytes else ""
        return (
            f"a checkpoint sends {usual}at most {most:.3g} MB (stage {self.by_stage.index(largest)} "
            f"{largest / 1e6:.3g} MB){still}; who keeps a copy fetches as much"
        )


def sent_bytes(
    dag: OpDag, training: TrainingSpec, stages: Sequence[Sequence[tuple[int, int]]], bytes_per_s: float
) -> Sent:
    """Return what storing sends; ``stages``: the ops of each, in pieces; ``bytes_per_s``: of the slowest way
    to the store, as fast ones get no deltas."""
    seen = set[LeafRef]()
    by_stage, narrow, still = [], 0, 0
    for pieces in stages:
        leaves = {leaf for a, b in pieces for node in dag.ops[a:b] for leaf in leaf_refs(node)} - seen
        seen |= leaves  # a tied one the first stage stores
        own = 0
        for leaf in leaves:
            n_bytes = _changing_bytes(dag, leaf, training)
            own += n_bytes
            if not n_bytes:
                still += int(leaf_bytes(dag, leaf, training.optimizer)[0])
            elif DTYPE_BYTES[leaf_meta(dag, leaf).dtype] <= 2:
                narrow += n_bytes
        by_stage.append(own)
    wide = sum(by_stage) - narrow
    usual = (USUAL_SHARE * wide + NARROW_SHARE * narrow) / max(1, wide + narrow)
    return Sent(tuple(by_stage), 1.0 if bytes_per_s > MOST_BYTES_PER_S else usual, still)


def _changing_bytes(dag: OpDag, leaf: LeafRef, training: TrainingSpec) -> int:
    """Return the bytes that a leaf has in a state; 0 for one that training does not change."""
    held, trained = leaf_bytes(dag, leaf, training.optimizer)
    if trained and training.int8_moments:
        return int(trained + CODED_MOMENTS * leaf_meta(dag, leaf).elements)
    if trained or (leaf.source is Source.BUFFER and dag.buffers[leaf.name].mutated):
        return int(held - trained)
    return 0
