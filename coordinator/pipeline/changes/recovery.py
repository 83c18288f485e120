"""How a job goes on after a loss: candidates by what is kept, and the first that can be done. Pure.

A stage is a function of its state and its messages. The newest checkpoint has the state; the neighbours' send
logs have the messages since; the journal has the scale of each step and the codecs of each version. So
whoever comes repeats those steps, up to the one that was in flight. Neighbours that are lost at once repeat
them together, each from what the other one sends anew. Who has stood by for a lost rank is there already: it
takes the place as those do who stay. Where no stage is left that holds newer state, or no worker fits, those
replicas that are whole go on without the others (``whole_replicas``); without one the job goes back to its
checkpoint.

The order is not that of the prices. Whoever takes over keeps the plan that was chosen for its step, however
long it loads; replicas that went would be missed by all steps that are left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from coordinator.membership.member import Phase as Membership
from coordinator.messages.jobs import STEPPING, Cause, JobState, PlanChange, Price, anew, moved
from coordinator.pipeline.assigning import neighbours
from coordinator.pipeline.changes import whole_replicas
from coordinator.pipeline.changes.choice import priced
from coordinator.pipeline.changes.successors import Successors, loaded_s, repeated_s
from coordinator.pipeline.history import begun, logged_from, not_repeatable
from coordinator.pipeline.joined import ranks_of
from coordinator.planning.costs.losses import PLANNED_WITHIN_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.plan import Plan
    from coordinator.membership.roster import Roster
    from coordinator.messages.facts import JobRecord


def choose(
    state: JobState, record: JobRecord, roster: Roster, lost: Collection[int], again: Collection[str] = ()
) -> PlanChange:
    """Return what a job does without the ``lost`` ranks, with its price: the first candidate that can be
    done, or that it goes back to its checkpoint; ``again``: see ``Recovery``."""
    why = anew(state, "not all stages were loaded")
    if not begun(state):
        return why
    for why in Recovery(state, record, roster, frozenset(lost), again).candidates():
        if why.plan is not None:
            return why
    return replace(why, price=_back(state, roster, why.reason))


@dataclass(slots=True)
class Recovery:
    """A loss of ranks of a job whose stages were all loaded. ``again``: workers of lost ranks that may have
    theirs once more where no other fits.

    Ranks that were loading already begin anew, and so do those whose standby was still taking them: it holds
    no whole state in between.
    """

    state: JobState
    record: JobRecord
    roster: Roster
    lost: frozenset[int]
    again: Collection[str] = ()
    _given: frozenset[int] = field(init=False)  # a stage with the change that is under way
    _ready: dict[int, str] = field(init=False)  # by rank who takes one as it is
    _newcomers: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        state, assigned = self.state, self.state.run.assigned
        ranks = state.present if state.run.moving else ()
        self._given = frozenset(rank for rank in ranks if self.record.given(rank) == assigned)
        self._ready = standing_by_for(state, self.roster, self.lost)
        self._newcomers = self.lost.difference(self._ready) | (self._loading - state.run.loaded)

    @property
    def _loading(self) -> frozenset[int]:
        return self._given | (self.state.run.promoted.keys() if self.state.run.moving else frozenset())

    def candidates(self) -> Iterator[PlanChange]:
        """Yield what can be done, what is preferred first; without a plan, why it cannot be."""
        state = self.state
        if state.local:
            # What broke, or diverged, would do so again: its peer begins anew with the next period.
            again = self.again or (state.failures and self._loading.difference(self._ready) & self.lost)
            if not again and all(map(state.adopted.in_pipe, self._newcomers)):
                yield self._taken_over()
            yield self._without()
            return
        if state.failures and self._loading.difference(self._ready) & self.lost:
            yield self._whole(anew(state, "a newcomer's stage does not load"))
        taken = self._taken_over()
        yield taken
        if len(state.adopted.replicas) > 1:
            yield self._whole(taken)

    def once_more(self) -> PlanChange:
        """Have a lost rank's own worker load its stage again and repeat the steps since the checkpoint,
        though the plan may not fit it; or return why it cannot."""
        state, (rank,) = self.state, self.lost
        if state.run.unfit and rank in self._given:
            return anew(state, "it was killed before, while it repeated steps")
        steps = state.step - state.checkpoint.step
        if state.local or not steps:
            return anew(state, "")  # nothing is to be repeated
        newcomers, place = self.lost | (self._given - state.run.loaded), state.adopted.places[rank]
        wrong = not_repeatable(state, self.record) or self._unlogged(newcomers)
        if wrong or not at_hand(self.roster, place.worker, state.job):
            return anew(state, wrong or f"stage {place.stage}'s worker is not at hand")
        words = f"it repeats {steps} steps, then the job is planned again from step {state.step}"
        return moved(state, state.workers, newcomers, Cause.UNFIT, words)

    def _taken_over(self) -> PlanChange:
        """Have other workers take over: newcomers, and who stands by."""
        state, roster = self.state, self.roster
        wrong = (self._newcomers and not_repeatable(state, self.record)) or self._unlogged(self._newcomers)
        if wrong:
            return anew(state, wrong)
        spare = [s.worker for s in state.standbys.values() if at_hand(roster, s.worker)]
        missing = self.lost.difference(self._ready)
        chosen = Successors(state, roster, missing, self.again, self._ready, spare).chosen()
        if isinstance(chosen, tuple):
            stages = [state.adopted.places[rank].stage for rank in chosen]
            if len(stages) == 1:
                return anew(state, f"no idle worker can take over stage {stages[0]}", for_now=True)
            words = f"{', '.join(map(str, stages[:-1]))} and {stages[-1]}"
            return anew(state, f"too few idle workers can take over stages {words}", for_now=True)
        taken = {**self._ready, **chosen}
        workers = [taken.get(rank, worker) for rank, worker in enumerate(state.workers)]
        words = ", ".join(self._taken_words(rank, taken[rank]) for rank in sorted(self.lost))
        prices = [self._price(rank, taken[rank]) for rank in self.lost]
        found = moved(state, workers, self._newcomers, Cause.LOST, words or "all reconnect")
        return replace(found, price=max(prices, key=lambda one: one.pause_s, default=Price()))

    def _taken_words(self, rank: int, worker: str) -> str:
        """Say who takes over a lost rank, and repeats how much."""
        label, first = self.roster.label(worker), self.state.checkpoint.step
        steps = self.state.steps_of(rank) - first
        if rank not in self._newcomers:
            return f"{label} takes rank {rank}, for which it stood by"
        return f"{label} takes over rank {rank}" + (
            f", repeating {steps} steps from step {first}" if steps else ""
        )

    def _price(self, rank: int, worker: str) -> Price:
        if rank in self._newcomers:
            return _replayed(self.state, self.roster, rank, worker)
        return _standby_takes(self.state, self.roster, rank)

    def _whole(self, otherwise: PlanChange) -> PlanChange:
        """Have the replicas that are whole go on without the others; ``otherwise``: why nobody takes over."""
        state, label, why = self.state, self.roster.label, otherwise.reason
        left = whole_replicas.without(state, self.roster, self._newcomers | self.lost)
        if isinstance(left, str):
            return replace(otherwise, reason=f"{why}, and {left}")
        stay = {place.worker for place in left.places}
        freed = ", ".join(label(worker) for worker in state.workers if worker not in stay)
        count, before = len(left.replicas), len(state.adopted.replicas)
        who = f"{count} of {before} replicas go on" if count > 1 else f"one of {before} replicas goes on"
        words, cost = f"{why}: {who}, without {freed}", _others_go_on(state, self.roster, left, why)
        return PlanChange(replace(left, version=state.next_version), {}, Cause.LOST, words, price=cost)

    def _without(self) -> PlanChange:
        """Have the other peers go on: they keep the local steps that they have taken. With one of its stages
        a whole peer is gone."""
        state, plan = self.state, self.state.adopted
        gone = self._of_peers(self.lost)
        newcomers = self._loading - state.run.loaded - plan.absent - gone
        # Who repeats rounds does so among the peers that were there.
        if any(state.steps_of(rank) > state.checkpoint.step for rank in newcomers) and (
            gone or not_repeatable(state, self.record) or self._unlogged(newcomers)
        ):
            gone, newcomers = gone | self._of_peers(newcomers), frozenset()
        absent = plan.absent | gone
        if not frozenset(state.present) - absent - newcomers:
            return anew(state, "no peer is left that holds its state")
        without = ", ".join(self.roster.label(state.workers[rank]) for rank in sorted(self.lost))
        freed = ", ".join(self.roster.label(state.workers[rank]) for rank in sorted(gone - self.lost))
        words = f"the others continue without {without}" if without else "all reconnect"
        words += f", and {freed} of the same pipeline" if freed else ""
        why = "the other peers keep their steps and continue without it; those of its period are lost"
        found = moved(state, state.workers, newcomers, Cause.LOST, words, absent=absent)
        return replace(found, price=Price(self.roster.liveness.dead_after_s, why=why))

    def _of_peers(self, ranks: Collection[int]) -> frozenset[int]:
        """Return the ranks of all peers that some of these are of."""
        plan = self.state.adopted
        peers = {plan.places[rank].replica for rank in ranks}
        return frozenset(rank for peer in peers for rank in ranks_of(plan, peer))

    def _unlogged(self, newcomers: frozenset[int]) -> str:
        """Return whose messages since the checkpoint nobody has any more, "" where all are there."""
        state, places = self.state, self.state.adopted.places
        if all(state.steps_of(rank) == state.checkpoint.step for rank in newcomers):
            return ""
        if len(newcomers) == len(places) > 1:
            return "all stages are lost at once"
        for rank in sorted(newcomers):
            for other in sorted(neighbours(state.adopted, rank) - newcomers):
                logged = logged_from(state, self.roster, other, self._ready.get(other))
                if logged > state.checkpoint.step:
                    return f"stage {places[other].stage} has its messages from step {logged} on only"
        return ""


def standing_by_for(state: JobState, roster: Roster, lost: Collection[int]) -> dict[int, str]:
    """Return by rank who has stood by for one that is ``lost``, or is to be left, and can take it as it is.

    Not where the model is to be stored after the last step: a standby has stored nothing.
    """
    found: dict[int, str] = {}
    if state.step >= state.steps:
        return found
    for rank in lost:
        standby = state.standbys.get(rank)
        if standby is None or not at_hand(roster, standby.worker):
            continue
        others = neighbours(state.adopted, rank)
        behind = standby.step < state.steps_of(rank)
        if behind and others.intersection(lost):
            continue  # what it has not heard is lost
        if not any(logged_from(state, roster, other) > standby.step for other in others.difference(lost)):
            found[rank] = standby.worker
    return found


def at_hand(roster: Roster, worker: str, job: str = "") -> bool:
    """Whether a worker that has a part, of ``job`` where that is given, is connected, and may be used."""
    known = roster.workers.get(worker)
    if known is None or known.quarantined or known.guest.paused or known.session is None:
        return False
    return known.member.phase is Membership.ASSIGNED and job in ("", known.member.job)


# ---------------------------------------------------------------- what a loss costs


def _standby_takes(state: JobState, roster: Roster, rank: int) -> Price:
    """Return the price of a rank's loss that its standby takes."""
    standby, notice_s = state.standbys[rank], roster.liveness.dead_after_s
    behind = max(0, state.steps_of(rank) - standby.step)
    why = f"{standby.worker} stands by, {behind} steps behind: {notice_s:.1f} s to notice"
    return Price(notice_s + behind * repeated_s(state, roster, rank, standby.worker), why=why)


def _replayed(state: JobState, roster: Roster, rank: int, worker: str) -> Price:
    """Return the price of a rank's loss that a worker takes over, who loads its stage and repeats steps."""
    notice_s, steps = roster.liveness.dead_after_s, state.steps_of(rank) - state.checkpoint.step
    each_s, (load_s, copy) = repeated_s(state, roster, rank, worker), loaded_s(state, roster, rank, worker)
    why = f"{worker} takes over: {notice_s:.1f} s to notice, {load_s:.1f} s to load"
    why += f", {steps} steps of {each_s:.2g} s repeated by it alone" if steps else ""
    return Price(notice_s + load_s + steps * each_s, why=why, copy=copy)


def _others_go_on(state: JobState, roster: Roster, left: Plan, instead: str) -> Price:
    """Return the price of going on with the replicas that are ``left``; ``instead``: why nobody takes
    over."""
    notice_s, before, after = roster.liveness.dead_after_s, state.adopted.prediction, left.prediction
    why = f"the other replicas continue without it: {notice_s:.1f} s to notice"
    found = Price(notice_s)
    if before is not None and after is not None and before.step_s > 0:
        found = priced(state, before.step_s, after.step_s, notice_s)
        now_s = found.usual_s
        why += f", then a step takes about {now_s - found.saved_s:.2g} s, not {now_s:.2g} s"
    return replace(found, why=f"{why}; {instead}")


def _back(state: JobState, roster: Roster, why: str) -> Price:
    """Return the price of going back to what is stored; ``why``: nobody can take over."""
    notice_s, step, each_s = roster.liveness.dead_after_s, state.back_to, state.usual_step_s
    places, steps = enumerate(state.adopted.places), state.step - step
    stored_s = max(loaded_s(state, roster, rank, place.worker)[0] for rank, place in places)
    words = (
        f"back to step {step} ({why}): {notice_s:.1f} s to notice, "
        f"about {PLANNED_WITHIN_S:.0f} s to plan again, {stored_s:.1f} s to load"
    )
    words += f", {steps} steps of {each_s:.2g} s by all" if steps else ""
    pause_s = notice_s + PLANNED_WITHIN_S + stored_s + steps * each_s
    return Price(pause_s, why=words, again=steps)


def loss_prices(state: JobState, record: JobRecord, roster: Roster) -> list[Price]:
    """Return by rank what its loss would cost now; nothing while the plan's stages were never all loaded."""
    ranks = range(state.n_ranks) if begun(state) else ()
    return [choose(state, record, roster, {rank}).price for rank in ranks]


def loss_words(state: JobState, prices: Sequence[Price] = ()) -> str:
    """Say what the loss of a worker would cost now at most, "" where that is not known; ``prices``: by rank,
    none where nobody has looked: then it is known of plans whose ranks keep snapshots for each other."""
    if state.phase not in STEPPING or not (prices or state.ring.held):
        return ""
    steps = max((price.again for price in prices), default=state.step - state.back_to)
    words = "nothing is done again"
    if steps:
        took_s = steps * state.usual_step_s
        words = f"{took_s:.0f} s ({steps} step{'s'[: steps != 1]}) are done again, from step {state.back_to}"
    stands = f"; the job stands still for about {max(p.pause_s for p in prices):.0f} s" if prices else ""
    refused = f"; {state.ring.failed}" if prices and state.ring.failed else ""
    return f"if a worker is lost now: {words}{stands}{refused}"
