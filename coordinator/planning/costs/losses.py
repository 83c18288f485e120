"""What losses make of a plan's step, at the fleet's rate of losses: plans are ranked by it. Pure.

    expected = step x (1 + snapshots) x (1 + workers x losses a second x loss)

``snapshots``: share of the time that the ranks' snapshots cost. ``loss``: seconds that a loss costs, the mean
over the plan's workers:

| who is idle | seconds |
|---|---|
| a standby beside the rank | to notice it, and a step |
| one that can hold the stage | to notice, to load, and that stage's steps since the checkpoint |
| nobody | to notice, to plan anew, to store and load, and all steps since the snapshot or checkpoint |

On average no more than half of the job is done again. What a step takes after the loss is left out: whether
the fleet's last machine was in the plan or stood by, the same number of machines is left, none of them idle,
until somebody joins (decision 061).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.job import CHECKPOINT_EVERY_S
from coordinator.planning.costs.snapshots import (
    SLOWED,
    Checkpoints,
    DoneAgain,
    Rank,
    done_again,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.job import TrainingSpec
    from coordinator.planning.costs.fleet import Fleet
    from coordinator.planning.costs.timeline import LinkUse

NOTICE_S = 2.0  # until a worker that is silent counts as lost: a coordinator's default
PLANNED_WITHIN_S = 15.0  # a plan made anew: links of a few newcomers, their ops, the search
STORING_SHARE = 20.0  # storing takes at most a twentieth of the time: a slow uplink stores rarely
UPLINK_SHARE = 0.9  # of a neighbour's uplink, the most that a step's messages may take with the standby's
WORTH_S = 5.0  # that a loss costs less with a standby: below that nobody's machine is asked for it


@dataclass(frozen=True, slots=True)
class LossCosts:
    """A plan's step as predicted, and with what losses cost."""

    step_s: float
    snapshots: float  # share of the time
    workers: int
    losses_per_s: float  # of one worker
    loss_s: float  # that one costs, on average
    again: DoneAgain | None = None  # of a rank that nobody idle can take over

    @property
    def expected_s(self) -> float:
        """Seconds of wall time a trained step."""
        return self.step_s * (1.0 + self.snapshots) * (1.0 + self.workers * self.losses_per_s * self.loss_s)


def loss_costs(
    step_s: float, ranks: Sequence[Rank], links: Sequence[LinkUse], fleet: Fleet, training: TrainingSpec
) -> LossCosts:
    """Return what losses cost a plan of one pipeline; ``ranks`` by stage, ``links`` between stages."""
    # A part to the store, or from there to who takes it over.
    part_s = [8.0 * r.part_bytes / fleet.devices[r.device].coordinator.bandwidth_bps for r in ranks]
    storing_s = max(part_s)
    between_s = training.checkpoint_every * step_s or max(CHECKPOINT_EVERY_S, STORING_SHARE * storing_s)
    checkpoints = Checkpoints(between_s, storing_s, training.steps * step_s)
    age_s, n_micro = checkpoints.age_s, training.n_micro
    again = done_again(ranks, links, step_s, fleet, n_micro, checkpoints) if len(ranks) > 1 else None
    costs = []
    for stage, rank in enumerate(ranks):
        if rank.takers:
            received_s = max((link.busy_s for link in links if link.target == stage), default=0.0)
            alone = min(1.0, max(rank.compute_s, received_s) / step_s) if step_s > 0 else 1.0
            costs.append(NOTICE_S + part_s[stage] + alone * age_s)
        else:
            back_s = age_s if again is None else min(again.usual_s, age_s)
            costs.append(NOTICE_S + PLANNED_WITHIN_S + 2 * storing_s + back_s)
    _stand_by(costs, step_s, ranks, links)
    ringed = again is not None and not all(rank.takers for rank in ranks)
    return LossCosts(
        step_s,
        SLOWED * again.took_s / again.every_s if again is not None and ringed and again.kept else 0.0,
        len(ranks),
        fleet.losses_per_s,
        sum(costs) / len(costs),
        again if ringed else None,
    )


def _stand_by(costs: list[float], step_s: float, ranks: Sequence[Rank], links: Sequence[LinkUse]) -> None:
    """Put a standby beside the ranks whose loss costs most, as many as are idle."""
    left = max(rank.takers for rank in ranks)
    for stage in sorted(range(len(costs)), key=lambda stage: -costs[stage]):
        with_s = NOTICE_S + step_s
        worth = ranks[stage].takers > 0 and costs[stage] - with_s >= WORTH_S
        if left and worth and _allowed(stage, step_s, links):
            costs[stage], left = with_s, left - 1


def _allowed(stage: int, step_s: float, links: Sequence[LinkUse]) -> bool:
    """Whether those who send to a stage have room on their uplinks to send it all once more."""
    busy: dict[int, float] = {}
    for link in links:
        busy[link.source] = busy.get(link.source, 0.0) + link.busy_s
    again = ((link.source, link.busy_s) for link in links if link.target == stage)
    return all(busy[source] + busy_s <= UPLINK_SHARE * step_s for source, busy_s in again)
