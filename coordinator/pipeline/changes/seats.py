"""Ranks of lost peers, and replicas that are missing, which idle workers take. Pure.

Those that are there store what a newcomer begins with at a commit, of peers with local steps at the end of a
period, and go on. With the checkpoint all connect anew, the newcomers among them: a peer takes the steps of
the period that is under way, and the others keep those that they have taken. A replica more is a copy of one
that is there, cut alike, and all share out the step's blocks anew, where the steps that are left save more
than the pause takes. A step or period that ends before that is stored waits for it. Where a fleet that has
grown is worth another plan (``replanning``), all begin with that checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from atoll.exchange import Exchange
from coordinator.membership.link_table import MIN_BANDWIDTH_BPS
from coordinator.membership.member import NO_RANK
from coordinator.messages.jobs import ENDED, STEPPING, Cause, Event, JobState, PlanChange, Seating, moved
from coordinator.pipeline.changes.price import pause_s, priced
from coordinator.pipeline.changes.reconfigure import at_hand
from coordinator.pipeline.changes.successors import Successors, computed_s, devices_of, seconds_of, slower
from coordinator.pipeline.changes.whole_replicas import pipeline_s, share_of, shared, stage_s
from coordinator.pipeline.joined import ranks_of
from coordinator.pipeline.tuning.pair_tables import newer_table
from coordinator.planning.costs.fleet import UNKNOWN

if TYPE_CHECKING:
    from atoll.plan import Plan, Replica
    from coordinator.membership.effects import Effects
    from coordinator.membership.roster import Roster
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
            if wanted != state.run.seating:
                self.step(state.job, Seating(wanted))
            return
        if chosen is None:
            if state.run.awaiting_eval is None:
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
        return another_replica(state, roster) if not state.failures else None

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


# ---------------------------------------------------------------- peers


def seats(state: JobState, roster: Roster) -> PlanChange | None:
    """Return which idle workers take the ranks of lost peers, None where no one fits any. Who was lost takes
    its own rank alone, where nobody else fits it. Nobody takes one whose share would last so long with it
    that fewer micro-batches a second are computed than without."""
    plan = state.plan
    if plan is None or not plan.absent:
        return None
    chosen: dict[int, str] = {}
    again = [w for rank in plan.absent if roster.is_idle(w := plan.places[rank].worker)]
    micros = [stop - start for start, stop in (replica.micros for replica in plan.replicas)]  # by rank
    slowest = max(plan.present, key=lambda rank: computed_s(state, rank))
    step_s = each_s = computed_s(state, slowest)
    done = sum(micros[rank] for rank in plan.present)
    for rank in sorted(plan.absent):
        successors = Successors(state, roster, plan.absent - chosen.keys(), again)
        for successor in successors.of(rank, chosen):
            times = successors.slower(successor.worker, plan.places[slowest].worker)
            took_s = each_s * times * micros[rank] / micros[slowest]
            if not each_s or took_s * done < step_s * (done + micros[rank]):
                chosen[rank], step_s = successor.worker, max(step_s, took_s)
                done += micros[rank]
                break
    if not chosen:
        return None
    workers = [chosen.get(rank, place.worker) for rank, place in enumerate(plan.places)]
    absent = plan.absent - chosen.keys()
    there = [rank for rank in range(state.n_ranks) if rank not in absent]
    table = newer_table(state, roster, workers, there, predicted=True)
    exchange = replace(plan.exchange, pairs=table) if table is not None and plan.exchange else None
    return moved(state, workers, chosen, Cause.CHOSEN, "", absent=absent, exchange=exchange)


# ---------------------------------------------------------------- a replica more


def another_replica(state: JobState, roster: Roster) -> PlanChange | None:
    """Return the plan with a replica more, and who the newcomers are; None where nobody fits, it is not worth
    it, or the owner has not asked for as many."""
    plan = state.plan
    wanted = min(state.spec.training.replica_count or 0, plan.blocks if plan is not None else 0)
    if plan is None or plan.local or len(plan.replicas) >= wanted:
        return None
    number = min(range(len(plan.replicas)), key=lambda at: len(plan.replicas[at].stages))
    workers = _workers(state, roster, plan, number)
    if workers is None:
        return None
    replicas = [*plan.replicas, _on(plan.replicas[number], iter(workers))]
    seconds = [pipeline_s(state, plan, at) for at in range(len(plan.replicas))]
    seconds.append(_copy_s(state, roster, plan, number, workers))
    if not all(seconds):  # of speeds nothing is known: as long for each micro-batch
        seconds = [float(share_of(replica)) for replica in replicas]
    grown = _grown(roster, plan, number, replicas, seconds)
    if grown is None or not _worth(state, replicas, seconds, grown):
        return None
    newcomers = [rank for rank, place in enumerate(grown.places) if place.worker in workers]
    grown = replace(grown, version=state.next_version)
    return PlanChange(grown, dict.fromkeys(newcomers, state.checkpoint), Cause.CHOSEN, "")


def _workers(state: JobState, roster: Roster, plan: Plan, number: int) -> list[str] | None:
    """Return workers for the stages of a copy of a replica, None where too few are idle or stand by."""
    precision = state.spec.training.precision.value
    idle = [*roster.plannable(roster.idle(), precision), *_beside(state, roster)]
    held = [place.worker for place in plan.places]
    fleet, chosen = devices_of(roster, (*idle, *held), precision, state.job), list[str]()
    for rank in ranks_of(plan, number):
        was = fleet.get(held[rank])
        fit = [
            (fleet[worker].device_class != (was.device_class if was else None), step_s, worker)
            for worker in idle
            if worker not in chosen and _reaches(roster, worker, (*held, *chosen))
            for step_s in [seconds_of(state, roster, rank, fleet, worker, {})]
            if step_s < inf
        ]
        if not fit:
            return None
        chosen.append(min(fit)[2])
    return chosen


def _beside(state: JobState, roster: Roster) -> list[str]:
    """Return who stands by for a loss, or repeats steps to compare: with one check after the other nobody
    would ever be idle."""
    swapping = {standby.worker for standby in state.standbys.values() if standby.swap}
    return [
        worker
        for worker, known in roster.workers.items()
        if known.member.rank == NO_RANK and worker not in swapping and at_hand(roster, worker, state.job)
    ]


def _reaches(roster: Roster, worker: str, others: Sequence[str]) -> bool:
    """Whether a worker has a way to each of these, over links that are not known to be broken."""
    if not all(other in roster.workers and roster.connectable(worker, other) for other in others):
        return False
    links = (
        roster.links.table.get(*pair) or UNKNOWN
        for other in others
        for pair in ((worker, other), (other, worker))
    )
    return all(link.bandwidth_bps > MIN_BANDWIDTH_BPS for link in links)


def _copy_s(state: JobState, roster: Roster, plan: Plan, number: int, workers: Sequence[str]) -> float:
    """Return the seconds in which a copy of a replica on these workers would compute the replica's share."""
    ranks, held = ranks_of(plan, number), [place.worker for place in plan.places]
    fleet = devices_of(roster, (*workers, *held), state.spec.training.precision.value)
    return max(
        stage_s(state, plan, rank) * slower(roster, fleet, worker, held[rank])
        for rank, worker in zip(ranks, workers, strict=True)
    )


def _grown(
    roster: Roster, plan: Plan, number: int, replicas: Sequence[Replica], seconds: Sequence[float]
) -> Plan | None:
    """Return the plan with the last of ``replicas``, a copy of one of it, None where a stage has no room for
    that; ``seconds``: of each for the share that it has here."""
    prediction = plan.prediction
    if prediction is not None:
        told = (prediction.stages[rank] for rank in ranks_of(plan, number))
        more = tuple(one.at(stage.worker) for one, stage in zip(told, replicas[-1].stages, strict=True))
        prediction = replace(prediction, stages=prediction.stages + more)
    # Rates and sites of who comes are not known: equal shares are as exact.
    exchange = replace(plan.exchange or Exchange(), rates=(), sites=(), inner=None)
    found = shared(roster, replace(plan, prediction=prediction), replicas, seconds, exchange)
    return None if isinstance(found, str) else found


def _on(replica: Replica, workers: Iterator[str]) -> Replica:
    return replace(replica, stages=tuple(replace(s, worker=next(workers)) for s in replica.stages))


def _worth(state: JobState, replicas: Sequence[Replica], seconds: Sequence[float], grown: Plan) -> bool:
    """Whether the steps that are left save more than standing still for the newcomers takes; ``seconds``: of
    each of the ``replicas``, the last of which is new, for the share that it has there."""
    shares = zip(grown.replicas, replicas, seconds, strict=True)
    after_s = max(took_s * share_of(new) / share_of(old) for new, old, took_s in shares)
    return bool(state.run.step_times_s) and priced(state, max(seconds[:-1]), after_s, pause_s(state)).pays()
