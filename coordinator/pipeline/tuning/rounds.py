"""Codec of peers' rounds, and rates that pairs are drawn by, while a job runs: they follow rounds. Pure.

The codec changes where the job leaves it open: a round says how long its links carried it, its period how
long the steps computed. The rates that gossip's pairs are drawn by change where many pairs have moved. Both
are the plan's, so all connect anew, which costs an exchange and at most a step; the steps that peers have
taken stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from coordinator.messages.jobs import Cause, JobState, PlanChange, moved
from coordinator.planning.peers.exchange_codecs import fitting
from coordinator.planning.peers.gossip_plans import moved_share, renewed

if TYPE_CHECKING:
    from atoll.exchange import Exchange, PairTable
    from atoll.plan import Plan
    from coordinator.membership.effects import Effects
    from coordinator.membership.roster import Roster

LOOK_S = 60.0  # between two looks at the rates of a job's pairs
MOVED = 0.2  # share of the pairs that are fast where they were slow, or slow where they were fast


def newer_codec(state: JobState, exchange: Exchange) -> str:
    """Return the codec that fits the last round; the one that it has where that fits, or is not to change."""
    reports = state.run.reports.values()
    peer_of = {place.worker: place.replica for place in state.adopted.places}
    carried_s = max(
        (
            link.busy_s
            for rank, report in state.run.reports.items()
            for link in report.links  # those inside a peer carry its pipeline
            if peer_of.get(link.peer) != state.adopted.places[rank].replica
        ),
        default=0.0,
    )
    step_s = max((r.computed_s for r in reports), default=0.0)
    if not state.spec.training.codes_rounds or not carried_s or not step_s:
        return exchange.codec
    return fitting(exchange.codec, carried_s, exchange.every * step_s)


def newer_table(
    state: JobState, roster: Roster, workers: Sequence[str], ranks: Sequence[int], *, predicted: bool = False
) -> PairTable | None:
    """Return the rates that pairs of ``ranks`` have by now; None where pairs are not drawn by rates, or no
    round has shown yet what it sends. ``predicted``: then as the plan predicts it. Whoever was lost has no
    rates in the table that there is and would never be drawn, also after a restart, or by a peer alone."""
    plan = state.plan
    if plan is None or plan.exchange is None or plan.exchange.pairs is None:
        return None
    reports = state.run.reports.values()
    sent = max((sum(receipt.sent_bytes for receipt in report.receipts) for report in reports), default=0)
    if not sent and predicted:
        sent = _predicted_bytes(plan, plan.exchange.every)
    if not sent:
        return None
    fleet = roster.fleet([workers[rank] for rank in ranks], state.spec.training.precision.value)
    return renewed(plan, fleet, ranks, sent, plan.exchange.pairs)


def _predicted_bytes(plan: Plan, every: int) -> int:
    """Return what a round sends from the peer that sends most, as predicted; 0 without a prediction."""
    sent: Counter[str] = Counter()
    for link in plan.prediction.links if plan.prediction is not None else ():
        sent[link.source] += link.bytes_per_step * every
    return max(sent.values(), default=0)


@dataclass(slots=True)
class Rounds:
    """Of all jobs."""

    effects: Effects
    _looked_s: dict[str, float] = field(default_factory=dict)  # by job, at its pairs

    def candidates(self, state: JobState) -> Iterator[PlanChange]:
        """Yield the plan with another codec, or other rates."""
        exchange = state.plan.exchange if state.plan is not None and state.local else None
        if exchange is None:
            return
        workers = tuple(place.worker for place in state.adopted.places)
        codec = newer_codec(state, exchange)
        if codec != exchange.codec:
            words = (
                f"rounds travel in {codec}, in {exchange.codec} until now: so the links carry them in time"
            )
            newer = replace(exchange, codec=codec)
            yield moved(state, workers, (), Cause.CHOSEN, words, exchange=newer)
        now_s = self.effects.now_s
        if exchange.pairs is None or now_s < self._looked_s.setdefault(state.job, now_s) + LOOK_S:
            return
        self._looked_s[state.job] = now_s
        table = newer_table(state, self.effects.roster, workers, state.present)
        share = moved_share(exchange.pairs, table) if table is not None else 0.0
        if share >= MOVED:
            words = f"{share:.0%} of the pairs are faster or slower than they were: pairs are drawn again"
            newer = replace(exchange, pairs=table)
            yield moved(state, workers, (), Cause.CHOSEN, words, exchange=newer)

    def over(self, job: str) -> None:
        """The job has ended."""
        self._looked_s.pop(job, None)
