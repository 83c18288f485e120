"""An asynchronous job's machine: places are filled at once, nobody is waited for, each update counts once."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.federated import Federated
from atoll.job import TrainingSpec
from coordinator.federated import flow
from coordinator.federated import state as fed
from coordinator.federated.checks import check_federated
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import RoundClosed, RoundEvaluated, UpdateTaken
from coordinator.messages.jobs import Phase
from tests.coordinator.federated.lone_machine import LoneMachine, spec, update

NAMES = tuple("abcdef")


def made(rounds: int = 3, **options: Any) -> LoneMachine:
    return LoneMachine(spec(rounds, **{"buffer": 2, "evaluate_every": 0, **options}))


def answers(world: LoneMachine, *names: str) -> None:
    for name in names:
        world.says(name, update(name, world.state.flights[name].round))


def test_a_place_is_filled_at_once_and_a_slow_client_blocks_nobody() -> None:
    world = made(rounds=10, clients=3)
    world.begin(*NAMES)
    slow = min(world.state.flights)
    assert len(world.state.flights) == 3
    while world.state.phase is Phase.TRAINING:
        quick = next(name for name in world.state.flights if name != slow)
        answers(world, quick)
        assert world.state.ended or len(world.state.flights) == 3
    assert (world.state.phase, world.state.round) == (Phase.FINISHED, 10)
    assert len(world.heard(slow, do.TrainRound)) == 1
    assert all(slow not in fact.participants for fact in world.facts(RoundClosed))


def test_an_update_is_taken_at_once_and_after_the_journal_has_it() -> None:
    world = made()
    world.begin("a", "b", "c")
    todo = world.says("a", update("a", 0))
    kinds = [type(getattr(item, "message", getattr(item, "fact", item))) for item in todo]
    assert kinds.index(UpdateTaken) < kinds.index(do.RoundTaken)
    assert world.heard("a", do.RoundTaken) == [do.RoundTaken("job-1", 0, True)]
    assert world.state.round == 0  # and the sum waits for another


def test_a_fast_client_has_one_update_in_a_sum() -> None:
    world = made(buffer=3)
    world.begin("a", "b", "c", "d")
    answers(world, "a")
    assert len(world.heard("a", do.TrainRound)) == 1  # until its update is summed
    answers(world, "b", "c")
    assert world.state.round == 1
    assert [order.round for order in world.heard("a", do.TrainRound)] == [0, 1]


def test_an_old_update_counts_less_and_a_too_old_one_not_at_all() -> None:
    world = made(rounds=9, clients=3, max_staleness=2, staleness=1.0)
    world.begin("a", "b", "c")
    for _ in range(2):
        answers(world, "a", "b")
    answers(world, "c", "a")
    asked = [item for item in world.todo if isinstance(item, do.AggregateRound)]
    assert dict(asked[-1].weights) == {"c": 1 / 3}
    assert asked[-1].bases == {}  # fedavg adds changes
    closed = world.facts(RoundClosed)[-1]
    assert {name: entry["staleness"] for name, entry in closed.participants.items()} == {"a": 0, "c": 2}
    for _ in range(3):
        answers(world, "a", "b")
    answers(world, "c")
    (*_, word) = world.heard("c", do.RoundTaken)
    assert not word.taken
    assert "its model is 3 models old, at most 2 may be" in word.reason
    assert world.state.clients["c"].strikes == 0


def test_fedasync_gets_the_broadcast_that_an_update_began_with() -> None:
    world = made(rounds=9, buffer=1, strategy="fedasync")
    world.begin("a", "b")
    answers(world, "a", "b")
    asked = [item for item in world.todo if isinstance(item, do.AggregateRound)]
    assert asked[0].bases == {}
    assert asked[1].bases == {"b": world.model(0).hash}
    assert asked[1].weights == {"b": 2**-0.5}


def test_what_comes_during_a_sum_belongs_to_the_next() -> None:
    world = made()
    world.begin("a", "b", "c", "d")
    world.aggregator = False
    answers(world, "a", "b")
    assert world.state.phase is Phase.AGGREGATING
    answers(world, "c")
    assert set(world.state.updates) == {"a", "b", "c"}
    state = ev.Blob("5" * 64, 10)
    world.step(ev.Aggregated("job-1", 0, world.state.attempt, state, world.model(1)))
    assert (world.state.round, set(world.state.updates)) == (1, {"c"})
    assert set(world.state.flights) == {"a", "b", "d"}
    assert set(world.ledger.jobs["job-1"].waiting) == {"c"}


def test_too_few_clients_for_the_buffer_do_not_stall() -> None:
    world = made(buffer=5, min_clients=2)
    world.begin("a", "b", "c")
    answers(world, "a", "b")
    assert world.state.round == 0  # c trains
    world.step(fed.ClientLost("c", "its connection is closed"))
    assert world.state.round == 1
    world.step(fed.ClientLost("b", "its connection is closed"))
    assert world.state.round == 1
    answers(world, "a")
    assert world.state.phase is Phase.GATHERING
    assert set(world.state.updates) == {"a"}  # it waits
    world.step(fed.Invited("b", 100))
    world.says("b", ev.Loaded("job-1", 1))
    answers(world, "b")
    assert world.state.round == 2


def test_a_late_client_is_let_go_and_may_begin_anew() -> None:
    world = made(rounds=9, clients=2, deadline_s=50.0)
    world.begin("a", "b")
    world.now_s += 20.0
    answers(world, "a")
    world.wait(31.0)
    late = [item for item in world.todo if isinstance(item, fed.Without)]
    assert [(item.worker, item.reason) for item in late] == [("b", "late: no update within 50 s")]
    assert [word.taken for word in world.heard("b", do.RoundTaken)] == [False]  # which ends its training
    assert world.state.round == 1  # of the update that is here: nobody else could send another
    assert [order.round for order in world.heard("b", do.TrainRound)] == [0, 1]
    world.says("b", update("b", 0))
    world.says("b", update("b", 1))
    world.says("b", update("b", 1))
    assert [(fact.worker, fact.update.round) for fact in world.facts(UpdateTaken)] == [("a", 0), ("b", 1)]


def test_idle_clients_evaluate_while_others_train() -> None:
    world = made(rounds=4, clients=2, evaluate_every=1)
    world.begin("a", "b", "c", "d")
    first = tuple(world.state.flights)
    answers(world, *first)
    assert world.state.round == 1
    assert world.state.phase is Phase.TRAINING
    asked = set(world.state.asked)
    assert asked
    assert not asked & set(world.state.flights)
    for name in sorted(asked):
        world.says(name, ev.ClientEvaluated("job-1", 1, 10, 2.0, {"accuracy": 0.5}))
    (found,) = world.facts(RoundEvaluated)
    assert (found.round, found.loss) == (1, 2.0)
    while not world.state.ended:
        for name in sorted(world.state.asked):
            world.says(name, ev.ClientEvaluated("job-1", world.state.asked_round, 10, 1.0, {}))
        if world.state.flights:
            answers(world, *list(world.state.flights)[:1])
    assert world.state.phase is Phase.FINISHED
    assert world.facts(RoundEvaluated)[-1].round == 4


def test_a_bad_update_costs_its_client_and_the_others_are_summed_with_the_next() -> None:
    world = made(buffer=2, min_clients=2)
    world.bad = {"a"}
    world.begin("a", "b", "c")
    answers(world, "a", "b")
    assert world.state.round == 0
    assert set(world.state.updates) == {"b"}
    answers(world, "c")
    world.wait(1.0)
    assert world.state.round == 1
    assert world.state.clients["a"].strikes == 1


@pytest.mark.parametrize("age", [0, 1])
def test_updates_outlive_a_restart(age: int) -> None:
    world = made(rounds=9, clients=2)
    world.begin("a", "b", "c")
    for _ in range(age):
        answers(world, *list(world.state.flights))
    waits = next(iter(world.state.flights))
    answers(world, waits)
    record = world.ledger.jobs["job-1"]
    again = flow.waiting(replace(world.state, updates={}, taken={}), record.waiting.values())
    assert again.updates == world.state.updates
    assert again.taken == world.state.taken
    assert record.blobs >= {taken.update.update for taken in record.waiting.values()}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), buffer=st.integers(1, 4), clients=st.integers(0, 4))
def test_no_order_of_faults_counts_an_update_twice(seed: int, buffer: int, clients: int) -> None:
    draw = random.Random(seed)
    world = made(rounds=6, buffer=buffer, clients=clients, evaluate_every=draw.choice((0, 2)))
    world.begin("a", "b", "c", "d")
    sent: list[tuple[str, ev.UpdateReady]] = []
    for _ in range(400):
        if world.state.ended:
            break
        name = draw.choice("abcd")
        match draw.randrange(9):
            case 0:
                world.step(fed.ClientLost(name, "gone"))
            case 1 | 2:
                world.step(fed.Invited(name, 100))
                world.says(name, ev.Loaded("job-1", 1))
            case 3:
                world.step(fed.ClientBack(name))
                world.says(name, ev.Loaded("job-1", 1))
            case 4 if sent:
                world.says(*draw.choice(sent))
            case 5:
                world.wait(draw.choice((1.0, 70.0)))
            case 6:
                world.step(ev.AggregatorBroke("job-1", "its process ended (-9)"))
            case _:
                if name in world.state.flights:
                    sent.append((name, update(name, world.state.flights[name].round)))
                    world.says(*sent[-1])
                elif name in world.state.asked:
                    told = ev.ClientEvaluated("job-1", world.state.asked_round, 10, 1.0, {})
                    world.says(name, told)
    counted = [
        (name, told["staleness"], fact.round)
        for fact in world.facts(RoundClosed)
        for name, told in fact.participants.items()
    ]
    begun = [(name, at_round - age) for name, age, at_round in counted]
    assert len(begun) == len(set(begun))
    taken = [(fact.worker, fact.update.round) for fact in world.facts(UpdateTaken)]
    waiting = [(name, update.round) for name, update in world.state.updates.items()]
    assert world.state.ended or sorted(taken) == sorted([*begun, *waiting])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"strategy": "qfedavg"}, "reads the state of one round"),
        ({"strategy": "krum"}, "raise buffer to that"),
        ({"selector": "power_of_choice", "clients": 2}, "asks clients for their loss"),
        ({"uplink": "bcrs"}, "waits for nobody"),
    ],
)
def test_what_needs_a_round_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_federated(Federated(buffer=2, **options), TrainingSpec(steps=3, n_micro=1))


def test_a_buffer_below_what_a_data_owner_may_count_on_is_refused() -> None:
    with pytest.raises(UsageError, match="less than min_clients = 2"):
        Federated(buffer=1)
    with pytest.raises(UsageError, match="for an asynchronous job"):
        check_federated(Federated(strategy="fedasync"), TrainingSpec(steps=3, n_micro=1))


def test_a_job_that_waits_names_the_floor_that_keeps_its_clients_out() -> None:
    """`buffer=1, min_clients=1` is below what a data owner demands by default: status tells that, and the way
    on."""
    world = made(buffer=1, min_clients=1)
    world.step(fed.Begin())
    why = (
        "the job's rounds may close with 1 updates, this data owner demands 2; raise the job's "
        "Federated(min_clients=...), or join with --min-clients 1"
    )
    for name in "ab":
        world.step(fed.Invited(name, 100))
        world.says(name, ev.ClientFailed("job-1", 0, why, "load"))
    assert world.state.phase is Phase.GATHERING
    assert world.state.reason.startswith("0 clients are ready, 1 are needed")
    for name in "ab":
        assert f"{name} takes no part: cannot load the job: {why}" in world.state.reason
    world.says("b", ev.Loaded("job-1", 1))
    world.step(fed.Invited("b", 100))
    world.says("b", ev.Loaded("job-1", 1))
    assert world.state.phase is Phase.TRAINING
