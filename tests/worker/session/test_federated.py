"""A federated job in the worker's session: each round answered once, whatever is lost or said twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.messages.from_worker import HostRows
from atoll.messages.to_worker import Blob, Model
from atoll.secure import Stage
from protos import atoll_control_pb2 as pb
from tests.worker.session.test_machine import told
from worker.session import events as e
from worker.session import instructions as do
from worker.session.machine import Phase, Session, handle
from worker.session.state import Kind

MODEL = Model(Blob("a" * 64, 10))
INVITED = e.Participate("f", 1, pb.Participate())
JOINED: tuple[e.Event, ...] = (
    e.Welcome("w-a", 0.5),
    INVITED,
    e.Loaded("f", 1),
)
AGAIN: tuple[e.Event, ...] = (e.Disconnected("reset", 0.0), e.Welcome("w-a", 0.5))


def train(at_round: int, order: str = "") -> e.TrainRound:
    return e.TrainRound("f", at_round, MODEL, "none", 1.0, 60.0, 7, order)


def evaluate(at_round: int) -> e.EvaluateRound:
    return e.EvaluateRound("f", at_round, MODEL, 60.0)


def trained(at_round: int, order: str = "") -> e.UpdateReady:
    host = HostRows({}, {}, {}, {}, order=order) if order else None
    return e.UpdateReady("f", at_round, "a" * 64, 10, 5, 1, host=host)


def assessed(at_round: int) -> e.ClientEvaluated:
    return e.ClientEvaluated("f", at_round, 10, 1.0)


def settled(at_round: int, taken: bool = True, order: str = "") -> e.RoundTaken:
    return e.RoundTaken("f", at_round, taken, "" if taken else "late", order=order)


def test_a_client_joins_trains_hears_that_it_was_taken_evaluates_and_trains_again() -> None:
    rounds = (train(0), trained(0), settled(0), evaluate(1), assessed(1), train(1))
    state, todo = told(Session(), *JOINED, *rounds)
    assert todo == [
        INVITED,
        do.Send(e.Loaded("f", 1)),
        train(0),
        do.Send(trained(0)),
        settled(0),
        evaluate(1),
        do.Send(assessed(1)),
        train(1),
    ]
    assert (state.phase, state.step, state.version) == (Phase.TRAINING_ROUND, 1, 1)


def test_asked_again_for_a_round_it_answers_without_training_twice() -> None:
    state, _ = told(Session(), *JOINED, train(0))
    _, todo = told(state, train(0))
    assert todo == []  # still at it
    state, todo = told(state, trained(0), train(0))
    assert todo == [do.Send(trained(0)), do.Send(trained(0))]
    state, todo = told(state, *AGAIN, INVITED, train(0))
    assert todo[1:] == [do.Send(trained(0)), do.Send(e.Loaded("f", 1)), do.Send(trained(0))]
    state, todo = told(state, settled(0), evaluate(1), assessed(1), evaluate(1))
    assert todo[-2:] == [do.Send(assessed(1)), do.Send(assessed(1))]


def test_a_repeated_word_on_one_order_ends_no_other_of_the_same_model() -> None:
    state, _ = told(Session(), *JOINED, train(0, "one"), trained(0, "one"), settled(0, order="one"))
    state, todo = told(state, train(0, "two"), settled(0, order="one"))
    assert todo == [train(0, "two"), settled(0, order="one")]
    assert state.phase is Phase.TRAINING_ROUND
    state, _ = told(state, trained(0, "two"), settled(0, order="one"))
    _, todo = told(state, *AGAIN)
    assert do.Send(trained(0, "two")) in todo
    state, todo = told(state, train(0, "three"), settled(0, taken=False, order="three"))
    assert state.phase is Phase.ENROLLED
    assert do.Interrupt("round 0 was closed: late") in todo


def test_a_round_that_is_repeated_after_its_update_was_not_taken_is_trained_again() -> None:
    state, _ = told(Session(), *JOINED, train(0), trained(0), settled(0, taken=False))
    _, todo = told(state, train(0))
    assert todo == [train(0)]


def test_a_round_that_closes_without_this_client_stops_its_training_at_once() -> None:
    state, _ = told(Session(), *JOINED, train(0))
    state, todo = told(state, settled(0, taken=False))
    assert todo == [do.Interrupt("round 0 was closed: late"), settled(0, taken=False)]
    assert state.phase is Phase.ENROLLED
    _, todo = told(state, trained(0))
    assert todo == []


def test_a_later_order_replaces_the_one_under_way_and_an_earlier_one_does_not() -> None:
    state, _ = told(Session(), *JOINED, train(3))
    late, todo = told(state, train(2), evaluate(3))
    assert todo == []
    assert late.ignored == state.ignored + 2
    state, todo = told(state, evaluate(4))
    assert todo == [do.Interrupt("round 3 is closed"), evaluate(4)]
    _, todo = told(state, train(4))
    assert todo == [do.Interrupt("round 4 begins"), train(4)]


def test_the_word_on_an_update_counts_whenever_it_comes() -> None:
    state, _ = told(Session(), *JOINED, train(0), trained(0), evaluate(1))
    state, todo = told(state, settled(0))
    assert todo == [settled(0)]
    assert state.phase is Phase.EVALUATING_ROUND
    assert not any(kept.kind is Kind.UPDATE for kept in state.unacknowledged)
    _, todo = told(state, settled(0))
    assert todo == [settled(0)]  # the store knows that it is settled


def test_failures_are_said_with_what_was_done_and_the_client_stays_unless_it_could_not_load() -> None:
    state, _ = told(Session(), *JOINED, train(0))
    state, todo = told(state, do.ClientFailed("f", 0, "the loss is nan", "train"))
    assert todo == [do.Send(do.ClientFailed("f", 0, "the loss is nan", "train"))]
    _, todo = told(state, train(1))
    assert todo == [train(1)]
    state, _ = told(Session(), *JOINED[:2])
    state, todo = told(state, do.ClientFailed("f", 0, "no data set", "load"))
    assert todo == [do.Send(do.ClientFailed("f", 0, "no data set", "load"))]
    assert state.phase is Phase.FAILED
    _, todo = told(state, INVITED)
    assert todo == [e.Release("f", 1, "replaced by f version 1"), INVITED]


def test_release_and_leaving_stop_everything_of_the_job() -> None:
    state, _ = told(Session(), *JOINED, train(0))
    released, todo = told(state, e.Release("f", 1, "the job is over"))
    assert todo == [e.Release("f", 1, "the job is over")]
    assert (released.phase, released.job, released.unacknowledged) == (Phase.IDLE, "", ())
    _, todo = told(state, e.LeaveAsked("bye"))
    assert todo[0] == e.Release("f", 1, "bye")
    _, todo = told(released, train(1), settled(0))
    assert todo == []


def test_a_plan_replaces_a_federated_job_and_the_other_way_round() -> None:
    state, _ = told(Session(), *JOINED)
    assigned = e.Assign("j", 4, (), 0, pb.Assign())
    state, todo = told(state, assigned)
    assert todo == [e.Release("f", 1, "replaced by j version 4"), assigned]
    _, todo = told(state, INVITED)
    assert todo == [e.Release("j", 4, "replaced by f version 1"), INVITED]


EVENTS = st.one_of(
    st.sampled_from([*AGAIN, INVITED, e.Loaded("f", 1)]),
    st.integers(0, 3).flatmap(
        lambda r: st.sampled_from(
            [train(r), evaluate(r), trained(r), assessed(r), settled(r), settled(r, taken=False)]
        )
    ),
    st.sampled_from([e.Release("f", 1, "over"), do.ClientFailed("f", 1, "nan", "train")]),
)


@given(st.lists(EVENTS, max_size=40))
@settings(max_examples=300, deadline=None)
def test_no_order_of_events_breaks_the_session_or_lets_answers_pile_up(events: list[e.Event]) -> None:
    state, _ = told(Session(), *JOINED)
    running = ""
    for event in events:
        state, todo = handle(state, event)
        for instruction in todo:
            if isinstance(instruction, e.TrainRound | e.EvaluateRound):
                assert running == "", "two orders at once"
                running = "busy"
            elif isinstance(instruction, do.Interrupt | e.Release):
                running = ""
        if state.phase not in (Phase.TRAINING_ROUND, Phase.EVALUATING_ROUND):
            running = ""
        assert len(state.unacknowledged) <= 3


def test_other_clients_of_the_same_round_replace_those_in_training_and_are_answered_apart() -> None:
    first, second = train(0, "a"), train(0, "b")
    state, _ = told(Session(), *JOINED, first)
    assert told(state, first)[1] == []  # still at it
    other, todo = told(state, second)
    assert todo == [do.Interrupt("round 0 begins"), second]
    late = trained(0, "a")
    assert told(other, late)[1] == []  # its training was stopped
    state, todo = told(state, late, first)
    assert todo == [do.Send(late), do.Send(late)]
    state, todo = told(state, second, trained(0, "b"))
    assert todo == [second, do.Send(trained(0, "b"))]
    settle = e.RoundTaken("f", 0, True, "", ("c1", "c2"))
    assert told(state, settle)[1] == [settle]


def secured(at_round: int, exchange: str, stage: Stage) -> e.SecureOrder:
    return e.SecureOrder("f", at_round, exchange, stage)


def masked(at_round: int, exchange: str) -> e.UpdateReady:
    return e.UpdateReady("f", at_round, "a" * 64, 10, 5, 1, exchange=exchange)


def test_a_member_is_asked_and_answers_beside_its_training() -> None:
    answer = e.SecureAnswer("f", 0, "x", Stage.KEYS)
    orders = [secured(0, "x", stage) for stage in (Stage.KEYS, Stage.SHARES)]
    after = [secured(0, "x", stage) for stage in (Stage.SIGNATURES, Stage.ANSWERS)]
    state, todo = told(
        Session(), *JOINED, orders[0], answer, orders[1], train(0, "x"), masked(0, "x"), *after
    )
    assert state.phase is Phase.ENROLLED
    assert todo[2:] == [orders[0], do.Send(answer), orders[1], train(0, "x"), do.Send(masked(0, "x")), *after]


def test_keys_for_a_new_attempt_end_the_training_for_the_one_before() -> None:
    again = secured(0, "y", Stage.KEYS)
    state, todo = told(
        Session(), *JOINED, train(0, "x"), again, masked(0, "x"), train(0, "y"), masked(0, "y")
    )
    assert todo[3:] == [
        do.Interrupt("round 0 starts again"),
        again,
        train(0, "y"),
        do.Send(masked(0, "y")),
    ]
    assert state.ignored == 1  # the update of the first attempt
