"""Disputes: who is taken out where peers, or replicas, do not have the same results. Pure.

One report that is alone is its own worker's fault, or of who gave that worker another total than the others:
one dispute cannot say which. Another one with other company can, so a worker that is a suspect in two of them
goes, and the others stay. Of a pair both are suspects, and both go until then. Where half of the peers
diverge at once those that do not are suspects: what one brought to the last round may have done it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from coordinator.pipeline.health.doubt import OFTEN

if TYPE_CHECKING:
    from coordinator.messages.jobs import JobState
    from coordinator.pipeline.periods import Disagreement

REMEMBERED = 16  # disputes of a job


def judged(state: JobState, wrong: Disagreement) -> tuple[JobState, tuple[int, ...]]:
    """Return the job with its dispute remembered, and the ranks to blame; none where nothing shows whom."""
    places = state.adopted.places
    suspects = frozenset(places[rank].worker for rank in {*wrong.ranks, *wrong.suspects})
    ranks = wrong.ranks
    both = _again(state, suspects)
    if both:
        ranks = tuple(rank for rank, place in enumerate(places) if place.worker in both)
        suspects = both
    failed = tuple(places[rank].worker for rank in ranks)  # who is twice has no part in the next plan
    disputes = (*state.disputes, suspects)[-REMEMBERED:] if suspects else state.disputes
    return replace(state, failed=(*state.failed, *failed), disputes=disputes), ranks


def suspected(state: JobState, suspects: frozenset[str]) -> JobState:
    """Return the job with these suspects remembered; who is one again, alone or with other company, has no
    part in the next plan."""
    if not suspects:
        return state
    found = _again(state, suspects, alone=True)
    disputes = (*state.disputes, found or suspects)[-REMEMBERED:]
    return replace(state, failed=(*state.failed, *sorted(found) * OFTEN), disputes=disputes)


def _again(state: JobState, suspects: frozenset[str], *, alone: bool = False) -> frozenset[str]:
    """Return which of these were suspects before with other company; ``alone``: or one by itself."""
    for earlier in reversed(state.disputes):
        both = suspects & earlier
        if both and (both != suspects or (alone and len(both) == 1)):
            return both
    return frozenset()
