"""Ranks of lost peers, and replicas that are missing, which idle workers take. Pure.

Those that are there store what a newcomer begins with at a commit, of peers with local steps at the end of a
period, and go on. With the checkpoint all connect anew, the newcomers among them: a peer takes the steps of
the period that is under way, and the others keep those that they have taken; a replica more
(``more_replicas``) takes a share of the step. A step or period that ends before that is stored waits
for it. Where a fleet that has grown is worth another plan (``replanning``), all begin with that checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from coordinator.messages.jobs import STEPPING, Event, JobState, Replaced, Seating
from coordinator.pipeline import more_replicas
from coordinator.pipeline.pair_tables import newer_table
from coordinator.pipeline.reconfigure import seats

if TYPE_CHECKING:
    from coordinator.membership.effects import Effects
    from coordinator.pipeline.reconfigure import Choice
    from coordinator.pipeline.replanning import Replanning

AGAIN_S = 60.0  # after a replica was added, until another is; twice as long each time


@dataclass(slots=True)
class Seats:
    """Of all jobs; ``step``: step a job's machine."""

    effects: Effects
    step: Callable[[str, Event], None]
    replanning: Replanning
    _grown: dict[str, tuple[int, float]] = field(default_factory=dict)  # job -> times, not again before

    def look(self, state: JobState) -> None:
        """Have idle workers take the ranks of lost peers, or be a replica, as soon as the state is stored."""
        if state.phase not in STEPPING or state.plan is None:
            return
        if self.effects.storage or state.step >= state.steps:
            return
        chosen = seats(state, self.effects.roster) if state.local else self._replica(state)
        wanted = chosen is not None or bool(self.replanning.due(state))
        if not wanted or state.checkpoint.step != state.step:
            if wanted != state.seating:
                self.step(state.job, Seating(wanted))
            return
        if chosen is None:
            if state.awaiting_eval is None:
                self.step(state.job, self.replanning.stop(state))
            return
        label = self.effects.label
        taken = ", ".join(
            f"{label(chosen.workers[rank])} joins as rank {rank}" for rank in sorted(chosen.newcomers)
        )
        words = f"{taken}, with the state after {state.step} steps"
        exchange = None
        if chosen.plan is not None:
            times = self._grown.get(state.job, (0, 0.0))[0]
            self._grown[state.job] = times + 1, self.effects.now_s + AGAIN_S * 2.0**times
        else:
            there = [rank for rank in range(state.n_ranks) if rank not in chosen.absent]
            table = newer_table(state, self.effects.roster, chosen.workers, there)
            if table is not None and state.plan.exchange is not None:
                exchange = replace(state.plan.exchange, pairs=table)
        self.step(
            state.job,
            Replaced(
                chosen.workers,
                chosen.newcomers,
                words,
                chosen=True,
                absent=chosen.absent,
                exchange=exchange,
                plan=chosen.plan,
            ),
        )

    def _replica(self, state: JobState) -> Choice | None:
        """Return who makes a job's plan one of a replica more; who fails at that is not asked for ever."""
        if state.failures or self.effects.now_s < self._grown.get(state.job, (0, 0.0))[1]:
            return None
        return more_replicas.choose(state, self.effects.roster)
