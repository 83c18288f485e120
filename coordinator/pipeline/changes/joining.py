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
from coordinator.pipeline.changes.price import priced, repeated_s
from coordinator.pipeline.changes.standby import Chosen, wanted
from coordinator.pipeline.changes.successors import seconds_of
from coordinator.pipeline.history import not_repeatable
from protos.telemetry import Event as Name

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.job import JobSpec
    from coordinator.membership.effects import Effects
    from coordinator.membership.roster import Fingerprint
    from coordinator.messages.events import SwapsFailed, SwapsJudged
    from coordinator.pipeline.changes.standbys import Standbys

LOOK_S = 60.0
SOON_S = 5.0  # at least between two looks, however often the pool changes
LEAST_GAIN = 0.05  # of a step: less is within what a prediction is wrong by
MOST_SWAPS = 64  # predictions of one look
JUDGED_WITHIN_S = 30.0  # of a newcomer: then it may stand by for a loss, and others are judged without it


@dataclass(slots=True)
class _Asked:
    attempt: int
    workers: tuple[str, ...]  # of the plan, by rank
    tried: frozenset[str]
    first: bool  # some of them have not been judged before


@dataclass(slots=True)
class _Look:
    """What is known of one job's idle workers."""

    at_s: float = -inf  # when they were last to be judged, ...
    fleet: Fingerprint = frozenset()  # ... and who was there then
    asked: _Asked | None = None  # what is not answered yet
    came_s: dict[str, float] = field(default_factory=dict)  # of idle workers
    judged: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Joining:
    """``timed(job, spec, workers)``: whether these have timed the job's ops; has them do so.
    ``make_way``: let everybody go who repeats steps to compare."""

    effects: Effects
    standbys: Standbys
    timed: Callable[[str, JobSpec, list[str]], bool]
    make_way: Callable[[], None]
    _looks: dict[str, _Look] = field(default_factory=dict)  # by job
    _attempts: int = 0

    def tick(self, state: JobState, *, others_wait: bool) -> frozenset[str]:
        """Let time pass; ``others_wait``: the pool is wanted for something else. Return the idle workers that
        are to be judged before they are asked to stand by for a loss: then they would time no ops."""
        roster, now_s = self.effects.roster, self.effects.now_s
        if others_wait or state.spec.standbys == 0 or not wanted(state) or self.effects.storage:
            return frozenset()
        look, fleet = self._looks.setdefault(state.job, _Look()), roster.fingerprint()
        newcomers = self._newcomers(look)
        if any(standby.swap for standby in state.standbys.values()):
            self.timed(state.job, state.spec, sorted(newcomers))  # they are judged after that
            return newcomers
        if look.asked or now_s - look.at_s < (SOON_S if look.fleet != fleet else LOOK_S):
            return newcomers
        resting = self.standbys.resting()
        free = [w for w in roster.idle() if w not in resting and not self._silent(look, w)]
        loaded = [standby.worker for standby in state.standbys.values() if standby.loaded]
        if not (free or loaded) or not_repeatable(state, self.effects.ledger.jobs[state.job]):
            return frozenset()
        if self.timed(state.job, state.spec, free):
            look.at_s, look.fleet = now_s, fleet
            self._ask(state, look, (*free, *loaded))
        return newcomers

    def _newcomers(self, look: _Look) -> frozenset[str]:
        """Return the idle workers that have come so lately that they are still to be judged. In a large pool
        there are others to stand by, and always somebody new."""
        roster, now_s = self.effects.roster, self.effects.now_s
        if roster.idle_count > MOST_SWAPS:
            return frozenset()
        look.came_s = {worker: look.came_s.get(worker, now_s) for worker in roster.idle()}
        look.judged.intersection_update(roster.workers)
        return frozenset(
            worker
            for worker, came_s in look.came_s.items()
            if worker not in look.judged and now_s - came_s < JUDGED_WITHIN_S
        )

    def _silent(self, look: _Look, worker: str) -> bool:
        """Whether a worker is awaited to time ops, and has been for as long as others wait for it."""
        came_s = look.came_s.get(worker, -inf)
        return self.effects.now_s - came_s >= JUDGED_WITHIN_S and self.effects.roster.ops.asked(worker)

    def over(self, job: str) -> None:
        """Forget what was thought of a job's fleet: it is planned anew, or has ended."""
        self._looks.pop(job, None)

    def _ask(self, state: JobState, look: _Look, free: tuple[str, ...]) -> None:
        roster, workers = self.effects.roster, tuple(place.worker for place in state.adopted.places)
        precision = state.spec.training.precision.value
        if any(worker not in roster.workers for worker in workers):
            return
        fleet = roster.fleet([*free, *workers], precision, unknown=roster.hoped(workers), job=state.job)
        devices = {device.worker: device for device in fleet.devices}
        tries = [
            (worker in look.judged, seconds_of(state, roster, rank, devices, worker), rank, worker)
            for rank in range(state.n_ranks)
            for worker in free
        ]
        # Who has not been judged goes first, then who would be quickest.
        chosen = sorted(tried for tried in tries if tried[1] < inf)[:MOST_SWAPS]
        swaps = tuple((rank, worker) for _, _, rank, worker in chosen)
        fits = {worker for _, seconds, _, worker in tries if seconds < inf}
        look.judged.update(worker for worker in free if worker not in fits)
        if swaps:
            self._attempts += 1
            tried = frozenset(worker for _, worker in swaps)
            look.asked = _Asked(self._attempts, workers, tried, first=not look.judged >= tried)
            self.effects.emit(
                do.JudgeSwaps(
                    state.job,
                    self._attempts,
                    state.adopted,
                    state.spec.training,
                    fleet,
                    swaps,
                )
            )

    def failed(self, event: SwapsFailed) -> None:
        """Everything stays as it is."""
        if self._answered(event.job, event.attempt) is not None:
            self.effects.log(Name.PLAN_FAILED, "warning", job=event.job, reason=event.reason)

    def _answered(self, job: str, attempt: int) -> _Asked | None:
        """Return the question of which this is the answer, None where it is not the one that is awaited."""
        look = self._looks.get(job)
        if look is None or look.asked is None or look.asked.attempt != attempt:
            return None
        asked, look.asked = look.asked, None
        look.judged.update(asked.tried)
        return asked

    def judged(self, state: JobState, event: SwapsJudged) -> None:
        """Have the worker that gains most stand by for the place to take, where that is worth it."""
        asked = self._answered(state.job, event.attempt)
        if asked is None:
            return
        current = state.plan is not None and asked.workers == tuple(p.worker for p in state.plan.places)
        if not current or not wanted(state) or not event.swapped_s or not event.step_s > 0:
            return
        (rank, worker), new_s = min(event.swapped_s.items(), key=lambda item: (item[1], item[0]))
        price = priced(state, event.step_s, new_s, self._cost_s(state, rank, worker))
        pays = price.pays(LEAST_GAIN)
        words = (
            f"{self.effects.label(worker)} instead of {self.effects.label(asked.workers[rank])}: a step of "
            f"{price.usual_s - price.saved_s:.3g} s, not {price.usual_s:.3g} s, saves "
            f"{price.saved_s * price.left:.0f} s in {price.left} steps; to fetch and repeat the stage takes "
            f"{price.pause_s:.1f} s beside training"
        )
        if pays or asked.first:
            self.effects.log(Name.FLEET_JUDGED, job=state.job, pays=pays, reason=words)
        if pays:
            self._begin(state, rank, worker, words, price.saved_s)

    def _cost_s(self, state: JobState, rank: int, worker: str) -> float:
        """Return the seconds that moving takes: to load, and to repeat the steps since the checkpoint."""
        load_s = state.run.load_s.get(rank) or max(state.run.load_s.values(), default=0.0)
        each_s = repeated_s(state, self.effects.roster, rank, worker)
        return load_s + (state.step - state.checkpoint.step) * each_s

    def _begin(self, state: JobState, rank: int, worker: str, words: str, saved_s: float) -> None:
        before, same = state.standby_of(worker), state.standbys.get(rank)
        if before is not None and before.rank == rank:
            swapping = replace(before, swap=words, saved_s=saved_s)
            self.standbys.put(replace(state, standbys={**state.standbys, rank: swapping}))
            self.effects.emit(do.Notify(state.job))
            return
        for standby in filter(None, (before, same)):
            state = self.standbys.drop(state, standby, f"makes way: {words}", rest_s=0.0)
        if not self.effects.roster.is_idle(worker):
            self.make_way()
        if self.effects.roster.is_idle(worker):
            self.standbys.begin(state, Chosen(worker, rank, words), words, saved_s)
