"""Rates that gossip's pairs are drawn by, while a job runs: of newcomers, of links that have changed. Pure.

A table is the plan's, so another one is a reconfiguration: all connect anew, which costs an exchange and at
most a step. Therefore it waits until many pairs have moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from coordinator.messages.jobs import STEPPING, Cause, Event, JobState, moved
from coordinator.planning.gossip_plans import moved_share, renewed

if TYPE_CHECKING:
    from atoll.exchange import PairTable
    from atoll.plan import Plan
    from coordinator.membership.effects import Effects
    from coordinator.membership.roster import Roster

LOOK_S = 60.0  # between two looks at a job's links
MOVED = 0.2  # share of the pairs that are fast where they were slow, or slow where they were fast


def newer_table(
    state: JobState,
    roster: Roster,
    workers: Sequence[str],
    ranks: Sequence[int],
    *,
    predicted: bool = False,
) -> PairTable | None:
    """Return the rates that pairs of ``ranks`` have by now; None where pairs are not drawn by rates, or no
    round has shown yet what it sends. ``predicted``: then as the plan predicts it. Whoever was lost has no
    rates in the table that there is and would never be drawn, also after a restart, or by a peer alone."""
    plan = state.plan
    if plan is None or plan.exchange is None or plan.exchange.pairs is None:
        return None
    reports = state.run.reports.values()
    sent = max((report.receipt.sent_bytes for report in reports if report.receipt is not None), default=0)
    if not sent and predicted:
        sent = _predicted_bytes(plan, plan.exchange.every)
    if not sent:
        return None
    fleet = roster.fleet([workers[rank] for rank in ranks], state.spec.training.precision.value)
    return renewed(fleet, ranks, len(plan.places), sent, plan.exchange.pairs)


def _predicted_bytes(plan: Plan, every: int) -> int:
    """Return what a round sends from the peer that sends most, as predicted; 0 without a prediction."""
    sent: Counter[str] = Counter()
    for link in plan.prediction.links if plan.prediction is not None else ():
        sent[link.source] += link.bytes_per_step * every
    return max(sent.values(), default=0)


@dataclass(slots=True)
class PairTables:
    """Of all jobs; ``step``: step a job's machine."""

    effects: Effects
    step: Callable[[str, Event], None]
    _looked_s: dict[str, float] = field(default_factory=dict)  # by job

    def look(self, state: JobState) -> None:
        """Have pairs drawn by newer rates where many have moved."""
        over = state.step >= state.steps  # no round follows, and an evaluation would be lost
        if state.phase not in STEPPING or state.plan is None or state.run.seating or over:
            self._looked_s.pop(state.job, None)
            return
        if self.effects.now_s < self._looked_s.setdefault(state.job, self.effects.now_s) + LOOK_S:
            return
        self._looked_s[state.job] = self.effects.now_s
        workers = tuple(place.worker for place in state.plan.places)
        newer = newer_table(state, self.effects.roster, workers, state.present)
        exchange = state.plan.exchange
        if newer is None or exchange is None or exchange.pairs is None:
            return
        share = moved_share(exchange.pairs, newer)
        if share >= MOVED:
            words = f"{share:.0%} of the pairs are faster or slower than they were: pairs are drawn anew"
            newer_exchange = replace(exchange, pairs=newer)
            self.step(state.job, moved(state, workers, (), Cause.CHOSEN, words, exchange=newer_exchange))
