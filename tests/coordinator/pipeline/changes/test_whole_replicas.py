"""Replicas that are whole go on with other shares: what of a plan is left, and where there is no room."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.exchange import Exchange
from atoll.microbatch import ScheduleName, Work
from atoll.plan import LinkPrediction, Plan, Prediction, Replica, StagePrediction, StageSpec, check_shares
from coordinator.membership.roster import Roster
from coordinator.messages.encoding import from_json, to_json
from coordinator.messages.events import StepReady
from coordinator.messages.facts import Checkpoint
from coordinator.messages.jobs import JobState, Running
from coordinator.pipeline.changes.whole_replicas import without
from tests.sim.world import pipeline_job

MIB = 2**20
NOBODY = cast("Roster", SimpleNamespace(workers={}))


def planned(*shares: int, stages: int = 2, schedule: ScheduleName = ScheduleName.ONE_F_ONE_B) -> Plan:
    """A plan of a replica for each share of the blocks, of two stages each; a block is a micro-batch."""
    n_micro = sum(shares)
    ends = list(accumulate(shares, initial=0))
    replicas = tuple(
        Replica(
            micros,
            tuple(
                StageSpec(at, at + 1, 0, 0, f"w{number}{at}", min(stages - at, micros[1] - micros[0]))
                for at in range(stages)
            ),
        )
        for number, micros in enumerate(pairwise(ends))
    )
    plan = Plan(
        "job-1", 3, "ab" * 32, "", "test", schedule, n_micro, replicas, blocks=n_micro,
        exchange=Exchange(rates=tuple(float(at + 1) for at in range(stages * len(shares)))),
    )  # fmt: skip
    told = tuple(
        StagePrediction(
            place.worker, 0.1 * shares[place.replica], 0.5, 100 * MIB, 110 * MIB,
            gradient_bytes=6 * MIB, tied_gradient_bytes=MIB,
        )
        for place in plan.places
    )  # fmt: skip
    links = tuple(
        LinkPrediction(a, b, 1000, 0.1)
        for a, b in (("w00", "w01"), ("w10", "w11"), ("w00", "w10"), ("w10", "w00"))
    )
    return replace(plan, prediction=Prediction(0.5, 0.25, "stage 0 on w00", "why", told, links))


def state(plan: Plan, **changes: Any) -> JobState:
    step, run = changes.pop("step", 0), Running(**changes)
    return JobState("job-1", pipeline_job(replicas=2), Checkpoint(0, {}), 0.0, step=step, plan=plan, run=run)


def left(plan: Plan, *lost: int, **changes: Any) -> Plan:
    found = without(state(plan, **changes), NOBODY, lost)
    assert isinstance(found, Plan), found
    check_shares(found)
    return found


def test_the_whole_replicas_share_out_every_block() -> None:
    plan = left(planned(2, 2, 4), 2)
    assert [replica.micros for replica in plan.replicas] == [(0, 4), (4, 8)]
    assert [stage.worker for replica in plan.replicas for stage in replica.stages] == [
        "w00", "w01", "w20", "w21",
    ]  # fmt: skip
    assert plan.exchange is not None
    assert plan.exchange.rates == (1.0, 2.0, 5.0, 6.0)
    assert plan.prediction is not None
    assert [told.worker for told in plan.prediction.stages] == ["w00", "w01", "w20", "w21"]
    assert [link.bytes_per_step for link in plan.prediction.links] == [2000]
    assert plan.prediction.step_s == 1.0
    alone = left(planned(2, 2, 4), 2, 5)
    assert (alone.exchange, [r.micros for r in alone.replicas]) == (None, [(0, 8)])


def test_who_was_faster_in_the_last_step_has_more_of_the_next() -> None:
    reports = {
        rank: StepReady("job-1", 3, 0, forward_s=seconds, backward_s=0.0)
        for rank, seconds in enumerate((0.1, 0.2, 9.0, 9.0, 0.6, 0.1))
    }
    plan = left(planned(2, 2, 2), 3, reports=reports)
    assert [replica.micros for replica in plan.replicas] == [(0, 5), (5, 6)]


@pytest.mark.parametrize("schedule", list(ScheduleName))
def test_no_more_micro_batches_hold_activations_at_one_time(schedule: ScheduleName) -> None:
    before = planned(2, 6, schedule=schedule)
    after = left(before, 3)
    for rank in range(2):
        held, most = 0, {0: 0, 1: 0}
        for which, plan in enumerate((before, after)):
            for action in plan.actions(rank):
                held += {Work.FORWARD: 1, Work.BACKWARD: -1, Work.INPUT: -1}.get(action.work, 0)
                most[which] = max(most[which], held)
            assert held == 0
        assert most[1] <= most[0]
        assert {a.micro for a in after.actions(rank)} == set(range(8))


def test_a_stage_without_room_for_sums_of_more_blocks_goes_back_instead() -> None:
    fits = planned(1, 1, 2)
    plan = left(fits, 0)
    assert plan.prediction is not None
    # One block more at the first: its sum so far, and once more what is tied.
    assert [told.memory_bytes // MIB for told in plan.prediction.stages] == [107, 107, 100, 100]
    assert fits.prediction is not None
    tight = tuple(replace(told, memory_limit_bytes=105 * MIB) for told in fits.prediction.stages)
    plan = replace(fits, prediction=replace(fits.prediction, stages=tight))
    assert without(state(plan), NOBODY, {0}) == (
        "w10 has no room for more blocks of micro-batches (107 MiB of 105)"
    )
    # Who is alone needs nothing to exchange.
    assert isinstance(without(state(plan), NOBODY, {0, 2}), Plan)


def test_a_restarted_coordinator_counts_the_same_memory() -> None:
    plan = planned(1, 1, 2)
    (back,) = from_json(tuple[Plan, ...], to_json((plan,)))
    assert back.prediction is not None
    assert plan.prediction is not None
    assert back.prediction.stages == plan.prediction.stages


def test_without_a_whole_replica_or_another_one_nothing_is_left() -> None:
    assert without(state(planned(2, 2)), NOBODY, {0, 2}) == "no replica is whole"
    assert without(state(planned(4)), NOBODY, {0}) == "there is no other replica"
