"""Ranks of lost peers, and replicas that are missing, which idle workers take. Pure.

Those that are there store what a newcomer begins with (``choice``). A peer takes the steps of the period that
is under way, and the others keep those that they have taken. A replica more is a copy of one that is there,
cut alike, and all share out the step's blocks anew, where the steps that are left save more than the pause
takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from atoll.exchange import Exchange
from coordinator.membership.links.table import MIN_BANDWIDTH_BPS
from coordinator.membership.member import NO_RANK
from coordinator.messages.jobs import Cause, JobState, PlanChange, Price, moved
from coordinator.pipeline.changes.choice import pause_s, priced
from coordinator.pipeline.changes.recovery import at_hand
from coordinator.pipeline.changes.successors import Successors, computed_s, devices_of, seconds_of, slower
from coordinator.pipeline.changes.whole_replicas import pipeline_s, share_of, shared, stage_s
from coordinator.pipeline.joined import ranks_of
from coordinator.pipeline.tuning.rounds import newer_table
from coordinator.planning.costs.fleet import UNKNOWN

if TYPE_CHECKING:
    from atoll.plan import Plan, Replica
    from coordinator.membership.roster import Roster

MISSING = Price(saved_s=inf, left=1)
"""Of a peer that is missing: nothing is worth more."""


def places(state: JobState, roster: Roster) -> Iterator[PlanChange]:
    """Yield who takes which ranks of lost peers, or makes the plan one of a replica more."""
    chosen = (
        seats(state, roster) if state.local else None if state.failures else another_replica(state, roster)
    )
    if chosen is not None:
        label, newcomers = roster.label, sorted(chosen.sources)
        taken = ", ".join(f"{label(chosen.workers[rank])} joins as rank {rank}" for rank in newcomers)
        yield replace(chosen, reason=f"{taken}, with the state after {state.step} steps")


# ---------------------------------------------------------------- peers


def seats(state: JobState, roster: Roster) -> PlanChange | None:
    """Return which idle workers take the ranks of lost peers, None where no one fits any. Who was lost takes
    its own rank alone, where nobody else fits it. Nobody takes one whose share would last so long with it
    that fewer micro-batches a second are computed than without."""
    plan = state.plan
    if plan is None or not plan.absent:
        return None
    again = [w for rank in plan.absent if roster.is_idle(w := plan.places[rank].worker)]
    single = all(len(replica.stages) == 1 for replica in plan.replicas)
    chosen = _peers(state, roster, plan, again) if single else _pipelines(state, roster, plan, again)
    if not chosen:
        return None
    workers = [chosen.get(rank, place.worker) for rank, place in enumerate(plan.places)]
    absent = plan.absent - chosen.keys()
    there = [rank for rank in range(state.n_ranks) if rank not in absent]
    table = newer_table(state, roster, workers, there, predicted=True)
    exchange = replace(plan.exchange, pairs=table) if table is not None and plan.exchange else None
    found = moved(state, workers, chosen, Cause.CHOSEN, "", absent=absent, exchange=exchange)
    return replace(found, price=MISSING)


def _pipelines(state: JobState, roster: Roster, plan: Plan, again: Sequence[str]) -> dict[int, str]:
    """Return who takes the ranks of peers that are missing, by rank: all of a peer's or none."""
    chosen: dict[int, str] = {}
    for number in sorted({plan.places[rank].replica for rank in plan.absent}):
        ranks = frozenset(ranks_of(plan, number))
        with_it = replace(state, plan=replace(plan, absent=plan.absent - ranks - chosen.keys()))
        found = Successors(with_it, roster, ranks, again, ready=chosen).chosen()
        chosen |= found if isinstance(found, dict) else {}
    return chosen


def _peers(state: JobState, roster: Roster, plan: Plan, again: Sequence[str]) -> dict[int, str]:
    """Return who takes the ranks of peers of one stage that are missing, by rank."""
    chosen: dict[int, str] = {}
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
    return chosen


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
    grown = _grown(state, roster, plan, number, replicas, seconds)
    price = _priced(state, replicas, seconds, grown) if grown is not None else None
    if grown is None or price is None or not price.pays():
        return None
    newcomers = [rank for rank, place in enumerate(grown.places) if place.worker in workers]
    grown = replace(grown, version=state.next_version)
    sources = dict.fromkeys(newcomers, state.checkpoint)
    return PlanChange(grown, sources, Cause.CHOSEN, "", price=price)


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
    state: JobState,
    roster: Roster,
    plan: Plan,
    number: int,
    replicas: Sequence[Replica],
    seconds: Sequence[float],
) -> Plan | None:
    """Return the plan with the last of ``replicas``, a copy of one of it, None where a stage has no room for
    that; ``seconds``: of each for the share that it has here."""
    prediction = plan.prediction
    if prediction is not None:
        told = (prediction.stages[rank] for rank in ranks_of(plan, number))
        more = tuple(one.at(stage.worker) for one, stage in zip(told, replicas[-1].stages, strict=True))
        prediction = replace(prediction, stages=prediction.stages + more)
    # Rates and sites of who comes are not known: equal shares are as exact.
    asked = state.spec.training.gradient_exchange or Exchange()
    exchange = replace(plan.exchange or asked, rates=(), sites=(), inner=None)
    found = shared(roster, replace(plan, prediction=prediction), replicas, seconds, exchange)
    return None if isinstance(found, str) else found


def _on(replica: Replica, workers: Iterator[str]) -> Replica:
    return replace(replica, stages=tuple(replace(s, worker=next(workers)) for s in replica.stages))


def _priced(
    state: JobState, replicas: Sequence[Replica], seconds: Sequence[float], grown: Plan
) -> Price | None:
    """Return the price of standing still for the newcomers, None where no step was measured; ``seconds``: of
    each of the ``replicas``, the last of which is new, for the share that it has there."""
    shares = zip(grown.replicas, replicas, seconds, strict=True)
    after_s = max(took_s * share_of(new) / share_of(old) for new, old, took_s in shares)
    return priced(state, max(seconds[:-1]), after_s, pause_s(state)) if state.run.step_times_s else None
