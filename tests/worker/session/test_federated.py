"""A federated job in the worker's session: each round answered once, whatever is lost or said twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.session.test_machine import told
from worker.session import events as e
from worker.session import instructions as do
from worker.session.machine import Phase, Session, handle
from worker.session.state import Kind

JOINED: tuple[e.Event, ...] = (
    e.Welcome("w-a", 0.5),
    e.Participate("f", 1, "work"),
    e.Joined("f", 1, "loaded"),
)
AGAIN: tuple[e.Event, ...] = (e.Disconnected("reset", 0.0), e.Welcome("w-a", 0.5))


def train(at_round: int) -> e.TrainRound:
    return e.TrainRound("f", at_round, f"order {at_round}")


def evaluate(at_round: int) -> e.EvaluateRound:
    return e.EvaluateRound("f", at_round, f"model {at_round}")


def trained(at_round: int) -> e.UpdateStored:
    return e.UpdateStored("f", at_round, f"update {at_round}")


def assessed(at_round: int) -> e.RoundEvaluated:
    return e.RoundEvaluated("f", at_round, f"tested {at_round}")


def settled(at_round: int, taken: bool = True) -> e.RoundTaken:
    return e.RoundTaken("f", at_round, taken, "" if taken else "late")


def test_a_client_joins_trains_hears_that_it_was_taken_evaluates_and_trains_again() -> None:
    rounds = (train(0), trained(0), settled(0), evaluate(1), assessed(1), train(1))
    state, todo = told(Session(), *JOINED, *rounds)
    assert todo == [
        do.JoinFederation("f", 1, "work"),
        do.Send("loaded"),
        do.TrainLocally("f", 0, "order 0"),
        do.Send("update 0"),
        do.SettleRound("f", 0, True),
        do.EvaluateLocally("f", 1, "model 1"),
        do.Send("tested 1"),
        do.TrainLocally("f", 1, "order 1"),
    ]
    assert (state.phase, state.step, state.version) == (Phase.TRAINING_ROUND, 1, 1)


def test_asked_again_for_a_round_it_answers_without_training_twice() -> None:
    state, _ = told(Session(), *JOINED, train(0))
    _, todo = told(state, train(0))
    assert todo == []  # still at it
    state, todo = told(state, trained(0), train(0))
    assert todo == [do.Send("update 0"), do.Send("update 0")]
    state, todo = told(state, *AGAIN, e.Participate("f", 1, "work"), train(0))
    assert todo[1:] == [do.Send("update 0"), do.Send("loaded"), do.Send("update 0")]
    state, todo = told(state, settled(0), evaluate(1), assessed(1), evaluate(1))
    assert todo[-2:] == [do.Send("tested 1"), do.Send("tested 1")]


def test_a_round_that_is_repeated_after_its_update_was_not_taken_is_trained_again() -> None:
    state, _ = told(Session(), *JOINED, train(0), trained(0), settled(0, taken=False))
    _, todo = told(state, train(0))
    assert todo == [do.TrainLocally("f", 0, "order 0")]


def test_a_round_that_closes_without_this_client_stops_its_training_at_once() -> None:
    state, _ = told(Session(), *JOINED, train(0))
    state, todo = told(state, settled(0, taken=False))
    assert todo == [do.Interrupt("round 0 was closed: late"), do.SettleRound("f", 0, False)]
    assert state.phase is Phase.ENROLLED
    _, todo = told(state, trained(0))
    assert todo == []


def test_a_later_order_replaces_the_one_under_way_and_an_earlier_one_does_not() -> None:
    state, _ = told(Session(), *JOINED, train(3))
    late, todo = told(state, train(2), evaluate(3))
    assert todo == []
    assert late.ignored == state.ignored + 2
    state, todo = told(state, evaluate(4))
    assert todo == [do.Interrupt("round 3 is closed"), do.EvaluateLocally("f", 4, "model 4")]
    _, todo = told(state, train(4))
    assert todo == [do.Interrupt("round 4 begins"), do.TrainLocally("f", 4, "order 4")]


def test_the_word_on_an_update_counts_whenever_it_comes() -> None:
    state, _ = told(Session(), *JOINED, train(0), trained(0), evaluate(1))
    state, todo = told(state, settled(0))
    assert todo == [do.SettleRound("f", 0, True)]
    assert state.phase is Phase.EVALUATING_ROUND
    assert not any(kept.kind is Kind.UPDATE for kept in state.unacknowledged)
    _, todo = told(state, settled(0))
    assert todo == [do.SettleRound("f", 0, True)]  # the store knows that it is settled


def test_failures_are_said_with_what_was_done_and_the_client_stays_unless_it_could_not_load() -> None:
    state, _ = told(Session(), *JOINED, train(0))
    state, todo = told(state, e.TurnBroke("f", 0, "train", "the loss is nan"))
    assert todo == [do.Send(do.ClientFailed("f", 0, "the loss is nan", "train"))]
    _, todo = told(state, train(1))
    assert todo == [do.TrainLocally("f", 1, "order 1")]
    state, _ = told(Session(), *JOINED[:2])
    state, todo = told(state, e.TurnBroke("f", 0, "load", "no data set"))
    assert todo == [do.Send(do.ClientFailed("f", 0, "no data set", "load"))]
    assert state.phase is Phase.FAILED
    _, todo = told(state, e.Participate("f", 1, "again"))
    assert todo == [do.DropStage("f", 1, "replaced by f version 1"), do.JoinFederation("f", 1, "again")]


def test_release_and_leaving_stop_everything_of_the_job() -> None:
    state, _ = told(Session(), *JOINED, train(0))
    released, todo = told(state, e.Release("f", 1, "the job is over"))
    assert todo == [do.DropStage("f", 1, "the job is over")]
    assert (released.phase, released.job, released.unacknowledged) == (Phase.IDLE, "", ())
    _, todo = told(state, e.LeaveAsked("bye"))
    assert todo[0] == do.DropStage("f", 1, "bye")
    _, todo = told(released, train(1), settled(0))
    assert todo == []


def test_a_plan_replaces_a_federated_job_and_the_other_way_round() -> None:
    state, _ = told(Session(), *JOINED)
    state, todo = told(state, e.Assign("j", 4, frozenset(), 0, "stage"))
    assert todo == [do.DropStage("f", 1, "replaced by j version 4"), do.LoadStage("j", 4, "stage")]
    _, todo = told(state, e.Participate("f", 1, "work"))
    assert todo == [do.DropStage("j", 4, "replaced by f version 1"), do.JoinFederation("f", 1, "work")]


EVENTS = st.one_of(
    st.sampled_from([*AGAIN, e.Participate("f", 1, "work"), e.Joined("f", 1, "loaded")]),
    st.integers(0, 3).flatmap(
        lambda r: st.sampled_from(
            [train(r), evaluate(r), trained(r), assessed(r), settled(r), settled(r, taken=False)]
        )
    ),
    st.sampled_from([e.Release("f", 1, "over"), e.TurnBroke("f", 1, "train", "nan")]),
)


@given(st.lists(EVENTS, max_size=40))
@settings(max_examples=300, deadline=None)
def test_no_order_of_events_breaks_the_session_or_lets_answers_pile_up(events: list[e.Event]) -> None:
    state, _ = told(Session(), *JOINED)
    running = ""
    for event in events:
        state, todo = handle(state, event)
        for instruction in todo:
            if isinstance(instruction, do.TrainLocally | do.EvaluateLocally):
                assert running == "", "two orders at once"
                running = "busy"
            elif isinstance(instruction, do.Interrupt | do.DropStage):
                running = ""
        if state.phase not in (Phase.TRAINING_ROUND, Phase.EVALUATING_ROUND):
            running = ""
        assert len(state.unacknowledged) <= 3


def test_other_clients_of_the_same_round_replace_those_in_training_and_are_answered_apart() -> None:
    first, second = e.TrainRound("f", 0, "order a", "a"), e.TrainRound("f", 0, "order b", "b")
    state, _ = told(Session(), *JOINED, first)
    assert told(state, first)[1] == []  # still at it
    other, todo = told(state, second)
    assert todo == [do.Interrupt("round 0 begins"), do.TrainLocally("f", 0, "order b")]
    late = e.UpdateStored("f", 0, "sum a", "a")
    assert told(other, late)[1] == []  # its training was stopped
    state, todo = told(state, late, first)
    assert todo == [do.Send("sum a"), do.Send("sum a")]
    state, todo = told(state, second, e.UpdateStored("f", 0, "sum b", "b"))
    assert todo == [do.TrainLocally("f", 0, "order b"), do.Send("sum b")]
    _, todo = told(state, e.RoundTaken("f", 0, True, "", ("c1", "c2")))
    assert todo == [do.SettleRound("f", 0, True, ("c1", "c2"))]
