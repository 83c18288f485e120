"""Price of a change: seconds that the job stands still for it, and what the steps that are left save. Pure.

And of a loss: what it would cost now. Measured figures come first: what loading took, what a stage was busy
in its last step, rates of links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.messages.jobs import STEPPING
from coordinator.pipeline.assigning import neighbours
from coordinator.pipeline.changes.fetching import Fetching
from coordinator.pipeline.changes.reconfigure import choose
from coordinator.pipeline.changes.successors import computed_s, devices_of, slower
from coordinator.pipeline.history import begun
from coordinator.planning.costs.losses import PLANNED_WITHIN_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from atoll.plan import Plan
    from coordinator.membership.roster import Roster
    from coordinator.messages.facts import JobRecord
    from coordinator.messages.jobs import JobState
    from coordinator.planning.costs.fleet import Device

WORTH = 1.5  # seconds saved over seconds that a change takes
PAUSES = 2.0  # times what a stage took to load: storing it takes about as long


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of a step now, what each of the ``left`` ones saves with another plan, and the pause for it."""

    usual_s: float
    saved_s: float
    pause_s: float
    left: int

    @property
    def late_s(self) -> float:
        """Seconds by which the job would end later, below 0 sooner."""
        return self.pause_s - self.saved_s * self.left

    def pays(self, least: float = 0.0) -> bool:
        """Whether a change is worth its pause, and saves at least a share of a step."""
        return self.saved_s >= least * self.usual_s and self.saved_s * self.left > WORTH * self.pause_s


def priced(state: JobState, step_s: float, new_s: float, pause_s: float) -> Price:
    """Return the price of a plan whose step is predicted to take ``new_s`` instead of ``step_s`` seconds: a
    step takes another time than predicted by what both predictions have in common."""
    usual_s = state.median_step_s or step_s
    return Price(usual_s, usual_s * (1.0 - new_s / step_s), pause_s, state.steps - state.step)


def pause_s(state: JobState) -> float:
    """Return the seconds that a job stands still to store its state, and to have it loaded."""
    return PAUSES * max(state.run.load_s.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class LossCost:
    """Seconds that the job stands still, and what they are made of; ``copy``: from where whoever takes over
    has its stage's part of the checkpoint."""

    seconds: float
    why: str
    copy: str = ""
    again: int = 0  # steps that all do again


def loss_costs(state: JobState, record: JobRecord, roster: Roster) -> list[LossCost]:
    """Return by rank what its loss would cost; nothing while the plan's stages were never all loaded."""
    if state.plan is None or not begun(state):
        return []
    if state.local:
        why = "the other peers keep their steps and go on without it; those of its period are lost"
        return [LossCost(roster.liveness.dead_after_s, why) for _ in range(state.n_ranks)]
    return [_cost(state, record, roster, rank) for rank in range(state.n_ranks)]


def _cost(state: JobState, record: JobRecord, roster: Roster, rank: int) -> LossCost:
    notice_s = roster.liveness.dead_after_s
    steps, back = state.step - state.checkpoint.step, 0
    chosen, standby = choose(state, record, roster, {rank}), state.standbys.get(rank)
    if rank not in chosen.sources and standby is not None:
        behind = max(0, state.step - standby.step)
        seconds = notice_s + behind * repeated_s(state, roster, rank, standby.worker)
        return LossCost(
            seconds, f"{standby.worker} stands by, {behind} steps behind: {notice_s:.1f} s to notice"
        )
    if chosen.plan is not None and chosen.instead:
        why = f"the other replicas go on without it: {notice_s:.1f} s to notice{_longer(state, chosen.plan)}"
        return LossCost(notice_s, f"{why}; {chosen.instead}")
    copy = ""
    if chosen.plan is not None:
        worker = chosen.workers[rank]
        each_s = repeated_s(state, roster, rank, worker)
        load_s, copy = _loaded_s(state, roster, rank, worker)
        how = f"{worker} takes over: {notice_s:.1f} s to notice, {load_s:.1f} s to load"
        again = f", {steps} steps of {each_s:.2g} s repeated by it alone" if steps else ""
    else:
        places, each_s = enumerate(state.adopted.places), _step_s(state)
        stored_s = max(_loaded_s(state, roster, other, place.worker)[0] for other, place in places)
        load_s = PLANNED_WITHIN_S + stored_s
        steps = back = state.step - state.back_to
        how = (
            f"back to step {state.back_to} ({chosen.reason}): {notice_s:.1f} s to notice, "
            f"about {PLANNED_WITHIN_S:.0f} s to plan anew, {stored_s:.1f} s to load"
        )
        again = f", {steps} steps of {each_s:.2g} s by all" if steps else ""
    return LossCost(notice_s + load_s + steps * each_s, how + again, copy, back)


def loss_words(state: JobState, costs: Sequence[LossCost] = ()) -> str:
    """Say what the loss of a worker would cost now at most, "" where that is not known; ``costs``: by rank,
    none where nobody has looked: then it is known of plans whose ranks keep snapshots for each other."""
    if state.phase not in STEPPING or not (costs or state.ring.held):
        return ""
    steps = max((cost.again for cost in costs), default=state.step - state.back_to)
    words = "nothing is done again"
    if steps:
        took_s = steps * _step_s(state)
        words = f"{took_s:.0f} s ({steps} step{'s'[: steps != 1]}) are done again, from step {state.back_to}"
    stands = f"; the job stands still for about {max(c.seconds for c in costs):.0f} s" if costs else ""
    return f"if a worker is lost now: {words}{stands}"


def _longer(state: JobState, left: Plan) -> str:
    """Return by how much a step gets longer without a replica, "" where nothing was predicted."""
    before, after = state.plan.prediction if state.plan is not None else None, left.prediction
    if before is None or after is None or not before.step_s > 0:
        return ""
    step_s = _step_s(state)
    return f", then a step takes about {step_s * after.step_s / before.step_s:.2g} s, not {step_s:.2g} s"


def _loaded_s(state: JobState, roster: Roster, rank: int, worker: str) -> tuple[float, str]:
    """Return the seconds until a worker has loaded a rank's stage, and where its tensors are until then."""
    fetching = Fetching(state, roster)
    found, n_bytes, measured_s = (
        fetching.by(rank, worker),
        fetching.part_bytes(rank),
        state.run.load_s.get(rank, 0.0),
    )
    if found.here:
        return measured_s - state.run.fetched_s.get(rank, 0.0), f"on the disk of {worker}"
    place = f"on the disk of {found.holders[0]}" if found.holders else "in the store"
    if not n_bytes:
        return measured_s, place
    load_s = measured_s - state.run.fetched_s.get(rank, 0.0) + found.seconds
    return load_s, f"{place}, {found.seconds:.1f} s from {worker}"


def repeated_s(
    state: JobState, roster: Roster, rank: int, worker: str, fleet: Mapping[str, Device] | None = None
) -> float:
    """Return what a step takes that a worker repeats of a rank: computing, or the messages that it is sent
    where they take longer. Its own messages are not sent again. ``fleet``: the devices of both, where the
    caller has them."""
    plan = state.adopted
    busy_s, has_it = computed_s(state, rank), plan.places[rank].worker
    if worker != has_it:
        both = fleet or devices_of(roster, (worker, has_it), state.spec.training.precision.value)
        busy_s *= slower(roster, both, worker, has_it)
    sent_s = 0.0
    for other in neighbours(plan, rank):
        theirs, sender = state.run.reports.get(other), plan.places[other].worker
        known = roster.links.table.get(sender, worker) or roster.links.table.get(sender, has_it)
        for link in theirs.links if theirs is not None else ():
            if link.peer == has_it and known is not None:
                sent_s = max(sent_s, 8 * link.n_bytes / known.bandwidth_bps)
    return max(busy_s, sent_s)


def _step_s(state: JobState) -> float:
    prediction = state.plan.prediction if state.plan is not None else None
    return state.median_step_s or (prediction.step_s if prediction is not None else 0.0)
