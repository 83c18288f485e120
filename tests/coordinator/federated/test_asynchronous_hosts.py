"""Hosts of populations in an asynchronous job: orders of one model, buffers and places counted in clients."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.federated import flow
from coordinator.federated import state as fed
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import RoundClosed, UpdateTaken
from coordinator.messages.jobs import Phase
from tests.coordinator.federated.lone_machine import LoneMachine, name_of, spec

ROSTER = {f"c{n:02d}": 12 + n for n in range(20)}
OTHERS = {f"d{n:02d}": 30 for n in range(6)}
SAME = "f" * 64


def made(*hosts: str, **options: Any) -> LoneMachine:
    """A job whose hosts all speak for the same twenty clients."""
    wanted = {"rounds": 4, "buffer": 6, "clients": 8, "min_clients": 2, "evaluate_every": 0, **options}
    world = LoneMachine(spec(**wanted))
    world.step(fed.Begin())
    for host in hosts:
        world.step(fed.Invited(host, 1000))
    for host in hosts:
        loaded(world, host)
    return world


def loaded(world: LoneMachine, host: str, roster: dict[str, int] | None = None) -> None:
    group = SAME if roster is None else "0" * 64
    world.says(host, ev.Loaded("job-1", 1, population=group, clients=ROSTER if roster is None else roster))


def order(world: LoneMachine, host: str) -> do.TrainRound:
    return world.heard(host, do.TrainRound)[-1]  # type: ignore[no-any-return]


def answer(
    world: LoneMachine, host: str, refused: int = 0, seconds: float = 1.0, stateful: bool = False, **odd: Any
) -> ev.UpdateReady:
    """The answer of an honest host to its last order, all but the first ``refused`` of its clients."""
    asked, members = order(world, host), world.state.clients[host].members
    rows = {c: ev.Row(members[c] - 1, 3, 0.5, 0.25, seconds) for c in asked.clients[refused:]}
    out = dict.fromkeys(asked.clients[:refused], "the loss is nan")
    held = ev.HostRows(rows, out, {"trained": 1}, {"samples": 1}, stateful, order=asked.order)
    blob = name_of(host, asked.round, asked.order) if rows else ""
    figures: dict[str, Any] = {"n_samples": sum(r.n_samples for r in rows.values()), "steps": 3 * len(rows)}
    figures |= {"metrics": {"loss": 0.5}, "host": held} | odd
    return ev.UpdateReady("job-1", asked.round, blob, 40_000, **figures)


def answers(world: LoneMachine, host: str, **options: Any) -> None:
    world.says(host, answer(world, host, **options))


def counted(fact: RoundClosed) -> list[str]:
    return sorted(client for entry in fact.participants.values() for client in entry["clients"])


def sums_of(world: LoneMachine, at: int = -1) -> do.AggregateRound:
    return [item for item in world.todo if isinstance(item, do.AggregateRound)][at]


def test_places_and_buffer_count_clients_and_a_host_has_one_order() -> None:
    world = made("a", "b")
    first, second = order(world, "a"), order(world, "b")
    assert (len(first.clients), len(second.clients)) == (4, 4)  # alike, as nobody was measured
    assert not {*first.clients} & {*second.clients}
    assert (first.drawn, first.drawn_samples) == (16, 512)  # 11 clients with 286 samples, rounded up
    answers(world, "a")
    again = order(world, "a")
    assert again.round == 0
    assert not {*again.clients} & {*first.clients}  # whose updates wait
    answers(world, "b")
    (closed,) = world.facts(RoundClosed)
    assert counted(closed) == sorted({*first.clients, *second.clients})  # 4 are less than the buffer
    assert closed.waits == ()
    assert order(world, "b").round == 1
    answers(world, "a")
    assert not world.facts(RoundClosed)[1:]
    answers(world, "b")
    asked = sums_of(world)
    assert {name.split("/")[0]: held.age for name, held in asked.sums.items()} == {"a": 1, "b": 0}
    assert asked.drawn is not None
    assert asked.drawn.keys() == {client for held in asked.sums.values() for client in held.samples}
    assert asked.drawn.items() <= ROSTER.items()


def test_a_host_waits_for_the_model_that_is_being_made() -> None:
    world = made("a", "b")
    world.aggregator = False
    answers(world, "a")
    answers(world, "a")
    assert world.state.phase is Phase.AGGREGATING
    assert set(world.state.flights) == {"b"}
    world.step(ev.Aggregated("job-1", 0, world.state.attempt, ev.Blob("5" * 64, 10), world.model(1)))
    assert {name: flight.round for name, flight in world.state.flights.items()} == {"a": 1, "b": 0}


def test_a_straggling_host_blocks_nobody_and_its_clients_go_to_others_after_its_deadline() -> None:
    world = made("a", "b", rounds=20, deadline_s=50.0)
    stuck = order(world, "b").clients
    for _ in range(8):
        answers(world, "a")
    assert world.state.round == 4
    assert len(world.heard("b", do.TrainRound)) == 1
    assert not any({*stuck} & {*counted(fact)} for fact in world.facts(RoundClosed))
    world.now_s += 51.0
    late = answer(world, "b")
    world.says("a", answer(world, "a"))
    world.step(fed.Tick())
    word = world.heard("b", do.RoundTaken)[0]
    assert (word.taken, word.order) == (False, late.order)
    done = world.state.round
    world.says("b", late)
    assert not any(fact.worker == "b" and fact.update.round == 0 for fact in world.facts(UpdateTaken))
    for _ in range(12):
        answers(world, "a")
    assert world.state.round > done
    assert {*stuck} & {client for fact in world.facts(RoundClosed) for client in counted(fact)}


def test_a_slow_hosts_orders_are_smaller_so_that_they_take_as_long() -> None:
    world = made("a", "b", rounds=50, clients=12, buffer=12)
    for _ in range(6):
        answers(world, "a", seconds=0.1)
        answers(world, "b", seconds=1.0)
    share = flow.shares(world.state)
    assert share == {"a": 11, "b": 1}


def test_a_fast_hosts_clients_are_at_most_once_in_a_sum() -> None:
    world = made("a", rounds=9, buffer=8, clients=0)
    world.step(fed.Invited("z", 1000))
    loaded(world, "z", OTHERS)
    for _ in range(20):
        if not world.state.ended and "z" in world.state.flights:
            answers(world, "z")
    assert world.state.round == 0  # six clients of its own do not fill the buffer alone
    assert len(world.facts(UpdateTaken)) == 1
    answers(world, "a")
    assert world.state.round == 1


def test_an_order_is_answered_once_and_a_repeat_gets_the_same_word() -> None:
    world = made("a", "b")
    sent = answer(world, "a")
    world.says("a", sent)
    word = world.heard("a", do.RoundTaken)[-1]
    assert (word.taken, word.order, {*word.clients}) == (True, sent.order, {*(sent.host or _none()).rows})
    world.says("a", sent)  # though it has another order of the same model by now
    assert world.heard("a", do.RoundTaken)[-1] == word
    assert len(world.facts(UpdateTaken)) == 1
    assert "a" in world.state.flights
    kinds = [
        type(item.fact if hasattr(item, "fact") else getattr(item, "message", item)) for item in world.todo
    ]
    assert kinds.index(UpdateTaken) < kinds.index(do.RoundTaken)


def _none() -> ev.HostRows:
    return ev.HostRows({}, {}, {}, {})


def test_clients_that_a_host_refuses_wait_for_the_next_model_and_the_others_count() -> None:
    world = made("a", "b")
    bad = order(world, "a").clients[0]
    answers(world, "a", refused=1)
    assert world.state.dropped == {bad: "the loss is nan"}
    assert bad not in order(world, "a").clients
    answers(world, "b")
    (closed,) = world.facts(RoundClosed)
    assert bad not in counted(closed)
    assert dict(closed.dropped) == {bad: "the loss is nan"}
    none = len(order(world, "b").clients)
    answers(world, "b", refused=none)
    assert world.heard("b", do.RoundTaken)[-1].taken is False
    assert len(world.facts(UpdateTaken)) == 2


@pytest.mark.parametrize(
    "odd",
    [{"n_samples": 10**6}, {"steps": 0}, {"host": ev.HostRows({"z": ev.Row(1, 1, 0, 0, 0)}, {}, {}, {})}],
)
def test_an_impossible_answer_counts_nobody(odd: dict[str, Any]) -> None:
    world = made("a", "b")
    sent = answer(world, "a", **{name: value for name, value in odd.items() if name != "host"})
    if "host" in odd:
        sent = replace(sent, host=replace(odd["host"], order=order(world, "a").order))
    world.says("a", sent)
    assert not world.facts(UpdateTaken)
    assert not world.heard("a", do.RoundTaken)[-1].taken
    assert world.state.clients["a"].strikes == 1


def test_a_sum_that_cannot_be_added_costs_its_host_a_model_and_its_clients_nothing() -> None:
    world = made("a", "b", buffer=6)
    clients = order(world, "a").clients
    answers(world, "a")
    world.bad = {fact.name for fact in world.facts(UpdateTaken)}
    answers(world, "b")
    assert world.state.clients["a"].strikes == 1
    (closed,) = world.facts(RoundClosed)
    assert set(closed.participants) == {"b"}
    assert not {*clients} & {*counted(closed)}
    assert world.ledger.jobs["job-1"].waiting == world.state.taken == {}
    assert "a" in world.state.flights  # whose clients train the new model


def test_a_worker_with_data_of_its_own_is_a_host_of_one() -> None:
    world = made("a", clients=0, buffer=5)
    world.step(fed.Invited("own", 100))
    world.says("own", ev.Loaded("job-1", 1))
    assert order(world, "own").clients == ("own",)
    rows = {"own": ev.Row(90, 3, 0.5, 0.25, 1.0)}
    held = ev.HostRows(rows, {}, {"trained": 1}, {"samples": 1}, order=order(world, "own").order)
    world.says("own", ev.UpdateReady("job-1", 0, name_of("own"), 9, 90, 3, metrics={"loss": 1.0}, host=held))
    answers(world, "a")
    (closed,) = world.facts(RoundClosed)
    assert "own" in counted(closed)


def test_an_update_of_before_the_first_host_came_is_summed_with_those_of_hosts() -> None:
    world = LoneMachine(spec(4, buffer=6, min_clients=2, evaluate_every=0))
    world.begin("own", "second")
    sent = ev.UpdateReady("job-1", 0, name_of("own"), 40_000, 90, 3, metrics={"loss": 0.5})
    world.says("own", sent)
    world.step(fed.Invited("a", 1000))
    loaded(world, "a")
    answers(world, "a")
    asked = sums_of(world, 0)
    assert set(asked.updates) == {"own"}
    assert asked.drawn is not None
    assert asked.drawn["own"] == 100
    assert len(asked.sums) == 1


def test_states_stay_with_their_host_and_begin_anew_where_that_is_gone_for_long() -> None:
    world = made("a", "b", rounds=30, clients=20, buffer=20, deadline_s=600.0)
    for host in ("a", "b"):
        answers(world, host, stateful=True)
    homes = dict(world.state.homes)
    assert set(homes) == set(ROSTER)
    assert {homes[client] for client in order(world, "a").clients} == {"a"}
    world.step(fed.ClientLost("b", "gone"))
    answers(world, "a", stateful=True)
    assert world.state.round == 1  # ten of twenty: the others may come back
    world.wait(61.0)
    assert {homes[client] for client in order(world, "a").clients} == {"b"}
    answers(world, "a", stateful=True)
    assert world.state.round == 2
    assert set(world.state.homes.values()) == {"a"}


def test_hosts_sums_outlive_a_restart() -> None:
    world = made("a", "b", rounds=9)
    for host in ("a", "b", "a"):
        answers(world, host, stateful=True)
    record = world.ledger.jobs["job-1"]
    bare = replace(world.state, updates={}, taken={}, answered={}, homes={})
    again = flow.waiting(bare, record.waiting.values())
    assert again.updates == world.state.updates
    assert again.taken == world.state.taken
    assert again.answered["a"] == world.state.answered["a"]
    assert again.homes.items() <= world.state.homes.items()
    assert record.blobs >= {taken.update.update for taken in record.waiting.values()}


def test_the_grid_is_that_of_a_round_of_everybody_and_stays_while_hosts_of_the_same_clients_come() -> None:
    world = made("a", clients=0, buffer=20)
    asked = order(world, "a")
    total = sum(ROSTER.values())
    assert (asked.drawn, asked.drawn_samples) == (32, 1 << (total - 1).bit_length())
    world.step(fed.Invited("b", 1000))
    loaded(world, "b")
    assert flow.grid_of(world.state) == (asked.drawn, asked.drawn_samples)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), buffer=st.integers(2, 9), clients=st.integers(0, 12))
def test_no_order_of_faults_counts_a_client_twice_for_one_model(seed: int, buffer: int, clients: int) -> None:
    draw = random.Random(seed)
    world = made("a", "b", rounds=6, buffer=buffer, clients=clients, evaluate_every=draw.choice((0, 2)))
    sent: list[tuple[str, ev.UpdateReady]] = []
    for _ in range(300):
        if world.state.ended:
            break
        name = draw.choice("abz")
        match draw.randrange(10):
            case 0:
                world.step(fed.ClientLost(name, "gone"))
            case 1 | 2:
                world.step(fed.Invited(name, 1000))
                loaded(world, name, OTHERS if name == "z" else None)
            case 3:
                world.step(fed.ClientBack(name))
                if name in world.state.clients:
                    loaded(world, name, OTHERS if name == "z" else None)
            case 4 if sent:
                world.says(*draw.choice(sent))
            case 5:
                world.wait(draw.choice((1.0, 70.0)))
            case 6:
                world.step(ev.AggregatorBroke("job-1", "its process ended (-9)"))
            case _:
                if name in world.state.flights:
                    asked = order(world, name)
                    bad = draw.choice((0, 0, 0, 1, len(asked.clients)))
                    sent.append((name, answer(world, name, bad, stateful=seed % 2 == 0)))
                    world.says(*sent[-1])
                elif name in world.state.asked:
                    told = ev.ClientEvaluated("job-1", world.state.asked_round, 10, 1.0, {})
                    world.says(name, told)
        trains = [c for flight in world.state.flights.values() for c in flight.clients]
        waits = [c for fact in world.state.taken.values() for c in fact.members]
        assert len({*trains, *waits}) == len(trains) + len(waits)
        assert world.state.ended or set(world.ledger.jobs["job-1"].waiting) == set(world.state.taken)
    asked_for = {item.round: item for item in world.todo if isinstance(item, do.AggregateRound)}
    begun = [
        (client, at_round - held.age)
        for at_round, item in asked_for.items()
        if at_round < world.state.round
        for held in item.sums.values()
        for client in held.samples
    ]
    assert len(begun) == len(set(begun))
    for fact in world.facts(RoundClosed):
        clients_of = counted(fact)
        assert len(clients_of) == len(set(clients_of)) < 2 * buffer
        assert len(clients_of) >= min(2, buffer)
    taken = [(c, f.update.round) for f in world.facts(UpdateTaken) for c in f.members]
    assert len(taken) == len(set(taken))
    waiting = [(c, f.update.round) for f in world.state.taken.values() for c in f.members]
    assert world.state.ended or sorted(taken) == sorted([*begun, *waiting])
    assert world.state.phase is not Phase.FAILED or world.state.reason.startswith("the aggregator failed")
