"""A population's rounds in the machine: who trains whom, whose sums count, and what a lost host costs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from coordinator.federated import state as fed
from coordinator.federated.population import STATES_WAIT_S
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import RoundClosed
from coordinator.messages.jobs import Phase
from tests.coordinator.federated.lone_machine import LoneMachine, name_of, spec

ROSTER = {f"c{n:02d}": 12 + n for n in range(20)}
SAME = "f" * 64


def world(*hosts: str, **options: Any) -> LoneMachine:
    """A job whose hosts all speak for the same twenty clients."""
    made = LoneMachine(spec(**{"rounds": 2, "clients": 8, "evaluate_every": 0, **options}))
    made.step(fed.Begin())
    for host in hosts:
        made.step(fed.Invited(host, 1000))
    for host in hosts:
        made.says(host, ev.Loaded("job-1", 1, population=SAME, clients=ROSTER))
    return made


def order(made: LoneMachine, host: str) -> do.TrainRound:
    """The last order that a host was given."""
    return made.heard(host, do.TrainRound)[-1]  # type: ignore[no-any-return]


def answer(made: LoneMachine, host: str, stateful: bool = False, **odd: Any) -> ev.UpdateReady:
    """The answer of an honest host to its last order."""
    asked = order(made, host)
    rows = {c: ev.Row(ROSTER[c] - 1, 3, 0.5, 0.25, 0.1 * ROSTER[c]) for c in asked.clients}
    held = ev.HostRows(rows, {}, {"trained": 1}, {"samples": 1}, stateful)
    figures: dict[str, Any] = {"n_samples": sum(r.n_samples for r in rows.values()), "steps": 3 * len(rows)}
    figures |= {"metrics": {"loss": 0.5}, "host": held} | odd
    return ev.UpdateReady("job-1", asked.round, name_of(host, asked.order), 40_000, **figures)


def counted(fact: RoundClosed) -> list[str]:
    return sorted(client for entry in fact.participants.values() for client in entry["clients"])


def test_clients_are_drawn_dealt_and_counted_once_each() -> None:
    made = world("a", "b")
    first, second = order(made, "a"), order(made, "b")
    drawn = sorted((*first.clients, *second.clients))
    assert len(set(drawn)) == 8
    assert (first.drawn, first.drawn_samples) == (8, sum(ROSTER[c] for c in drawn))
    assert first.order != second.order
    made.says("a", answer(made, "a"))
    made.says("b", answer(made, "b"))
    (closed,) = made.facts(RoundClosed)
    assert counted(closed) == drawn
    told = {host: made.heard(host, do.RoundTaken)[-1] for host in ("a", "b")}
    assert {host: taken.clients for host, taken in told.items()} == {
        "a": first.clients,
        "b": second.clients,
    }
    assert made.state.round == 1


def test_a_lost_hosts_clients_are_dealt_again_after_the_other_ones_answer() -> None:
    made = world("a", "b")
    lost, mine = order(made, "a").clients, order(made, "b").clients
    late = answer(made, "a")
    made.step(fed.ClientLost("a", "silent"))
    assert order(made, "b").clients == mine  # it trains; the others wait for its answer
    made.says("b", answer(made, "b"))
    assert set(order(made, "b").clients) == set(lost)
    made.step(fed.Invited("a", 1000))
    made.says("a", ev.Loaded("job-1", 1, population=SAME, clients=ROSTER))
    made.says("a", late)  # others train its clients by now
    assert not made.facts(RoundClosed)
    made.says("b", answer(made, "b"))
    (closed,) = made.facts(RoundClosed)
    assert counted(closed) == sorted({*lost, *mine})
    assert set(closed.participants) == {"b"}
    taken = made.heard("a", do.RoundTaken)[-1]
    assert (taken.taken, taken.clients) == (False, ())


def test_a_client_whose_state_is_on_a_lost_host_waits_for_it_but_not_for_ever() -> None:
    made = world("a", "b", clients=20, min_clients=2, rounds=3)
    for host in ("a", "b"):
        made.says(host, answer(made, host, stateful=True))
    homes = made.facts(RoundClosed)[-1].homes
    assert sorted((*homes["a"], *homes["b"])) == sorted(ROSTER)
    assert set(order(made, "a").clients) == set(homes["a"])
    made.step(fed.ClientLost("a", "silent"))
    made.says("b", answer(made, "b", stateful=True))
    assert made.state.phase is Phase.TRAINING
    made.wait(min(STATES_WAIT_S, 30.0) - 1.0)
    assert set(order(made, "b").clients) == set(homes["b"])
    made.wait(2.0)
    assert set(order(made, "b").clients) == set(homes["a"])
    made.says("b", answer(made, "b", stateful=True))
    assert made.facts(RoundClosed)[-1].homes == {"b": tuple(sorted(ROSTER))}


def test_a_host_that_comes_back_trains_the_clients_whose_states_it_has() -> None:
    made = world("a", "b", clients=20, rounds=3)
    for host in ("a", "b"):
        made.says(host, answer(made, host, stateful=True))
    wanted = order(made, "a").clients
    made.step(fed.ClientLost("a", "killed"))
    made.says("b", answer(made, "b", stateful=True))
    made.step(fed.Invited("a", 1000))
    made.says("a", ev.Loaded("job-1", 1, population=SAME, clients=ROSTER))
    assert set(order(made, "a").clients) == set(wanted)
    made.says("a", answer(made, "a", stateful=True))
    assert counted(made.facts(RoundClosed)[-1]) == sorted(ROSTER)


def test_a_host_that_still_loads_is_no_client_of_the_population() -> None:
    made = world("a")
    made.step(fed.Invited("b", 1000))
    asked = [item for item in made.says("a", answer(made, "a")) if isinstance(item, do.AggregateRound)]
    assert [item.n_clients for item in asked] == [len(ROSTER)]


def test_one_clients_name_with_other_data_turns_a_host_out() -> None:
    made = world("a")
    made.step(fed.Invited("b", 1000))
    made.says("b", ev.Loaded("job-1", 1, population="0" * 64, clients={"c03": 40}))
    assert "client 'c03' is on a with other data" in made.state.clients["b"].out


@pytest.mark.parametrize("strategy", ["krum", "qfedavg"])
def test_strategies_without_such_sums_turn_populations_out(strategy: str) -> None:
    made = world("a", strategy=strategy)
    assert made.state.clients["a"].out
    assert made.state.phase is Phase.GATHERING


@pytest.mark.parametrize("odd", [{"n_samples": 10**6}, {"host": None}, {"round": 7}])
def test_an_impossible_answer_counts_nobody(odd: dict[str, Any]) -> None:
    made = world("a")
    before = order(made, "a").clients
    made.says("a", ev.UpdateReady(**({**_fields(answer(made, "a")), **odd})))
    assert not made.state.updates
    made.says("a", answer(made, "a"))
    assert counted(made.facts(RoundClosed)[0]) == sorted(before)


def _fields(update: ev.UpdateReady) -> dict[str, Any]:
    return {name: getattr(update, name) for name in ev.UpdateReady.__slots__}


def test_clients_that_a_host_refuses_are_out_and_the_others_count() -> None:
    made = world("a")
    sent = answer(made, "a")
    assert sent.host is not None
    refused, *rest = order(made, "a").clients
    rows = {client: sent.host.rows[client] for client in rest}
    held = ev.HostRows(rows, {refused: "the loss is nan"}, sent.host.loads, sent.host.sums)
    made.says("a", ev.UpdateReady(**({**_fields(sent), "host": held})))
    (closed,) = made.facts(RoundClosed)
    assert (counted(closed), dict(closed.dropped)) == (sorted(rest), {refused: "the loss is nan"})


def test_a_round_ends_at_its_deadline_with_the_sums_that_are_in() -> None:
    made = world("a", "b")
    late = order(made, "b").clients
    made.says("a", answer(made, "a"))
    made.wait(61.0)
    (closed,) = made.facts(RoundClosed)
    assert sorted(closed.dropped) == sorted(late)
    assert not made.heard("b", do.RoundTaken)[-1].taken


def test_a_sum_that_cannot_be_added_costs_its_clients_the_round() -> None:
    made = world("a", "b")
    gone = order(made, "a").clients
    made.bad = {"a"}
    for host in ("a", "b"):
        made.says(host, answer(made, host))
    (closed,) = made.facts(RoundClosed)
    assert sorted(closed.dropped) == sorted(gone)
    assert made.state.clients["a"].strikes == 1


def test_each_host_evaluates_its_share_of_the_population() -> None:
    made = world("a", "b", evaluate_every=1)
    for host in ("a", "b"):
        made.says(host, answer(made, host))
    asked = {host: made.heard(host, do.EvaluateRound)[-1].clients for host in ("a", "b")}
    assert sorted((*asked["a"], *asked["b"])) == sorted(ROSTER)
    for host, clients in asked.items():
        rows = {c: ev.EvaluatedRow(2, 1.0, {"accuracy": 0.5}) for c in clients}
        told = ev.ClientEvaluated("job-1", 1, 2 * len(rows), 1.0, {"accuracy": 0.5}, rows=rows)
        made.says(host, told)
    assert made.state.round == 1
    assert made.state.phase is Phase.TRAINING
    assert made.state.evaluation is not None
    assert made.state.evaluation.clients == 20


@pytest.mark.parametrize("seed", range(25))
def test_no_order_of_faults_counts_a_client_twice_or_forgets_one(seed: int) -> None:
    draw = random.Random(seed)
    made = world("a", "b", "c", rounds=4)
    held: list[tuple[str, ev.UpdateReady]] = []
    for _ in range(400):
        if made.state.ended:
            break
        host = draw.choice("abc")
        here = made.state.clients[host].present
        match draw.choice(["answer", "answer", "answer", "lose", "join", "late", "fail", "wait"]):
            case "answer" if here and host in made.state.orders:
                sent = answer(made, host, stateful=seed % 2 == 0)
                held.append((host, sent))
                if draw.random() < 0.8:
                    made.says(host, sent)
            case "lose" if here:
                made.step(fed.ClientLost(host, "killed"))
            case "join" if not here:
                made.step(fed.Invited(host, 1000))
                made.says(host, ev.Loaded("job-1", 1, population=SAME, clients=ROSTER))
            case "late" if held and here:
                sender, sent = draw.choice(held)
                if sender == host:
                    made.says(host, sent)
            case "fail" if here and host in made.state.orders and draw.random() < 0.2:
                made.says(host, ev.ClientFailed("job-1", made.state.round, "out of memory"))
            case "wait":
                made.wait(draw.uniform(0.0, 5.0))
    closed = made.facts(RoundClosed)
    assert closed
    for fact in closed:
        everybody = counted(fact)
        assert len(everybody) == len(set(everybody))
        assert len({*everybody, *fact.dropped}) == 8
        assert not {*everybody} & {*fact.dropped}
