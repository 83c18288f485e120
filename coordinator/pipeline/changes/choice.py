"""Changes of a running job that has lost nobody: candidates, one choice, one act. Pure.

Each source of candidates names plan changes, with the seconds by which the job would end later, or sooner;
the best is done. Where somebody begins with the state, it is stored first: at a commit, of peers with local
steps at the end of a period. A step or period that ends before that is stored waits for it. With the
checkpoint all connect anew, the newcomers among them, and nobody repeats a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.backoff import doubled_s
from coordinator.messages.jobs import ENDED, STEPPING, Event, JobState, PlanChange, Price, Seating

if TYPE_CHECKING:
    from coordinator.membership.effects import Effects

PAUSES = 2.0  # times what a stage took to load: storing it takes about as long
AGAIN_S = 60.0  # after places were given, until others are; twice as long each time that they were not kept

Candidates = Callable[[JobState], Iterable[PlanChange]]


@dataclass(frozen=True, slots=True)
class _Given:
    """Places that workers were given last; ``times``: how often in a row without a step that they did."""

    workers: tuple[str, ...]
    step: int
    times: int
    until_s: float  # nobody is given one before


@dataclass(slots=True)
class Changes:
    """Of all jobs; ``step``: step a job's machine, ``make_way``: let those go who repeat steps to compare.
    ``places``: candidates that give workers places, ``others``: all others."""

    effects: Effects
    step: Callable[[str, Event], None]
    make_way: Callable[[], None]
    places: Candidates
    others: Sequence[Candidates]
    _given: dict[str, _Given] = field(default_factory=dict)  # by job

    def look(self, state: JobState, *more: Candidates) -> None:
        """Do what is best, as soon as the state is stored where somebody begins with that; ``more``:
        candidates of this moment alone."""
        if state.phase in ENDED:
            self._given.pop(state.job, None)
        if state.phase not in STEPPING or self.effects.storage or state.step >= state.steps:
            return
        named = (*more, *self.others) if self._rests(state) else (*more, self.places, *self.others)
        found = [change for candidates in named for change in candidates(state)]
        best = min(found, key=lambda change: change.price.late_s, default=None)
        begins = best is not None and bool(best.sources)
        if best is None or (begins and state.checkpoint.step != state.step):
            if begins != state.run.seating:
                self.step(state.job, Seating(begins))
        elif best.plan is not None or state.run.awaiting_eval is None:
            self._act(state, best)

    def _rests(self, state: JobState) -> bool:
        """Whether nobody is given a place now: who does not keep its own is not asked for ever."""
        given = self._given.get(state.job)
        if given is None:
            return False
        if state.step > given.step and all(state.rank_of(worker) is not None for worker in given.workers):
            del self._given[state.job]  # all have done a step there
            return False
        return self.effects.now_s < given.until_s or state.step == given.step

    def _act(self, state: JobState, change: PlanChange) -> None:
        if change.sources:
            self.make_way()
        if change.sources and change.plan is not None:
            before = self._given.get(state.job)
            times = before.times + 1 if before is not None else 1
            names = tuple(change.workers[rank] for rank in change.sources)
            until_s = self.effects.now_s + doubled_s(AGAIN_S, times)
            self._given[state.job] = _Given(names, state.step, times, until_s)
        self.step(state.job, change)


def priced(state: JobState, step_s: float, new_s: float, pause_s: float) -> Price:
    """Return the price of a plan whose step is predicted to take ``new_s`` instead of ``step_s`` seconds: a
    step takes another time than predicted by what both predictions have in common."""
    usual_s = state.median_step_s or step_s
    return Price(pause_s, usual_s, usual_s * (1.0 - new_s / step_s), state.steps - state.step)


def pause_s(state: JobState) -> float:
    """Return the seconds that a job stands still to store its state, and to have it loaded."""
    return PAUSES * max(state.run.load_s.values(), default=0.0)
