"""Periods of local steps as their peers report them: who is in a round, and what a period came to. Pure.

A period is committed when every peer that is there has the same result of its round. Who is lost is taken out
of the plan, and the others exchange without it; the receipt of the round names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from coordinator.messages.facts import RoundMet

if TYPE_CHECKING:
    from atoll.plan import Plan
    from coordinator.messages.events import StepReady
    from coordinator.messages.jobs import JobState

Reports = Mapping[int, "StepReady"]
"""By rank; of every rank that is there."""


def disagreement(plan: Plan, ready: Reports) -> str:
    """Return what does not go together in the reports of a period, "" where all of it does."""
    receipts = {rank: report.receipt for rank, report in ready.items()}
    places = plan.places
    without = [rank for rank, receipt in receipts.items() if receipt is None]
    if without:
        return f"{places[without[0]].worker} reports a period without a receipt of its round"
    found = {rank: receipt for rank, receipt in receipts.items() if receipt is not None}
    for rank, receipt in found.items():
        if receipt.included != plan.present or receipt.share != 1.0:
            return (
                f"{places[rank].worker} has the contributions of ranks {list(receipt.included)} in "
                f"{receipt.share:.0%} of the model, expected are those of {list(plan.present)}"
            )
    digests = {receipt.digest for receipt in found.values()}
    if len(digests) > 1:
        first = found[plan.present[0]].digest
        others = ", ".join(places[rank].worker for rank, r in found.items() if r.digest != first)
        return f"peers have different results of a round: {others} and {places[plan.present[0]].worker}"
    return ""


def step_losses(plan: Plan, ready: Reports) -> list[float]:
    """Return the loss of each step of the period: the mean over the peers, by their shares of it."""
    shares = {rank: _share(plan, rank) for rank in ready}
    whole = sum(shares.values())
    reports = [(shares[rank], ready[rank].losses) for rank in sorted(ready)]
    count = min((len(losses) for _, losses in reports), default=0)
    return [sum(share * losses[at] for share, losses in reports) / whole for at in range(count)] or [math.nan]


def round_met(state: JobState, ready: Reports, at_s: float) -> RoundMet:
    """Return who is in the round of the period that is committed, and who is not."""
    assert state.plan is not None  # noqa: S101 - its ranks are ready
    plan, places = state.plan, state.plan.places
    receipts = [report.receipt for _, report in sorted(ready.items()) if report.receipt is not None]
    return RoundMet(
        state.job,
        state.version,
        state.due,
        receipts[0].round,
        tuple(places[rank].worker for rank in plan.present),
        {places[rank].worker: state.lost.get(rank, "is lost") for rank in sorted(plan.absent)},
        sum(receipt.sent_bytes for receipt in receipts),
        receipts[0].digest,
        at_s,
    )


def exchange_words(state: JobState, met: RoundMet | None, label: Callable[[str], str]) -> str:
    """Say who exchanges what with whom, "" where nobody does."""
    plan = state.plan
    if plan is None or plan.exchange is None:
        return ""
    exchange, places = plan.exchange, plan.places
    if not exchange.local:
        names = (" and ".join(label(stage.worker) for stage in replica.stages) for replica in plan.replicas)
        return f"exact gradients at every step, among {'; '.join(names)}"
    names = (label(places[rank].worker) for rank in plan.present)
    coded = "" if exchange.codec == "none" else f" in {exchange.codec}"
    words = f"{exchange.rule}{coded} every {exchange.every} steps, among {', '.join(names)}"
    for rank in sorted(plan.absent):
        words += f"; without {label(places[rank].worker)}: {state.lost.get(rank, 'is lost')}"
    if met is not None and met.version:
        words += f"; round {met.round} after {met.step + 1} steps: {len(met.included)} of {len(places)}"
    return words


def _share(plan: Plan, rank: int) -> int:
    start, stop = plan.replicas[plan.places[rank].replica].micros
    return stop - start
