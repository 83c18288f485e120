"""Peers of several stages: each commits its own steps, and the job's step is the period's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll.dataset_spec import DataSpec
from atoll.exchange import Exchange
from atoll.job import JobSpec, Optimizer, TrainingSpec, scale_of
from atoll.microbatch import ScheduleName
from atoll.plan import Plan, Replica, StageSpec
from coordinator.messages import jobs
from coordinator.messages.events import Loaded, RoundReceipt, StageFailed, StateStored, StepReady
from coordinator.messages.facts import Checkpoint, CheckpointStored, RoundMet, StepCommitted
from coordinator.messages.instructions import StepCommit, StepStart
from coordinator.messages.jobs import Cause, FromRank, JobState, Phase, Placed, Record, ToRanks, moved
from coordinator.pipeline import machine
from coordinator.pipeline.assigning import said_to, tensors_of
from coordinator.pipeline.changes.seats import seats
from coordinator.pipeline.health.doubt import as_failure
from coordinator.pipeline.periods import disagreement, exchange_words, round_groups
from tests.coordinator.pipeline.changes.test_seats import roster_of

HASH = "ab" * 32
DILOCO = Exchange("diloco", every=2)
FIRST, SECOND = (0, 1), (2, 3)  # ranks of two peers; a third one is whole
WHOLE = 4
TENSORS = {"p": HASH, "q": HASH}


def plan(version: int = 1) -> Plan:
    def stage(start: int, worker: int) -> StageSpec:
        return StageSpec(start, start + 2, start, start + 2, f"w{worker}", 0)

    replicas = (
        Replica((0, 2), (stage(0, 0), stage(2, 1))),
        Replica((2, 3), (stage(0, 2), stage(2, 3))),
        Replica((3, 4), (StageSpec(0, 4, 0, 4, "w4", 0),)),
    )
    return Plan("j", version, HASH, HASH, "test", ScheduleName.ONE_F_ONE_B, 4, replicas, exchange=DILOCO)


def training(**changes: Any) -> JobState:
    optimizer = Optimizer(clip_norm=1.0)
    spec = TrainingSpec(steps=4, n_micro=4, exchange="diloco", local_steps=2, optimizer=optimizer, **changes)
    state = JobState(
        "j", JobSpec("job", spec, HASH, HASH, TENSORS, DataSpec((), 8, 1), None), Checkpoint(0, TENSORS), 0.0
    )
    for event in (jobs.Picked("go"), jobs.Profiled(), jobs.Planned(plan())):
        state, _ = machine.step(state, event, 1.0)
    return loaded(state)


def loaded(state: JobState) -> JobState:
    for rank in state.present:
        state, _ = machine.step(state, FromRank(rank, Loaded("j", state.run.assigned)), 1.0)
    assert state.phase is Phase.TRAINING
    return state


def own(state: JobState, ranks: tuple[int, ...], step: int) -> tuple[JobState, list[jobs.Todo]]:
    """Report a step of a peer from all its stages."""
    said: list[jobs.Todo] = []
    for rank in ranks:
        losses = (0.25, 0.75) if rank == ranks[-1] else ()
        report = StepReady("j", state.version, step, losses, square_norms=(8.0,), forward_s=1.0 + rank)
        state, todo = machine.step(state, FromRank(rank, report), 2.0)
        said += todo
    return state, said


def round_report(state: JobState, rank: int, **changes: Any) -> FromRank[StepReady]:
    group = round_groups(state)[0]
    number = DILOCO.round_of(state.due)
    slices = {0: (3, 7), 1: (5,), 2: (3,), 3: (5, 7), WHOLE: (3, 5, 7)}[rank]
    receipts = tuple(RoundReceipt(number, group, 1.0, 10, 10, f"d{at}", slice=at) for at in slices)
    losses = (float(rank),) * 2 if rank in (1, 3, WHOLE) else ()
    return FromRank(rank, StepReady("j", state.version, state.due, losses, receipts=receipts, **changes))


def commits(todo: list[jobs.Todo]) -> list[tuple[int | None, StepCommit]]:
    return [(t.rank, t.message) for t in todo if isinstance(t, ToRanks) and isinstance(t.message, StepCommit)]


def to_the_round(state: JobState) -> JobState:
    for ranks in (FIRST, SECOND):
        for step in (state.step, state.step + 1):
            state, _ = own(state, ranks, step)
    return state


def period(state: JobState) -> tuple[JobState, list[jobs.Todo]]:
    state, todo = to_the_round(state), list[jobs.Todo]()
    for rank in state.present:
        state, todo = machine.step(state, round_report(state, rank), 9.0)
    return state, todo


def test_a_step_is_committed_for_its_peer_alone_with_that_peers_norm() -> None:
    state, todo = own(training(), FIRST, 0)
    scale = scale_of(4.0, 1.0)
    assert [(rank, c.step, c.gradient_scale, c.own) for rank, c in commits(todo)] == [
        (0, 0, scale, True),
        (1, 0, scale, True),
    ]
    assert not [t for t in todo if isinstance(t, Record)]
    assert state.step == 0
    assert [state.due_of(rank) for rank in range(5)] == [
        (1, False),
        (1, False),
        (0, False),
        (0, False),
        (1, False),
    ]


def test_the_jobs_step_is_the_periods() -> None:
    state, todo = period(training())
    assert state.step == 2
    assert [(rank, c.step, c.own) for rank, c in commits(todo)] == [(None, 1, False)]
    facts = [t.fact for t in todo if isinstance(t, Record)]
    assert [fact.step for fact in facts if isinstance(fact, StepCommitted)] == [1]
    (met,) = [fact for fact in facts if isinstance(fact, RoundMet)]
    assert met.included == ("w0", "w1", "w2", "w3", "w4")
    assert state.loss == pytest.approx((2 * 1.0 + 3.0 + 4.0) / 4)  # by their shares of a step
    assert state.run.reports[2].forward_s == 3.0  # of the peer's last step: a round computes none
    assert not state.run.own


def test_a_stage_that_did_not_hear_its_commit_is_told_again() -> None:
    state, _ = own(training(), FIRST, 0)
    state, todo = machine.step(state, FromRank(1, StepReady("j", 1, 0)), 2.0)
    assert [(rank, c.step) for rank, c in commits(todo)] == [(1, 0)]
    state, todo = machine.step(state, FromRank(1, StepReady("j", 1, 5)), 2.0)
    assert [type(t) for t in todo] == [jobs.Dropped]
    _, todo = own(to_the_round(training()), FIRST, 2)
    assert {type(t) for t in todo} == {jobs.Dropped}, "the round comes first"


def test_a_peer_that_has_lost_a_stage_is_gone_as_a_whole_and_the_others_keep_their_steps() -> None:
    state, _ = own(training(), FIRST, 0)
    state, _ = own(state, SECOND, 0)
    state, _ = own(state, SECOND, 1)
    change = moved(state, state.workers, (), Cause.LOST, "w0 is lost", absent=frozenset(FIRST))
    state, todo = machine.step(state, change, 3.0)
    (placed,) = [t for t in todo if isinstance(t, Placed)]
    assert set(placed.left) == {"w0", "w1"}
    assert [state.due_of(rank) for rank in SECOND] == [(1, True), (1, True)]
    state = loaded(state)
    start = StepStart("j", state.version, state.due)
    assert [said_to(state, rank, start) for rank in (2, WHOLE)] == [start, start]
    for rank in state.present:
        state, todo = machine.step(state, round_report(state, rank), 9.0)
    assert state.step == 2
    assert "without w0: w0 is lost" in exchange_words(state, None, str)
    assert "among w2 with w3, w4" in exchange_words(state, None, str)


def test_a_newcomers_pipeline_goes_on_with_the_steps_that_its_peer_has_taken() -> None:
    state, _ = own(training(), FIRST, 0)
    change = moved(state, ["x", "y", "w2", "w3", "w4"], FIRST, Cause.CHOSEN, "", absent=frozenset())
    state, _ = machine.step(state, change, 3.0)
    assert [state.due_of(rank) for rank in FIRST] == [(1, False), (1, False)]
    assert [commit.step for commit in state.run.heard[0]] == [0]  # which the newcomers repeat


def test_slices_of_different_digests_are_a_disagreement_about_who_holds_them() -> None:
    state = to_the_round(training())
    ready = {rank: round_report(state, rank).message for rank in range(5)}
    groups = round_groups(state)
    assert disagreement(plan(), ready, groups, (2, 2, 2)) is None
    odd = tuple(replace(r, digest="other") if r.slice == 7 else r for r in ready[3].receipts)
    found = disagreement(plan(), {**ready, 3: replace(ready[3], receipts=odd)}, groups, (2, 2, 2))
    assert found is not None
    assert found.ranks == (3,)
    extra = (*ready[0].receipts, replace(ready[0].receipts[0], slice=99))
    found = disagreement(plan(), {**ready, 0: replace(ready[0], receipts=extra)}, groups, (2, 2, 2))
    assert found is not None
    assert found.ranks == (0,)


def test_a_step_that_is_not_finite_fails_its_stage() -> None:
    state = training()
    assert isinstance(as_failure(state, StepReady("j", 1, 0, finite=False)), StageFailed)


def test_a_checkpoint_has_the_model_of_the_first_peer_and_the_others_beside_it() -> None:
    state, todo = period(training(checkpoint_every=2))
    blobs = {0: {"p": "0" * 64}, 1: {"q": "1" * 64}, 2: {"p": "2" * 64}, 3: {"q": "3" * 64}}
    blobs[WHOLE] = {"p": "4" * 64, "q": "5" * 64}
    for rank, tensors in blobs.items():
        state, todo = machine.step(state, FromRank(rank, StateStored("j", 1, 1, tensors)), 9.0)
    (stored,) = [t.fact for t in todo if isinstance(t, Record) and isinstance(t.fact, CheckpointStored)]
    assert dict(stored.tensors) == {
        "p": "0" * 64, "q": "1" * 64, "p@1": "2" * 64, "q@1": "3" * 64, "p@2": "4" * 64, "q@2": "5" * 64,
    }  # fmt: skip
    assert tensors_of(plan(), 3, state.checkpoint) == {"p": "2" * 64, "q": "3" * 64}


def test_free_workers_take_the_places_of_several_lost_pipelines_at_once() -> None:
    """One peer a period would never be enough where machines come and go."""
    state = training()
    gone = frozenset(FIRST + SECOND)
    change = moved(state, state.workers, (), Cause.LOST, "both sites are lost", absent=gone)
    state, _ = machine.step(state, change, 3.0)
    chosen = seats(loaded(state), roster_of(w4=1.0, a=1.0, b=1.0, c=1.0, d=1.0))
    assert chosen is not None
    assert set(chosen.sources) == set(gone)
    assert len({chosen.workers[rank] for rank in gone}) == len(gone)
    chosen = seats(loaded(state), roster_of(w4=1.0, a=1.0, b=1.0, c=1.0))
    assert chosen is not None
    assert set(chosen.sources) == set(FIRST), "all of a peer's or none"


def test_a_period_takes_the_energy_of_all_its_steps() -> None:
    state, todo = training(), list[jobs.Todo]()
    for ranks in (FIRST, SECOND):
        for at in (0, 1):
            for rank in ranks:
                losses = (0.25, 0.75) if rank == ranks[-1] else ()
                report = StepReady("j", 1, at, losses, square_norms=(8.0,), energy_j=1.0 + rank + 10 * at)
                state, _ = machine.step(state, FromRank(rank, report), 2.0)
    for rank in state.present:
        state, todo = machine.step(state, round_report(state, rank, energy_j=100.0), 9.0)
    (fact,) = [t.fact for t in todo if isinstance(t, Record) and isinstance(t.fact, StepCommitted)]
    assert fact.energy_mj == (112_000, 114_000, 116_000, 118_000, 100_000)
