"""Rounds that begin once a quorum of peers has its steps: who is late ends with the step it is at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll.dataset_spec import DataSpec
from atoll.errors import UsageError
from atoll.exchange import Exchange
from atoll.job import JobSpec, TrainingSpec
from atoll.microbatch import ScheduleName
from atoll.plan import Plan, Replica, StageSpec
from coordinator.messages import jobs
from coordinator.messages.events import Loaded, RoundReceipt, StepReady
from coordinator.messages.facts import Checkpoint, RoundMet, StepCommitted
from coordinator.messages.instructions import StepCommit
from coordinator.messages.jobs import Cause, FromRank, JobState, Phase, Record, ToRanks, moved
from coordinator.pipeline import machine
from coordinator.pipeline.health.stuck import _done
from coordinator.pipeline.periods import exchange_words, met_fields, round_groups

HASH = "ab" * 32
EVERY, GRACE_S = 4, 10.0
EXCHANGE = Exchange("diloco", every=EVERY).among(4, 3, GRACE_S)
SHARES = ((0, 2), (2, 3), (3, 4), (4, 5))  # the first peer has twice the samples of the others


def training(**changes: Any) -> JobState:
    replicas = tuple(
        Replica(micros, (StageSpec(0, 4, 0, 4, f"w{at}", 0),)) for at, micros in enumerate(SHARES)
    )
    plan = Plan(
        "j", 1, HASH, HASH, "test", ScheduleName.ONE_F_ONE_B, 5, replicas, exchange=EXCHANGE, **changes
    )
    spec = TrainingSpec(steps=8, n_micro=5, exchange="diloco", local_steps=EVERY, quorum=3, grace_s=GRACE_S)
    job = JobSpec("job", spec, HASH, HASH, {"p": HASH}, DataSpec((), 8, 1), None)
    state = JobState("j", job, Checkpoint(0, {"p": HASH}), 0.0)
    for event in (jobs.Picked("go"), jobs.Profiled(), jobs.Planned(plan)):
        state, _ = machine.step(state, event, 1.0)
    return loaded(state)


def loaded(state: JobState) -> JobState:
    for rank in state.present:
        state, _ = machine.step(state, FromRank(rank, Loaded("j", state.run.assigned)), 1.0)
    assert state.phase is Phase.TRAINING
    return state


def told(
    state: JobState, rank: int, steps: range, now_s: float
) -> tuple[JobState, dict[int, tuple[StepCommit, ...]]]:
    """Report these steps of a rank; the commits that follow from the last one, by rank."""
    todo: list[jobs.Todo] = []
    for step in steps:
        report = StepReady("j", state.version, step, (float(rank + step),))
        state, todo = machine.step(state, FromRank(rank, report), now_s)
    found: dict[int, tuple[StepCommit, ...]] = {}
    for each in todo:
        if isinstance(each, ToRanks) and isinstance(each.message, StepCommit) and each.rank is not None:
            found[each.rank] = (*found.get(each.rank, ()), each.message)
    return state, found


def three_done(state: JobState, now_s: float = 100.0) -> JobState:
    for rank in range(3):
        state, commits = told(state, rank, range(EVERY), now_s)
        assert not commits, "the last step of a peer waits for the others"
    return state


def the_round(state: JobState) -> tuple[JobState, list[jobs.Todo]]:
    todo: list[jobs.Todo] = []
    for rank in state.present:
        own = state.run.own[rank]
        receipt = RoundReceipt(0, round_groups(state)[0], 1.0, 10, 10, "same", slice=3)
        report = StepReady("j", state.version, state.due, (float(rank),) * (own.taken or EVERY))
        state, todo = machine.step(state, FromRank(rank, replace(report, receipts=(receipt,))), 200.0)
    return state, todo


def test_a_round_of_all_begins_at_once_and_counts_samples() -> None:
    state = three_done(training())
    state, commits = told(state, 3, range(EVERY), 101.0)
    assert {rank: (c.step, c.own, c.shares) for rank, (c,) in commits.items()} == dict.fromkeys(
        range(4), (EVERY - 1, True, (1.0, 0.5, 0.5, 0.5))
    )
    state, todo = the_round(state)
    (met,) = [t.fact for t in todo if isinstance(t, Record) and isinstance(t.fact, RoundMet)]
    assert (met.included, met.late) == (("w0", "w1", "w2", "w3"), {})


def test_within_the_grace_a_late_peer_takes_its_next_step() -> None:
    state, _ = told(three_done(training()), 3, range(2), 100.0 + GRACE_S - 0.1)
    assert state.run.own[3].step == 2
    assert not state.run.own[3].ready


def test_after_the_grace_a_late_peer_ends_with_the_step_that_it_is_at() -> None:
    state, _ = told(three_done(training()), 3, range(1), 101.0)
    state, commits = told(state, 3, range(1, 2), 100.0 + GRACE_S)
    shares = (1.0, 0.5, 0.5, 0.25)  # two steps of four
    assert {rank: (c.step, c.shares) for rank, (c,) in commits.items()} == {
        0: (3, shares),
        1: (3, shares),
        2: (3, shares),
        3: (1, shares),
    }
    assert [state.due_of(rank) for rank in range(4)] == [(3, True)] * 4
    again, repeated = told(state, 3, range(1, 2), 111.0)
    assert repeated == {3: commits[3]}, "it had not heard the commit"
    state, todo = the_round(again)
    facts = [t.fact for t in todo if isinstance(t, Record)]
    assert [fact.step for fact in facts if isinstance(fact, StepCommitted)] == [3]
    (met,) = [fact for fact in facts if isinstance(fact, RoundMet)]
    assert met.late == {"w3": 2}
    assert met_fields(met, str)["late"] == "w3 with 2 steps"
    assert "4 of 4, w3 with 2 steps" in exchange_words(state, replace(met, version=1), str)
    losses = [t.value for t in todo if isinstance(t, jobs.Point) and t.name == "loss"]
    assert losses == [pytest.approx((0 * 2 + 1 + 2 + 3) / 5)] * 2 + [pytest.approx((0 * 2 + 1 + 2) / 4)] * 2
    assert (state.step, state.run.own, state.run.quorum_s) == (EVERY, {}, None)


def test_two_that_are_late_are_both_awaited_for_a_step() -> None:
    state = training()
    for rank in (0, 1):
        state, _ = told(state, rank, range(EVERY), 100.0)
    state, _ = told(state, 2, range(1), 150.0)
    assert state.run.own[2].step == 1, "two of four are no quorum"
    state, _ = told(state, 2, range(1, EVERY), 151.0)
    state, commits = told(state, 3, range(1), 151.0 + GRACE_S)
    assert {rank: c.shares for rank, (c,) in commits.items()} == dict.fromkeys(
        range(4), (1.0, 0.5, 0.5, 0.125)
    )


def test_who_is_lost_while_all_wait_for_it_is_in_no_round() -> None:
    state = three_done(training())
    change = moved(state, state.workers, (), Cause.LOST, "w3 is lost", absent=frozenset({3}))
    state, _ = machine.step(state, change, 102.0)
    state = loaded(state)
    commits: dict[int, tuple[StepCommit, ...]] = {}
    for rank in range(3):
        assert state.due_of(rank) == (EVERY - 1, False), "the step in flight begins anew"
        state, commits = told(state, rank, range(EVERY - 1, EVERY), 103.0)
    assert {rank: c.shares for rank, (c,) in commits.items()} == dict.fromkeys(range(3), (1.0, 0.5, 0.5, 0.0))


def test_who_is_lost_counts_no_more_for_the_quorum() -> None:
    state = three_done(training())
    change = moved(state, state.workers, (), Cause.LOST, "w0 is lost", absent=frozenset({0}))
    state, _ = machine.step(state, change, 102.0)
    state = loaded(state)
    for rank in (1, 2):
        state, _ = told(state, rank, range(EVERY - 1, EVERY), 103.0)
    state, commits = told(state, 3, range(EVERY - 1), 500.0)
    assert [c.shares for c in commits[3]] == [()], "two of three are there"
    _, commits = told(state, 3, range(EVERY - 1, EVERY), 600.0)
    assert {rank: c.shares for rank, (c,) in commits.items()} == dict.fromkeys(
        (1, 2, 3), (0.0, 1.0, 1.0, 1.0)
    )


def test_a_late_peers_steps_are_known_after_a_loss_within_the_round() -> None:
    state, _ = told(three_done(training()), 3, range(1), 100.0 + GRACE_S)
    change = moved(state, state.workers, (), Cause.LOST, "w0 is lost", absent=frozenset({0}))
    state, _ = machine.step(state, change, 120.0)
    state, todo = the_round(loaded(state))
    (met,) = [t.fact for t in todo if isinstance(t, Record) and isinstance(t.fact, RoundMet)]
    assert (met.included, met.late) == (("w1", "w2", "w3"), {"w3": 1})


def test_who_waits_for_others_is_not_taken_for_stuck() -> None:
    assert _done(three_done(training()), set()) == {0, 1, 2}


@pytest.mark.parametrize("exchange", ["exact", "auto", "streaming_diloco", "saps", "mean:int8_block"])
def test_a_quorum_is_of_rules_whose_rounds_may_begin_early(exchange: str) -> None:
    with pytest.raises(UsageError, match=f"exchange {exchange}; .*diloco and sparseloco alone"):
        TrainingSpec(steps=8, n_micro=4, exchange=exchange, quorum=2)


def test_a_quorum_of_all_changes_nothing() -> None:
    exchange = Exchange("diloco", every=EVERY)
    assert exchange.among(3, 3, 10.0) is exchange
    assert exchange.among(3, 0, 10.0) is exchange
    assert exchange.among(8, 5, 10.0).awaited(8) == 5
