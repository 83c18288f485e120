"""Gain and cost of an idle worker in a rank's place of a running job. Pure.

Looked at when the pool changes and every minute. Who gains enough becomes the rank's hot standby first,
beside training, and takes its place once it has caught up (``standbys``): no step is repeated for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from coordinator.messages import instructions as do
from coordinator.messages.jobs import JobState
from coordinator.pipeline.loss_cost import repeated_s
from coordinator.pipeline.reconfigure import not_repeatable, seconds_of
from coordinator.pipeline.standby import Chosen, wanted
from protos.telemetry import Event as Name

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.membership.effects import Effects
    from coordinator.membership.roster import Fingerprint
    from coordinator.messages.events import SwapsFailed, SwapsJudged
    from coordinator.pipeline.standbys import Standbys

LOOK_S = 60.0
SOON_S = 5.0  # at least between two looks, however often the pool changes
WORTH = 1.5  # seconds gained over seconds that moving takes
LEAST_GAIN = 0.05  # of a step: less is within what a prediction is wrong by
MOST_SWAPS = 64  # predictions of one look


@dataclass(slots=True)
class _Asked:
    attempt: int
    workers: tuple[str, ...]  # of the plan, by rank


@dataclass(slots=True)
class Joining:
    """``timed(job, precision, workers)``: whether these have timed the job's ops; has them do so."""

    effects: Effects
    standbys: Standbys
    timed: Callable[[str, str, list[str]], bool]
    _asked: dict[str, _Asked] = field(default_factory=dict)  # by job
    _looked: dict[str, tuple[float, Fingerprint]] = field(default_factory=dict)
    _attempts: int = 0

    def tick(self, state: JobState, *, others_wait: bool) -> None:
        """Let time pass; ``others_wait``: the pool is wanted for something else."""
        roster, now_s = self.effects.roster, self.effects.now_s
        if others_wait or state.spec.standbys == 0 or not wanted(state) or state.job in self._asked:
            return
        if any(standby.swap for standby in state.standbys.values()) or self.effects.storage:
            return
        looked_s, fingerprint = self._looked.get(state.job, (-inf, frozenset()))
        if now_s - looked_s < (SOON_S if fingerprint != roster.fingerprint() else LOOK_S):
            return
        free = [w for w in roster.idle() if w not in self.standbys.resting()]
        free += [standby.worker for standby in state.standbys.values() if standby.loaded]
        precision = state.spec.training.precision.value
        if not free or not_repeatable(state, self.effects.ledger.jobs[state.job]):
            return
        if not self.timed(state.job, precision, [w for w in free if roster.is_idle(w)]):
            return
        self._looked[state.job] = now_s, roster.fingerprint()
        self._ask(state, free, precision)

    def _ask(self, state: JobState, free: list[str], precision: str) -> None:
        assert state.plan is not None  # noqa: S101 - it has ranks
        roster, workers = self.effects.roster, tuple(place.worker for place in state.plan.places)
        if any(worker not in roster.workers for worker in workers):
            return
        fleet = roster.fleet([*free, *workers], precision)
        devices = {device.worker: device for device in fleet.devices}
        swaps = [
            (rank, worker)
            for rank in range(state.n_ranks)
            for worker in free
            if seconds_of(state, roster, rank, devices, worker) < inf
        ]
        if swaps:
            self._attempts += 1
            self._asked[state.job] = _Asked(self._attempts, workers)
            self.effects.emit(
                do.JudgeSwaps(
                    state.job,
                    self._attempts,
                    state.plan,
                    state.spec.training,
                    fleet,
                    tuple(swaps[:MOST_SWAPS]),
                )
            )

    def failed(self, event: SwapsFailed) -> None:
        """Everything stays as it is."""
        asked = self._asked.get(event.job)
        if asked is not None and asked.attempt == event.attempt:
            del self._asked[event.job]
            self.effects.log(Name.PLAN_FAILED, "warning", job=event.job, reason=event.reason)

    def judged(self, state: JobState, event: SwapsJudged) -> None:
        """Have the worker that gains most stand by for the place to take, where that is worth it."""
        asked = self._asked.get(state.job)
        if asked is None or asked.attempt != event.attempt:
            return
        del self._asked[state.job]
        current = state.plan is not None and asked.workers == tuple(p.worker for p in state.plan.places)
        if not current or not wanted(state) or not event.swapped_s or not event.step_s > 0:
            return
        (rank, worker), new_s = min(event.swapped_s.items(), key=lambda item: (item[1], item[0]))
        # A step takes another time than predicted by what both predictions have in common.
        usual_s = state.median_step_s or event.step_s
        saved_s = usual_s * (1.0 - new_s / event.step_s)
        left, cost_s = state.steps - state.step, self._cost_s(state, rank)
        if saved_s < LEAST_GAIN * usual_s or saved_s * left <= WORTH * cost_s:
            return
        words = (
            f"{self.effects.label(worker)} instead of {self.effects.label(asked.workers[rank])}: a step of "
            f"{usual_s - saved_s:.3g} s, not {usual_s:.3g} s, saves {saved_s * left:.0f} s in {left} steps; "
            f"to fetch and repeat the stage takes {cost_s:.1f} s beside training"
        )
        self._begin(state, rank, worker, words)

    def _cost_s(self, state: JobState, rank: int) -> float:
        """Return the seconds that moving takes: to load, and to repeat the steps since the checkpoint."""
        load_s = state.load_s.get(rank) or max(state.load_s.values(), default=0.0)
        return load_s + (state.step - state.checkpoint.step) * repeated_s(state, self.effects.roster, rank)

    def _begin(self, state: JobState, rank: int, worker: str, words: str) -> None:
        before, same = state.standby_of(worker), state.standbys.get(rank)
        if before is not None and before.rank == rank:
            swapping = replace(before, swap=words)
            self.standbys.put(replace(state, standbys={**state.standbys, rank: swapping}))
            self.effects.emit(do.Notify(state.job))
            return
        for standby in filter(None, (before, same)):
            state = self.standbys.drop(state, standby, f"makes way: {words}", rest_s=0.0)
        if self.effects.roster.is_idle(worker):
            self.standbys.begin(state, Chosen(worker, rank, words), swap=words)
