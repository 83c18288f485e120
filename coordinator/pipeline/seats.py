"""Ranks of lost peers that idle workers take: peers with local steps are joined at a period's end. Pure.

The peers that are there store what a newcomer begins with when a period is committed, and go on. With the
checkpoint all connect anew, the newcomer among them, and it takes the steps of the period that is under way;
the others keep those that they have taken. A period that ends before the checkpoint is stored waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from coordinator.messages.jobs import STEPPING, Event, JobState, Replaced, Seating
from coordinator.pipeline.pair_tables import newer_table
from coordinator.pipeline.reconfigure import seats

if TYPE_CHECKING:
    from coordinator.membership.effects import Effects


@dataclass(slots=True)
class Seats:
    """Of all jobs; ``step``: step a job's machine."""

    effects: Effects
    step: Callable[[str, Event], None]

    def look(self, state: JobState) -> None:
        """Have idle workers take the ranks of lost peers, as soon as the state is stored."""
        if state.phase not in STEPPING or state.plan is None or not state.plan.absent:
            return
        if self.effects.storage or state.step >= state.steps:
            return
        chosen = seats(state, self.effects.roster)
        stored = state.checkpoint.step == state.step
        if chosen is None or not stored:
            if (chosen is not None) != state.seating:
                self.step(state.job, Seating(chosen is not None))
            return
        label = self.effects.label
        taken = ", ".join(f"{label(chosen.workers[rank])} joins as rank {rank}" for rank in chosen.newcomers)
        words = f"{taken}, with the state after {state.step} steps"
        there = [rank for rank in range(state.n_ranks) if rank not in chosen.absent]
        table, exchange = newer_table(state, self.effects.roster, chosen.workers, there), None
        if table is not None and state.plan is not None and state.plan.exchange is not None:
            exchange = replace(state.plan.exchange, pairs=table)
        self.step(
            state.job,
            Replaced(
                chosen.workers, chosen.newcomers, words, chosen=True, absent=chosen.absent, exchange=exchange
            ),
        )
