"""The session of a stage of a peer that is a pipeline: each step committed, then the round of the period."""

from __future__ import annotations

from typing import Any

from atoll.exchange import Exchange
from protos import atoll_control_pb2 as pb
from tests.worker.session.test_machine import JOINED, assigned, commit, peer, told
from worker.session import events as e
from worker.session import instructions as do
from worker.session.machine import Phase, Session

EVERY = 2
ASSIGN = assigned(first_step=0, exchange=Exchange("diloco", every=EVERY), steps=4, pieces=3)
TRAINING: tuple[e.Event, ...] = (*JOINED, ASSIGN, e.Loaded("j", 1), e.StepStart("j", 1, 0))


def done(step: int, *, own: bool = True, **flags: Any) -> tuple[e.Event, ...]:
    return e.StepReady("j", 1, step), commit(step, own=own, **flags), e.StepApplied("j", 1, step)


def orders(todo: list[do.Instruction]) -> list[do.Instruction]:
    return [order for order in todo if isinstance(order, do.RunStep | do.RunRound)]


def reconfigured(step: int, *, joining: bool) -> e.Reconfigure:
    return e.Reconfigure("j", 2, 1, step, (peer("w-c"),), pb.Reconfigure(), joining=joining)


def test_a_period_is_its_steps_and_then_its_round() -> None:
    state, todo = told(Session(), *TRAINING, *done(0), *done(1))
    assert orders(todo) == [do.RunStep("j", 1, 0), do.RunStep("j", 1, 1), do.RunRound("j", 1, 1)]
    assert (state.step, state.due, state.joining) == (2, 1, True)
    state, todo = told(state, *done(1, own=False))
    assert orders(todo) == [do.RunStep("j", 1, 2)]
    assert (state.due, state.joining) == (2, False)


def test_an_evaluation_follows_a_round_and_then_the_next_period() -> None:
    state, todo = told(Session(), *TRAINING, *done(0), *done(1), *done(1, own=False, evaluate=True))
    assert state.phase is Phase.EVALUATING
    state, todo = told(state, e.EvalReady("j", 1, 1, None))
    assert orders(todo) == [do.RunStep("j", 1, 2)]


def test_after_a_loss_a_stage_goes_on_with_the_step_that_it_was_at() -> None:
    before, _ = told(Session(), *TRAINING, *done(0))
    state, todo = told(before, reconfigured(1, joining=False), e.Loaded("j", 2), e.StepStart("j", 2, 1))
    assert orders(todo) == [do.RunStep("j", 2, 1)]
    state, _ = told(before, reconfigured(1, joining=True))
    assert state.phase is Phase.FAILED, "it has not heard the commit of the last step"


def test_after_a_loss_a_stage_does_the_round_again() -> None:
    state, _ = told(Session(), *TRAINING, *done(0), *done(1))
    state, todo = told(state, reconfigured(1, joining=True), e.Loaded("j", 2), e.StepStart("j", 2, 1))
    assert orders(todo) == [do.RunRound("j", 2, 1)]


def test_a_change_waits_for_the_commit_that_is_being_carried_out() -> None:
    ready, committed, applied = done(1)
    state, todo = told(Session(), *TRAINING, *done(0), ready, committed, reconfigured(1, joining=True))
    assert state.phase is Phase.APPLYING
    state, todo = told(state, applied, e.Loaded("j", 2), e.StepStart("j", 2, 1))
    assert orders(todo) == [do.RunRound("j", 2, 1)]


def test_a_commit_with_shares_ends_the_period_with_the_step_that_it_is_of() -> None:
    state, todo = told(Session(), *TRAINING, *done(0, shares=(1.0, 0.5)))
    assert orders(todo) == [do.RunStep("j", 1, 0), do.RunRound("j", 1, 1)]
    assert (state.step, state.due, state.joining) == (2, 1, True)
    _again, todo = told(state, reconfigured(1, joining=True), e.Loaded("j", 2), e.StepStart("j", 2, 1))
    assert orders(todo) == [do.RunRound("j", 2, 1)]
    state, todo = told(state, *done(1, own=False))
    assert orders(todo) == [do.RunStep("j", 1, 2)]


def test_where_rounds_may_begin_early_a_peer_of_one_stage_has_its_steps_committed() -> None:
    assign = assigned(first_step=0, exchange=Exchange("diloco", EVERY, quorum=0.5), steps=4)
    _, todo = told(Session(), *JOINED, assign, e.Loaded("j", 1), e.StepStart("j", 1, 0), *done(0))
    assert orders(todo) == [do.RunStep("j", 1, 0), do.RunStep("j", 1, 1)]
