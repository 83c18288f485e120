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

from coordinator.messages.jobs import ENDED, STEPPING, Event, JobState, PlanChange, Seating
from coordinator.pipeline.changes import more_replicas
from coordinator.pipeline.changes.reconfigure import seats

if TYPE_CHECKING:
    from coordinator.membership.effects import Effects
    from coordinator.pipeline.changes.replanning import Replanning

AGAIN_S = 60.0  # after places were given, until others are; twice as long each time that they were not kept


@dataclass(frozen=True, slots=True)
class _Given:
    """Places that workers were given last; ``times``: how often in a row without a step that they did."""

    workers: tuple[str, ...]
    step: int
    times: int
    until_s: float  # nobody is given one before


@dataclass(slots=True)
class Seats:
    """Of all jobs; ``step``: step a job's machine, ``make_way``: let those go who repeat steps to compare."""

    effects: Effects
    step: Callable[[str, Event], None]
    replanning: Replanning
    make_way: Callable[[], None]
    _given: dict[str, _Given] = field(default_factory=dict)  # by job

    def look(self, state: JobState) -> None:
        """Have idle workers take the ranks of lost peers, or be a replica, as soon as the state is stored."""
        if state.phase in ENDED:
            self._given.pop(state.job, None)
        if state.phase not in STEPPING or state.plan is None:
            return
        if self.effects.storage or state.step >= state.steps:
            return
        chosen = self._chosen(state)
        wanted = chosen is not None or bool(self.replanning.due(state))
        if not wanted or state.checkpoint.step != state.step:
            if wanted != state.seating:
                self.step(state.job, Seating(wanted))
            return
        if chosen is None:
            if state.awaiting_eval is None:
                self.step(state.job, self.replanning.stop(state))
            return
        self._give(state, chosen)

    def _chosen(self, state: JobState) -> PlanChange | None:
        """Return who takes which ranks, or makes the plan one of a replica more; who does not keep its place
        is not asked for ever."""
        given = self._given.get(state.job)
        if given is not None and self._kept(state, given):
            del self._given[state.job]
        elif given is not None and (self.effects.now_s < given.until_s or state.step == given.step):
            return None  # failures that no step follows end a job
        roster = self.effects.roster
        if state.local:
            return seats(state, roster)
        return more_replicas.choose(state, roster) if not state.failures else None

    @staticmethod
    def _kept(state: JobState, given: _Given) -> bool:
        """Whether all who were given a place have done a step there."""
        return state.step > given.step and all(state.rank_of(w) is not None for w in given.workers)

    def _give(self, state: JobState, chosen: PlanChange) -> None:
        label, newcomers = self.effects.label, sorted(chosen.sources)
        taken = ", ".join(f"{label(chosen.workers[rank])} joins as rank {rank}" for rank in newcomers)
        before = self._given.get(state.job)
        times = before.times + 1 if before is not None else 1
        self.make_way()
        until_s = self.effects.now_s + AGAIN_S * 2.0 ** (times - 1)
        names = tuple(chosen.workers[rank] for rank in newcomers)
        self._given[state.job] = _Given(names, state.step, times, until_s)
        words = f"{taken}, with the state after {state.step} steps"
        self.step(state.job, replace(chosen, reason=words))
