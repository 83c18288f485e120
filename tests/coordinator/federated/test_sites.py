"""Rounds with gateways, by the machine alone: no order of faults loses an update, or counts one twice."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.federated import Federated
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from atoll.privacy import Privacy
from atoll.secure import Secure
from coordinator.federated import state as fed
from coordinator.federated.checks import check_federated
from coordinator.federated.kinds.choice import round_of
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import RoundClosed
from coordinator.messages.jobs import Phase
from tests.coordinator.federated.lone_machine import LoneMachine, spec, update

SITES = {"a": "east", "b": "east", "c": "east", "d": "west", "e": "west", "f": ""}


def made(rounds: int = 3, **options: Any) -> LoneMachine:
    return LoneMachine(spec(rounds, **{"gateways": "auto", "evaluate_every": 0, **options}))


def begun(world: LoneMachine, **speeds: float) -> None:
    world.step(fed.Begin())
    for name, site in SITES.items():
        world.step(fed.Invited(name, 100, site=site, name=f"lab-{name}"))
    for name in SITES:
        joins(world, name)


def joins(world: LoneMachine, name: str) -> None:
    world.says(name, ev.Loaded("job-1", 1, gateways=("site",)))


def sum_of(order: do.TrainRound, *names: str) -> ev.UpdateReady:
    rows = {name: ev.Row(50, 3, 0.0, 0.0, 0.0) for name in names or [kept.client for kept in order.gathers]}
    host = ev.HostRows(rows, {}, {"trained": 1}, {"samples": 1}, order=order.order)
    return update(f"sum of {order.order}", order.round, host=host)


def newest(world: LoneMachine, worker: str) -> do.TrainRound:
    return world.heard(worker, do.TrainRound)[-1]


def answers(world: LoneMachine, *names: str) -> None:
    for name in names:
        order = newest(world, name)
        if order.gathers:
            world.says(name, sum_of(order))
        else:
            world.says(name, update(name, order.round, gateway=order.gateway))


def test_each_site_has_one_gateway_which_sums_once_all_its_clients_have_answered() -> None:
    world = made()
    begun(world)
    assert {name: newest(world, name).gateway for name in SITES} == {
        "a": "a", "b": "a", "c": "a", "d": "d", "e": "d", "f": "",
    }  # fmt: skip
    assert {name: newest(world, name).model.holder for name in SITES} == {
        "a": "", "b": "a", "c": "a", "d": "", "e": "d", "f": "",
    }  # fmt: skip
    answers(world, "a", "b", "d")
    assert not any(order.gathers for _, order in world.said if isinstance(order, do.TrainRound))
    answers(world, "e")
    assert [kept.client for kept in newest(world, "d").gathers] == ["d", "e"]
    assert (newest(world, "d").drawn, newest(world, "d").drawn_samples) == (6, 600)
    answers(world, "c", "f", "d", "a")
    assert world.state.round == 1
    (fact,) = world.facts(RoundClosed)
    assert sorted(fact.participants) == sorted(SITES)
    assert "a sums for 3 clients of its site; d sums for 2 clients of its site" in world.state.assignment


def test_a_gateway_of_another_round_or_order_is_not_heard() -> None:
    world = made()
    begun(world)
    answers(world, "d", "e")
    order = newest(world, "d")
    other = sum_of(order)
    assert other.host is not None
    world.says("d", update("sum", 0, host=ev.HostRows(other.host.rows, {}, {}, {}, order="another")))
    world.says("e", sum_of(order))  # which is no gateway
    assert not world.state.sites.sums  # type: ignore[union-attr]
    answers(world, "d")
    world.says("d", sum_of(order))  # repeated
    assert [*world.state.sites.sums] == ["d"]  # type: ignore[union-attr]


def test_a_client_that_is_asked_for_itself_is_not_taken_at_its_word_for_the_gateway() -> None:
    world = made()
    begun(world)
    answers(world, "a", "b", "c")
    world.step(fed.ClientLost("a", "gone"))
    assert [newest(world, name).gateway for name in "bc"] == ["", ""]
    world.says("b", update("b", 0, gateway="a"))  # said before it heard
    assert "b" not in world.state.updates
    answers(world, "b", "c", "d", "e", "f", "d")
    (fact,) = world.facts(RoundClosed)
    assert (sorted(fact.participants), sorted(fact.dropped)) == ([*"bcdef"], ["a"])
    assert newest(world, "c").gateway == "b"


@given(st.integers(0, 10**9), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_no_order_of_faults_counts_an_update_twice_or_keeps_a_round_open(seed: int, few: int) -> None:
    draw, world = random.Random(seed), made(3, min_clients=few)
    begun(world)
    summed: list[list[str]] = []
    kept = world.sum

    def counted(asked: do.AggregateRound) -> None:
        names = [*asked.updates, *(name for held in asked.sums.values() for name in held.samples)]
        assert len(names) == len({*names})
        assert {*names} <= (asked.drawn or {}).keys()
        summed.append(names)
        kept(asked)

    world.sum = counted  # type: ignore[method-assign]
    for _ in range(600):
        if world.state.ended:
            break
        name, what = draw.choice([*SITES]), draw.random()
        client, found = world.state.clients[name], round_of(world.state)
        orders = world.heard(name, do.TrainRound)
        if what < 0.04 and client.present:
            world.step(fed.ClientLost(name, "gone"))
        elif not client.present or client.out:
            world.step(fed.Invited(name, 100, site=SITES[name]))
            joins(world, name)
        elif what < 0.08 and orders:
            world.says(name, ev.ClientFailed("job-1", orders[-1].round, "broke", "train"))
        elif what < 0.12:
            world.step(fed.ClientBack(name))
            joins(world, name)
        elif what < 0.16:
            world.wait(draw.choice((1.0, 70.0)))
        elif what < 0.2 and orders and orders[-1].gathers:
            part = [held.client for held in orders[-1].gathers if draw.random() < 0.7]
            world.says(name, sum_of(orders[-1], *part) if part else sum_of(orders[-1]))
        elif orders and world.state.phase is Phase.TRAINING:
            order = draw.choice(orders[-3:]) if draw.random() < 0.1 else orders[-1]
            if found.awaits(world.state, name) or draw.random() < 0.2:
                said = sum_of(order) if order.gathers else update(name, order.round, gateway=order.gateway)
                world.says(name, said)
        else:
            world.wait(1.0)
    assert world.state.phase in (Phase.FINISHED, Phase.FAILED), world.state.reason
    facts = world.facts(RoundClosed)
    for fact in facts:
        assert not fact.participants.keys() & fact.dropped.keys()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"buffer": 2}, "with buffer="),
        ({"privacy": Privacy(noise=1.0, clip=1.0), "clients": 4, "evaluate_every": 0}, "with privacy="),
        ({"secure": Secure(), "evaluate_every": 0}, "with secure="),
        ({"strategy": "krum"}, "needs individual updates"),
        ({"strategy": "qfedavg"}, "without a bound"),
        ({"gateways": "a,,b"}, "names of workers"),
    ],
)  # fmt: skip
def test_what_goes_with_no_gateway_is_refused_by_name(options: dict[str, Any], why: str) -> None:
    sgd = TrainingSpec(steps=3, n_micro=1, optimizer=Optimizer(OptimizerName.SGD, lr=0.1))
    with pytest.raises(UsageError, match=why):
        check_federated(Federated(**{"gateways": "auto", **options}), sgd)


def test_a_population_is_refused_beside_gateways() -> None:
    world = made()
    world.step(fed.Begin())
    world.step(fed.Invited("h", 100, site="east"))
    world.says("h", ev.Loaded("job-1", 1, population="ab" * 32, clients={"p": 50}))
    assert "sends one sum already" in world.state.clients["h"].out
