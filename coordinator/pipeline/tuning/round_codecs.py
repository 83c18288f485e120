"""Codec of peers' rounds while a job runs, where the job leaves it open: it follows what rounds show. Pure.

A round says how long its links carried it, its period how long the steps computed. Another codec is a
reconfiguration, as another table of pairs is: all connect anew, and the steps that they have taken stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from coordinator.messages.jobs import STEPPING, Cause, Event, JobState, moved
from coordinator.planning.exchange_codecs import fitting

if TYPE_CHECKING:
    from atoll.exchange import Exchange


def newer_codec(state: JobState) -> Exchange | None:
    """Return the exchange with the codec that fits the last round; None where it has that already, or is not
    to change."""
    plan = state.plan
    if plan is None or plan.exchange is None or not state.spec.training.codes_rounds:
        return None
    reports = state.run.reports.values()
    carried_s = max((link.busy_s for report in reports for link in report.links), default=0.0)
    step_s = max((r.forward_s + r.backward_s + r.optimizer_s for r in reports), default=0.0)
    if not carried_s or not step_s:
        return None
    codec = fitting(plan.exchange.codec, carried_s, plan.exchange.every * step_s)
    return None if codec == plan.exchange.codec else replace(plan.exchange, codec=codec)


@dataclass(slots=True)
class RoundCodecs:
    """Of all jobs; ``step``: step a job's machine."""

    step: Callable[[str, Event], None]
    _judged: dict[str, int] = field(default_factory=dict)  # by job: steps that were done with the round

    def look(self, state: JobState) -> None:
        """Change the codec when the last round lasted too long, or need not have been coded so strongly."""
        if (
            state.phase not in STEPPING
            or state.plan is None
            or state.run.seating
            or state.step >= state.steps
        ):
            return  # after the last step no round follows, and an evaluation would be lost
        if self._judged.get(state.job) == state.step or not state.local:
            return
        self._judged[state.job] = state.step
        newer = newer_codec(state)
        if newer is None:
            return
        before = state.plan.exchange.codec if state.plan.exchange is not None else ""
        words = f"rounds travel in {newer.codec}, in {before} until now: so the links carry them in time"
        workers = [place.worker for place in state.plan.places]
        self.step(state.job, moved(state, workers, (), Cause.CHOSEN, words, exchange=newer))

    def over(self, job: str) -> None:
        """The job has ended."""
        self._judged.pop(job, None)
