"""Workers that come while a job trains: worth a place, or another way to train on the larger fleet. Pure.

Once no more have come for a while, the planner predicts a step of the running plan with an idle worker in
each rank's place. The job is planned twice on the same figures, too: on its own workers, and on those and the
idle ones. What pays best is done. Who trains may become slow, so places are looked at again every minute.

Who gains in a place becomes the rank's hot standby first, and takes it once it has caught up (``standbys``).
For another plan the next commit stores the state, and the job is planned anew from there (``choice``). Either
way no step is repeated, and an exact plan has the same bits as before.

Links of newcomers cannot be measured while the job trains. They are taken to be as good as the best between
its own workers; once it has stopped they are measured before it is planned, so a hope that fails costs the
stop, and the next one is further off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from atoll.backoff import doubled_s
from coordinator.messages import instructions as do
from coordinator.messages.jobs import STEPPING, Cause, anew
from coordinator.pipeline.changes.choice import pause_s, priced
from coordinator.pipeline.changes.standbys import FEWEST_STEPS, Chosen, Standbys, wanted
from coordinator.pipeline.changes.successors import repeated_s, seconds_of
from coordinator.pipeline.health.doubt import left_out
from coordinator.pipeline.history import not_repeatable
from coordinator.pipeline.tuning.link_adaptation import capped
from coordinator.planning.costs.losses import PLANNED_WITHIN_S
from protos.telemetry import Event as Name

if TYPE_CHECKING:
    from atoll.job import JobSpec
    from coordinator.membership.effects import Effects
    from coordinator.membership.roster import Fingerprint
    from coordinator.messages.events import FleetFailed, FleetJudged
    from coordinator.messages.jobs import JobState, PlanChange, Price

SETTLED_S = 30.0  # since the last worker came
LOOK_S = 60.0  # between two looks at places, where nobody has come
TIMED_WITHIN_S = (
    30.0  # who has not timed the job's ops by then may stand by, and others are judged without it
)
LEAST_GAIN = 0.05  # of a step, in a place: less is within what a prediction is wrong by; ...
LEAST_PLAN_GAIN = 0.1  # ... of two plans
MOST_SWAPS = 64  # predictions of one look
AGAIN_S = 120.0  # after a stop, until the next one; twice as long each time

Process = tuple[str, int]
"""A worker and its incarnation."""


@dataclass(frozen=True, slots=True)
class _Asked:
    attempt: int
    assigned: int  # version of the plan that others are compared with
    first: bool  # some have not been judged before


@dataclass(frozen=True, slots=True)
class _Wish:
    price: Price
    words: str
    workers: frozenset[str]  # of the better plan
    assigned: int  # version of the plan that it is better than


@dataclass(slots=True)
class _Look:
    """What is known of the workers beside one job's plan."""

    fleet: tuple[Fingerprint, frozenset[str]]  # idle, standing by: as last looked at
    judged: set[Process]  # that the plan was made with, or has been compared with
    at_s: float  # of the last question, or since when the plan runs
    came_s: dict[Process, float] = field(default_factory=dict)  # the others
    asked: _Asked | None = None
    wish: _Wish | None = None


@dataclass(slots=True)
class Newcomers:
    """Of all jobs. ``timed(job, spec, workers)``: whether these have timed the job's ops; has them do so.
    ``make_way``: let everybody go who repeats steps to compare."""

    effects: Effects
    standbys: Standbys
    timed: Callable[[str, JobSpec, list[str]], bool]
    make_way: Callable[[], None]
    _looks: dict[str, _Look] = field(default_factory=dict)  # by job
    _stops: dict[str, tuple[int, float]] = field(default_factory=dict)  # how many, not again before
    _attempts: int = 0

    def tick(self, state: JobState, *, others_wait: bool) -> frozenset[str]:
        """Let time pass; ``others_wait``: the pool is wanted for something else. Return who is to time the
        job's ops before it stands by for a loss: then it would time none."""
        if state.phase not in STEPPING:
            if not state.run.moving:  # a plan of this fleet is being loaded
                self.over(state.job)
            return frozenset()
        look, roster, now_s = self._look(state), self.effects.roster, self.effects.now_s
        if others_wait or state.spec.standbys == 0 or self.effects.storage:
            return frozenset()
        fresh = [name for name, _ in look.came_s if roster.is_idle(name)]
        late = {name for (name, _), at_s in look.came_s.items() if now_s - at_s >= TIMED_WITHIN_S}
        untimed = frozenset[str]()
        if len(fresh) <= MOST_SWAPS:  # of a large pool there are others to stand by, and always somebody new
            untimed = frozenset(w for w in fresh if not self.timed(state.job, state.spec, [w])) - late
        settled = bool(look.came_s) and now_s - max(look.came_s.values()) >= SETTLED_S
        if (settled or now_s - look.at_s >= LOOK_S) and self._may(state, look):
            self._ask(state, look, settled, late)
        return untimed

    def _look(self, state: JobState) -> _Look:
        """Take in who has come and gone."""
        roster, standbys = self.effects.roster, frozenset(s.worker for s in state.standbys.values())
        fleet = roster.fingerprint(), standbys
        look = self._looks.get(state.job)
        if look is not None and look.fleet == fleet and not look.came_s:  # as nearly always
            return look
        names = standbys.intersection(roster.workers).union(roster.idle())
        spare = {(name, roster.workers[name].member.incarnation) for name in names}
        if look is None:
            judged = spare  # unless our restart has us know nothing of them
            if len(spare) <= MOST_SWAPS:
                judged = {one for one in spare if self.timed(state.job, state.spec, [one[0]])}
            look = self._looks[state.job] = _Look(fleet, judged, self.effects.now_s)
        look.fleet = fleet
        look.came_s = {one: at_s for one, at_s in look.came_s.items() if self._usable(state, one[0])}
        new = spare - look.judged - look.came_s.keys()
        look.came_s.update(dict.fromkeys(new, self.effects.now_s))
        return look

    def over(self, job: str) -> None:
        """Forget what was thought of a job's fleet: it is planned on the whole of it, or has ended."""
        look = self._looks.pop(job, None)
        if look is not None and look.wish is not None:
            times = self._stops.get(job, (0, 0.0))[0] + 1
            self._stops[job] = times, self.effects.now_s + doubled_s(AGAIN_S, times)

    def candidates(self, state: JobState) -> Iterator[PlanChange]:
        """Yield that the job is planned anew, where a larger fleet is worth that."""
        look = self._looks.get(state.job)
        if look is None or look.wish is None or state.run.moving:
            return
        wish, own = look.wish, {place.worker for place in state.adopted.places}
        current = state.run.assigned == wish.assigned  # a worker may have taken another's place since
        if current and all(self._usable(state, worker) for worker in wish.workers - own):
            yield replace(anew(state, wish.words, Cause.CHOSEN), price=wish.price)
        else:
            look.wish = None

    # ------------------------------------------------------------ comparing

    def _usable(self, state: JobState, worker: str) -> bool:
        """Whether a worker is idle, or does something beside this job's plan."""
        known = self.effects.roster.workers.get(worker)
        if known is None or known.member.gone or known.quarantined or known.guest.paused:
            return False
        return self.effects.roster.is_idle(worker) or known.member.job == state.job

    def _may(self, state: JobState, look: _Look) -> bool:
        if state.adopted.absent or state.failures or len(state.run.step_times_s) < FEWEST_STEPS:
            return False
        swapping = any(standby.swap for standby in state.standbys.values())
        return not (state.run.moving or state.run.seating or swapping or look.asked or look.wish)

    def _ask(self, state: JobState, look: _Look, settled: bool, late: set[str]) -> None:
        """Have places predicted, and with those who came lately another plan."""
        roster, precision, plan = self.effects.roster, state.spec.training.precision.value, state.adopted
        own = tuple(place.worker for place in plan.places)
        bad = {worker for some in left_out(state)[:1] for worker in some}
        silent = {worker for worker in late if roster.ops.asked(worker)}
        beside = {s.worker for s in state.standbys.values() if self._usable(state, s.worker)}
        beside.update(name for name, _ in look.came_s)
        spare = roster.plannable(
            roster.in_order(beside.union(roster.idle()) - bad - silent - set(own)), precision
        )
        if any(worker not in roster.workers for worker in own):
            return
        if spare and not self.timed(state.job, state.spec, [w for w in spare if roster.is_idle(w)]):
            return
        grows = settled and self.effects.now_s >= self._stops.get(state.job, (0, -inf))[1]
        look.at_s = self.effects.now_s
        fleet = roster.fleet([*own, *spare], precision, unknown=roster.hoped(own), job=state.job)
        fleet = replace(fleet, losses_per_s=roster.losses.per_s(self.effects.now_s))
        devices = {device.worker: device for device in fleet.devices}
        fresh = {name for name, _ in look.came_s}
        loaded = {standby.worker for standby in state.standbys.values() if standby.loaded}
        tries = [
            (worker not in fresh, seconds, rank, worker)
            for worker in spare
            if worker in loaded or roster.is_idle(worker)
            for rank in range(state.n_ranks)
            if (seconds := seconds_of(state, roster, rank, devices, worker)) < inf
        ]
        if state.local or not wanted(state) or not_repeatable(state, self.effects.ledger.jobs[state.job]):
            tries = []
        if grows:
            look.judged.update(look.came_s)
            look.came_s.clear()
        if not spare or not (tries or grows):
            return
        # Who has not been judged goes first, then who would be quickest.
        swaps = tuple((rank, worker) for _, _, rank, worker in sorted(tries)[:MOST_SWAPS])
        self._attempts += 1
        look.asked = _Asked(self._attempts, state.run.assigned, first=bool(fresh))
        spec = capped(state.spec, self.effects.ledger.jobs[state.job].cap)
        compared = own if grows else ()
        self.effects.emit(do.JudgeFleet(state.job, self._attempts, plan, spec, fleet, swaps, compared))

    def _answered(self, job: str, attempt: int) -> _Asked | None:
        """Return the question of which this is the answer, None where it is not the one that is awaited."""
        look = self._looks.get(job)
        if look is None or look.asked is None or look.asked.attempt != attempt:
            return None
        asked, look.asked = look.asked, None
        return asked

    def failed(self, event: FleetFailed) -> None:
        """Everything stays as it is."""
        if self._answered(event.job, event.attempt) is not None:
            self.effects.log(Name.PLAN_FAILED, "warning", job=event.job, reason=event.reason)

    def judged(self, state: JobState, event: FleetJudged) -> None:
        """Do what pays best: have a worker stand by for a place to take, or the job planned anew."""
        asked = self._answered(state.job, event.attempt)
        if asked is None or state.phase not in STEPPING or asked.assigned != state.run.assigned:
            return
        swaps = event.swapped_s and wanted(state) and not state.local
        swap = self._swap(state, event, asked) if swaps else None
        wish = self._wish(state, event, asked) if event.workers else None
        if wish is not None and (swap is None or wish.price.late_s < swap[0].late_s):
            self._looks[state.job].wish = wish
            self.effects.emit(do.Notify(state.job))
        elif swap is not None:
            self._begin(state, *swap)

    def _wish(self, state: JobState, event: FleetJudged, asked: _Asked) -> _Wish | None:
        price = priced(state, event.own_s, event.grown_s, pause_s(state) + PLANNED_WITHIN_S)
        words = (
            f"{event.shape} on a fleet that has grown: a step of {price.usual_s - price.saved_s:.3g} s "
            f"instead of {price.usual_s:.3g} s saves {price.saved_s * price.left:.0f} s in {price.left} "
            f"steps, and costs {price.pause_s:.0f} s"
        )
        pays = price.pays(LEAST_PLAN_GAIN)
        self.effects.log(Name.FLEET_JUDGED, job=state.job, pays=pays, reason=words)
        return _Wish(price, words, frozenset(event.workers), asked.assigned) if pays else None

    def _swap(self, state: JobState, event: FleetJudged, asked: _Asked) -> tuple[Price, Chosen] | None:
        (rank, worker), new_s = min(event.swapped_s.items(), key=lambda item: (item[1], item[0]))
        load_s = state.run.load_s.get(rank) or max(state.run.load_s.values(), default=0.0)
        each_s = repeated_s(state, self.effects.roster, rank, worker)
        takes_s = load_s + (state.step - state.checkpoint.step) * each_s
        price = priced(state, event.step_s, new_s, takes_s)
        label = self.effects.label
        words = (
            f"{label(worker)} instead of {label(state.adopted.places[rank].worker)}: a step of "
            f"{price.usual_s - price.saved_s:.3g} s, not {price.usual_s:.3g} s, saves "
            f"{price.saved_s * price.left:.0f} s in {price.left} steps; to fetch and repeat the stage takes "
            f"{price.pause_s:.1f} s beside training"
        )
        pays = price.pays(LEAST_GAIN)
        if pays or asked.first:
            self.effects.log(Name.FLEET_JUDGED, job=state.job, pays=pays, reason=words)
        return (price, Chosen(worker, rank, words)) if pays else None

    def _begin(self, state: JobState, price: Price, chosen: Chosen) -> None:
        before, words = state.standby_of(chosen.worker), chosen.why
        if before is not None and before.rank == chosen.rank:
            swapping = replace(before, swap=words, saved_s=price.saved_s)
            self.standbys.put(replace(state, standbys={**state.standbys, chosen.rank: swapping}))
            self.effects.emit(do.Notify(state.job))
            return
        for standby in filter(None, (before, state.standbys.get(chosen.rank))):
            state = self.standbys.drop(state, standby, f"makes way: {words}", rest_s=0.0)
        if not self.effects.roster.is_idle(chosen.worker):
            self.make_way()
        if self.effects.roster.is_idle(chosen.worker):
            self.standbys.begin(state, chosen, words, price.saved_s)
