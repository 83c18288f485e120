"""Which idle worker may repeat which rank's steps beside the plan, and what that costs. Pure.

A hot standby costs its neighbours' uplinks the rank's messages a second time, and its volunteer the stage's
memory and computing. It is chosen first for the rank whose loss costs most.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from coordinator.messages.jobs import STEPPING, JobState, Standby
from coordinator.pipeline.assigning import neighbours
from coordinator.pipeline.changes.price import LossCost, loss_costs, repeated_s
from coordinator.pipeline.changes.successors import Successors
from coordinator.pipeline.history import not_repeatable
from coordinator.planning.costs.losses import UPLINK_SHARE, WORTH_S

if TYPE_CHECKING:
    from coordinator.membership.roster import Roster
    from coordinator.messages.facts import JobRecord

FEWEST_STEPS = 3  # measured, and left to do


@dataclass(frozen=True, slots=True)
class Chosen:
    """A worker for a rank, and why."""

    worker: str
    rank: int
    why: str


def wanted(state: JobState) -> int:
    """Return how many standbys the job may have now."""
    steps_left = state.steps - state.step
    if state.phase not in STEPPING or state.run.moving or steps_left < FEWEST_STEPS or state.plan is None:
        return 0
    if len(state.plan.replicas) != 1 or len(state.run.step_times_s) < FEWEST_STEPS:
        return 0
    asked = state.spec.standbys
    return state.n_ranks if asked is None else min(asked, state.n_ranks)


def choose(state: JobState, record: JobRecord, roster: Roster, resting: frozenset[str]) -> Chosen | None:
    """Return the next standby: for the most expensive loss among ranks that some idle worker can repeat;
    ``resting``: workers that are not to be asked now."""
    if len(state.standbys) >= wanted(state) or not_repeatable(state, record):
        return None
    costs = loss_costs(state, record, roster)
    notice_s = roster.liveness.dead_after_s
    ranks = [rank for rank in range(state.n_ranks) if rank not in state.standbys]
    for rank in sorted(ranks, key=lambda rank: -costs[rank].seconds):
        saved_s = costs[rank].seconds - notice_s
        if state.spec.standbys is None and saved_s < WORTH_S:
            continue
        worker = best(state, roster, rank, resting)
        if worker:
            return Chosen(worker, rank, _why(costs[rank], saved_s))
    return None


def _why(cost: LossCost, saved_s: float) -> str:
    return f"a loss would cost {cost.seconds:.1f} s without it, {cost.seconds - saved_s:.1f} s with it"


def best(state: JobState, roster: Roster, rank: int, resting: frozenset[str]) -> str:
    """Return the idle worker that repeats a rank's steps best, "" where none can: of the same class first, so
    that its state has the same bits, then who keeps up, then the fastest in the rank's place."""
    by_number = state.spec.standbys is not None  # then the owner answers for what links and machines do
    if not (by_number or _links_allow(state, roster, rank)):
        return ""
    most_s = state.median_step_s or inf  # who takes longer for each falls behind
    fit, successors = [], Successors(state, roster, frozenset())
    for successor in successors.of(rank):
        if successor.worker not in resting:
            lags = repeated_s(state, roster, rank, successor.worker, successors.fleet) >= most_s
            if by_number or not lags:
                fit.append((successor.other_bits, lags, successor.step_s, successor.worker))
    return min(fit)[-1] if fit else ""


def sent_bytes(state: JobState, source: int, target: int) -> int:
    """Return the bytes that one rank sends another in a step: as the last one had it, else as predicted."""
    places, report, prediction = state.adopted.places, state.run.reports.get(source), state.adopted.prediction
    if report is not None and report.links:
        return sum(link.n_bytes for link in report.links if link.peer == places[target].worker)
    pair = (places[source].worker, places[target].worker)
    links = prediction.links if prediction is not None else ()
    return sum(link.bytes_per_step for link in links if (link.source, link.target) == pair)


def repeated_bytes(state: JobState, rank: int) -> int:
    """Return the bytes a step that a rank's neighbours send once more for who repeats it."""
    return sum(sent_bytes(state, other, rank) for other in neighbours(state.adopted, rank))


def standby_words(state: JobState, standby: Standby) -> str:
    """Return how far a standby is, what it costs its volunteer, and what it is for."""
    behind = max(0, state.step - standby.step)
    prediction = state.adopted.prediction
    memory = f", {prediction.stages[standby.rank].memory_bytes / 2**20:.0f} MiB" if prediction else ""
    loaded = f"{behind} steps behind" if standby.loaded else f"loading, {behind} steps to repeat"
    sent_mb = repeated_bytes(state, standby.rank) / 1e6
    what = f"it is to take the stage: {standby.swap}" if standby.swap else standby.why
    return f"{loaded}; takes {sent_mb:.3g} MB a step{memory} of its machine; {what}"


def _links_allow(state: JobState, roster: Roster, rank: int) -> bool:
    """Whether the neighbours' uplinks have room for the rank's messages once more, beside what they carry for
    the plan and for other standbys."""
    places, step_s = state.adopted.places, state.median_step_s
    if not step_s:
        return False
    sites = {w: x.introduction.site for w, x in roster.workers.items() if not x.member.gone}
    uplinks = roster.links.uplinks(sites)
    ranks = [rank, *state.standbys]
    for other in neighbours(state.adopted, rank):
        worker = places[other].worker
        groups = [frozenset({worker})] + [frozenset(u.members) for u in uplinks if worker in u.members]
        estimates = roster.links.table.estimates
        shown = (estimates[pair].bandwidth_bps for pair in estimates.of(worker) if pair[0] == worker)
        rates = [max(shown, default=0.0)]
        rates += [u.up_bps for u in uplinks if worker in u.members]
        for members, bps in zip(groups, rates, strict=True):
            senders = [at for at, place in enumerate(places) if place.worker in members]
            carried = sum(
                sent_bytes(state, source, target) * (1 + ranks.count(target))
                for source in senders
                for target in neighbours(state.adopted, source)
            )
            if bps > 0 and 8 * carried / step_s > UPLINK_SHARE * bps:
                return False
    return True
