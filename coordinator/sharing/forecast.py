"""Predicted starts of jobs that wait, and what a new job is promised: what is known, played forward. Pure.

Workers are counted, not named: which of them fit a job shows when they are free.

The promise bounds what overtaking costs: a job ends no later than PROMISE times what it would take if all ran
as they came. Short jobs overtake long ones until a promise is at stake.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf, isfinite

from coordinator.sharing.claims import Claim

PROMISE = 1.5  # times the seconds that a job would take if nobody overtook


def predicted_starts(
    waiting: Sequence[Claim], running: Sequence[Claim], idle: int, now_s: float
) -> dict[str, tuple[float, str]]:
    """Return by job when it is expected to begin, and after whose end: ``inf`` and "" where the ends of those
    that run are not known. ``waiting`` in the order in which they begin, each on its ``least`` workers."""
    ends = [(now_s + claim.left_s(len(claim.held)), claim.job, len(claim.held)) for claim in running]
    ends = [end for end in ends if isfinite(end[0])]
    heapq.heapify(ends)
    found, at_s = dict[str, tuple[float, str]](), now_s
    for claim in waiting:
        after = ""
        while idle < claim.least and ends:
            at_s, after, count = heapq.heappop(ends)
            idle += count
        if idle < claim.least:
            found[claim.job] = inf, ""
            continue
        found[claim.job] = at_s, after
        idle -= claim.least
        ends_s = at_s + claim.left_s(claim.least)
        if isfinite(ends_s):
            heapq.heappush(ends, (ends_s, claim.job, claim.least))
    return found


def promised_s(new: Claim, others: Iterable[Claim], workers: int, now_s: float) -> float:
    """Return until when a job that is submitted now is to have ended, ``inf`` where nobody can say."""
    before = sorted((claim for claim in others if claim.job != new.job), key=lambda claim: claim.submitted_s)
    line = [replace(claim, held=(), least=min(claim.least, workers)) for claim in (*before, new)]
    starts_s, _ = predicted_starts(line, (), workers, now_s)[new.job]
    return now_s + PROMISE * (starts_s + new.left_s(new.least) - now_s)
