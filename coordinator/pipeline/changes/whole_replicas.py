"""What is left of a plan of several replicas when ranks of some of them are lost: those that are whole. Pure.

After each commit every replica holds the same, so whole ones go on at the step in flight without the others:
they keep their stages and share out the step's blocks of micro-batches anew, as fast as each has been. Bits
depend on blocks, not on who has them (decision 026). As many micro-batches as before hold activations at one
time, so only sums of several blocks may take more memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from atoll.microbatch import ScheduleName, block_ranges
from atoll.plan import Piece, Plan, Prediction, Replica, StagePrediction
from coordinator.pipeline.joined import ranks_of
from coordinator.planning.costs.memory import gradient_copies
from coordinator.planning.peers.transfers import shares_of

if TYPE_CHECKING:
    from atoll.exchange import Exchange
    from coordinator.membership.roster import Roster
    from coordinator.messages.jobs import JobState


def without(state: JobState, roster: Roster, lost: Collection[int]) -> Plan | str:
    """Return the plan of the replicas that have none of the ``lost`` ranks, under the version that it has, or
    why they do not go on by themselves."""
    plan = state.plan
    if plan is None or plan.local or len(plan.replicas) == 1:
        return "there is no other replica"
    broken = {plan.places[rank].replica for rank in lost}
    whole = [number for number in range(len(plan.replicas)) if number not in broken]
    if not whole:
        return "no replica is whole"
    ranks = [rank for number in whole for rank in ranks_of(plan, number)]
    seconds = [pipeline_s(state, plan, number) for number in whole]
    exchange = _among(plan.exchange, ranks) if len(whole) > 1 else None
    return shared(roster, plan, [plan.replicas[number] for number in whole], seconds, exchange)


def shared(
    roster: Roster,
    plan: Plan,
    replicas: Sequence[Replica],
    seconds: Sequence[float],
    exchange: Exchange | None,
) -> Plan | str:
    """Return a plan of these ``replicas``, which share out its step by the ``seconds`` that each took for the
    share that it had, or which stage has no room for its new one. The plan predicts the stages of all."""
    later = _shares(plan, replicas, seconds)
    grown = any(share_of(new) > share_of(old) for new, old in zip(later, replicas, strict=True))
    gpipe = plan.schedule is ScheduleName.GPIPE
    schedule = ScheduleName.ONE_F_ONE_B if gpipe and grown else plan.schedule
    left = replace(plan, replicas=later, schedule=schedule, exchange=exchange)
    if plan.prediction is None:
        return left
    told = {stage.worker: stage for stage in plan.prediction.stages}
    before = [told[place.worker] for place in left.places]
    stages = _predicted_stages(plan, left, replicas, before)
    wrong = _too_large(roster, before, stages)
    return wrong or replace(left, prediction=_predicted(plan, left, replicas, stages))


def share_of(replica: Replica) -> int:
    """Return how many micro-batches of a step a replica has."""
    return replica.micros[1] - replica.micros[0]


def _shares(plan: Plan, replicas: Sequence[Replica], seconds: Sequence[float]) -> tuple[Replica, ...]:
    """Share out the step's blocks among replicas by their speed."""
    blocks = block_ranges(plan.n_micro, plan.blocks)
    speeds = [
        share_of(replica) / took_s if min(seconds) > 0 else 1.0
        for replica, took_s in zip(replicas, seconds, strict=True)
    ]
    ends = [blocks[stop - 1].stop for stop in accumulate(shares_of(len(blocks), speeds))]
    spans = pairwise((0, *ends))
    return tuple(_replica(plan, replica, span) for replica, span in zip(replicas, spans, strict=True))


def pipeline_s(state: JobState, plan: Plan, number: int) -> float:
    """Return the seconds of ``stage_s`` of the slowest stage of a replica."""
    return max(stage_s(state, plan, rank) for rank in ranks_of(plan, number))


def stage_s(state: JobState, plan: Plan, rank: int) -> float:
    """Return the seconds that a stage took for its share of the last step, as predicted where that was not
    measured; 0 where neither is known."""
    report = state.run.reports.get(rank)
    if report is not None and report.forward_s + report.backward_s > 0:
        return report.forward_s + report.backward_s
    predicted = plan.prediction.stages[rank] if plan.prediction is not None else None
    return predicted.compute_s + predicted.handling_s if predicted is not None else 0.0


def _replica(plan: Plan, before: Replica, micros: tuple[int, int]) -> Replica:
    """Return a replica with another share, of which no more micro-batches hold activations than before."""
    count = share_of(before)
    if micros[1] - micros[0] <= count:
        return replace(before, micros=micros)

    def bounded(piece: Piece) -> Piece:
        warmup = count if plan.schedule is ScheduleName.GPIPE else piece.warmup
        return replace(piece, warmup=min(warmup, count - 1), held=min(piece.held, count))

    stages = (stage.with_pieces([bounded(piece) for piece in stage.pieces]) for stage in before.stages)
    return replace(before, micros=micros, stages=tuple(stages))


def _among(exchange: Exchange | None, ranks: Sequence[int]) -> Exchange | None:
    if exchange is None:
        return None
    rates = tuple(exchange.rates[rank] for rank in ranks) if exchange.rates else ()
    sites = tuple(exchange.sites[rank] for rank in ranks) if exchange.sites else ()
    return replace(exchange, rates=rates, sites=sites)


# ---------------------------------------------------------------- predictions


def _predicted_stages(
    plan: Plan, left: Plan, replicas: Sequence[Replica], before: Sequence[StagePrediction]
) -> list[StagePrediction]:
    """Return what the stages take with their new shares; ``before``: with those that they had."""
    found = []
    were_alone, alone = len(plan.replicas) == 1, len(left.replicas) == 1
    for place, told in zip(left.places, before, strict=True):
        old, new = replicas[place.replica], left.replicas[place.replica]
        times = share_of(new) / share_of(old)
        once, tied = told.gradient_bytes, told.tied_gradient_bytes
        more = gradient_copies(once, tied, _blocks(left, new), alone=alone)
        more -= gradient_copies(once, tied, _blocks(plan, old), alone=were_alone)
        found.append(
            replace(
                told,
                compute_s=told.compute_s * times,
                codec_s=told.codec_s * times,
                handling_s=told.handling_s * times,
                memory_bytes=told.memory_bytes + more,
            )
        )
    return found


def _blocks(plan: Plan, replica: Replica) -> int:
    start, stop = replica.micros
    return sum(start <= block.start < stop for block in block_ranges(plan.n_micro, plan.blocks))


def _too_large(roster: Roster, before: Sequence[StagePrediction], after: Sequence[StagePrediction]) -> str:
    """Return which stage has no room for its new share, "" where all have."""
    for old, new in zip(before, after, strict=True):
        known = roster.workers.get(new.worker)
        limit = known.memory_limit_bytes if known is not None else 0
        limit = limit or new.memory_limit_bytes
        if new.memory_bytes > max(limit, old.memory_bytes):
            mib = f"{new.memory_bytes / 2**20:.0f} MiB of {limit / 2**20:.0f}"
            return f"{new.worker} has no room for more blocks of micro-batches ({mib})"
    return ""


def _predicted(
    plan: Plan, left: Plan, replicas: Sequence[Replica], stages: Sequence[StagePrediction]
) -> Prediction:
    """Return what a step takes: no less than before, as the exchange may be another one; where a share has
    grown, longer by that of the slowest replica."""
    assert plan.prediction is not None  # noqa: S101 - the caller has looked
    of = {place.worker: place.replica for place in left.places}
    times = [share_of(new) / share_of(old) for new, old in zip(left.replicas, replicas, strict=True)]
    links = tuple(
        replace(link, bytes_per_step=round(link.bytes_per_step * grown), busy_s=link.busy_s * grown)
        for link in plan.prediction.links
        if link.source in of and link.target in of
        for grown in [times[of[link.source]] if of[link.source] == of[link.target] else 1.0]
    )
    step_s = plan.prediction.step_s * max(1.0, *times)
    return replace(plan.prediction, step_s=step_s, stages=tuple(stages), links=links)
