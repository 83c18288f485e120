"""Books of secure rounds: who is asked what, who is waited for, and what a job with them may not be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll.errors import UsageError
from atoll.federated import Federated
from atoll.job import TrainingSpec
from atoll.messages.from_worker import SecureAnswer
from atoll.privacy import Privacy
from atoll.secure import Secure, Stage
from coordinator.federated import state as fed
from coordinator.federated.checks import check_federated
from coordinator.federated.secure.books import EXCHANGE_S, heard, next_stage, opened
from coordinator.messages import instructions as do
from coordinator.messages.facts import RoundClosed
from coordinator.messages.jobs import Phase
from coordinator.services.blobs.rights import ClientRole
from protos.convert import from_proto, to_proto
from strategies.secure.member import Member
from tests.coordinator.federated.lone_machine import LoneMachine, spec, update

NAMES = ("a", "b", "c", "d", "e", "f")


class World(LoneMachine):
    """Members answer as real ones; ``silent`` ones do not. Vectors are made up."""

    silent: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.members: dict[str, Member] = {}

    def answers(self, worker: str, order: Any) -> SecureAnswer:
        head = (order.job, order.round, order.exchange, order.stage)
        if order.stage is Stage.KEYS:
            self.members[worker] = Member(worker, order.job, order.round, order.exchange, Secure())
            return SecureAnswer(*head, keys=self.members[worker].keys)
        member = self.members[worker]
        if order.stage is Stage.SHARES:
            return SecureAnswer(*head, parcels=member.shares(order.roster))
        if order.stage is Stage.SIGNATURES:
            return SecureAnswer(*head, signature=member.sign(order.survivors))
        return SecureAnswer(*head, shares=member.unmask(order.signatures))

    def go_on(self) -> None:
        """Have all answer what they were asked, until nothing is asked."""
        while self.said:
            said, self.said = self.said, []
            for worker, message in said:
                if worker in self.silent:
                    continue
                if isinstance(message, do.SecureOrder):
                    self.says(worker, self.answers(worker, message))
                elif isinstance(message, do.TrainRound):
                    self.members[worker].receive(message.shared, message.parcels)
                    self.members[worker].mask([_zeros()])
                    self.says(worker, replace(update(worker, message.round), exchange=message.exchange))


def _zeros() -> Any:
    import numpy as np

    return np.zeros(4, np.uint32)


def world(rounds: int = 2, **options: Any) -> World:
    made = World(spec(rounds, evaluate_every=0, secure=Secure(), **options))
    made.begin(*NAMES)
    return made


def test_every_stage_is_asked_of_all_and_the_round_closes() -> None:
    made = world(rounds=1)
    made.go_on()
    assert made.state.phase is Phase.FINISHED
    (asked,) = [item for item in made.todo if isinstance(item, do.AggregateRound)]
    assert asked.opening is not None
    assert sorted(asked.updates) == list(asked.opening.shared) == list(NAMES)
    assert len(asked.opening.shares) == 4  # as soon as the sum can be opened


def test_nobody_trains_before_shares_are_out_and_late_members_are_dropped() -> None:
    made = world()
    made.silent = frozenset({"f"})
    made.go_on()
    assert made.state.reason == "round 1 of 2: 1 of 6 members are asked for keys"
    made.wait(EXCHANGE_S + 1.0)
    made.go_on()
    assert made.state.round == 1
    assert made.state.last is not None
    assert made.state.last.dropped == {"f": "late: no keys in time"}


def test_who_is_lost_after_its_vector_came_still_counts() -> None:
    made = world()
    made.silent = frozenset()
    orders = _until(made, Stage.SIGNATURES)
    made.step(fed.ClientLost("b", "silent"))
    made.said = [(who, order) for who, order in orders if who != "b"]
    made.silent = frozenset({"b"})
    made.go_on()
    first = made.facts(RoundClosed)[0]
    assert sorted(first.participants) == list(NAMES)
    assert first.dropped == {}


def test_a_member_that_comes_back_is_asked_again_for_its_share() -> None:
    made = world(rounds=1)
    orders = _until(made, Stage.ANSWERS)
    for name in ("a", "b", "c"):
        made.step(fed.ClientLost(name, "silent"))
    for name, order in orders:
        if name in ("d", "e", "f"):
            made.says(name, made.answers(name, order))
    made.said.clear()
    made.wait(EXCHANGE_S + 1.0)  # a sum that is signed is not given up so soon
    assert made.state.phase is Phase.TRAINING
    made.step(fed.Invited("a", 100))
    made.says("a", do_loaded())
    ((_, again),) = [(who, m) for who, m in made.said if isinstance(m, do.SecureOrder)]
    assert again.stage is Stage.ANSWERS
    made.says("a", made.answers("a", again))
    assert made.state.phase is Phase.FINISHED


def do_loaded() -> Any:
    from coordinator.messages import events as ev

    return ev.Loaded("job-1", 1)


def _until(made: World, stage: Stage) -> list[tuple[str, Any]]:
    """Go on until all are asked for ``stage``; the orders."""
    while True:
        orders = [(who, m) for who, m in made.said if isinstance(m, do.SecureOrder) and m.stage is stage]
        if orders:
            made.said = []
            return orders
        said, made.said = made.said, []
        for who, message in said:
            rest, made.said = made.said, [(who, message)]
            step = made.said.pop()[1]
            made.said = rest
            if isinstance(step, do.SecureOrder):
                made.says(who, made.answers(who, step))
            elif isinstance(step, do.TrainRound):
                made.members[who].receive(step.shared, step.parcels)
                made.members[who].mask([_zeros()])
                made.says(who, replace(update(who, step.round), exchange=step.exchange))


def test_an_update_of_another_attempt_is_not_counted() -> None:
    made = world()
    made.says("a", replace(update("a", 0), exchange="elsewhere"))
    assert not made.state.updates
    made.go_on()
    assert made.state.round == 2


def test_a_sum_that_comes_to_nothing_repeats_the_round_and_blames_nobody() -> None:
    from coordinator.messages import events as ev

    made = world(rounds=1)
    made.aggregator = False
    made.go_on()
    assert made.state.phase is Phase.AGGREGATING
    made.step(ev.Aggregated("job-1", 0, made.state.attempt, None, None, void="a mask is left on"))
    assert made.state.phase is Phase.GATHERING
    assert "round 1 is repeated: a mask is left on" in made.state.reason
    assert not any(client.strikes for client in made.state.clients.values())


def test_books_take_one_answer_of_who_was_asked_for_the_stage_at_hand() -> None:
    books = opened("job-1", 0, Secure(), ("a", "b", "c"), "secret")
    keys = SecureAnswer("job-1", 0, books.name, Stage.KEYS, keys=Member("a", "job-1", 0, "x", Secure()).keys)
    after, why = heard(books, "a", keys)
    assert not why
    assert heard(after, "a", keys)[1] == "keys of a twice"
    assert "was not asked" in heard(books, "z", keys)[1]
    assert "another exchange" in heard(books, "b", replace(keys, exchange="y"))[1]
    assert "another exchange" in heard(books, "b", replace(keys, stage=Stage.SHARES))[1]
    empty, _ = heard(after, "b", replace(keys, keys=None))
    assert empty.refused == {"b": "b answered keys with something else"}
    assert opened("job-1", 0, Secure(), ("a",), "other").name != books.name
    assert next_stage(replace(books, stage=Stage.VECTORS), frozenset(), (), 2)[1]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"clients": 2}, "of 2 clients hides nothing"),
        ({"buffer": 3}, "an asynchronous job has no rounds"),
        ({"selector": "oort"}, "looks at single clients' losses"),
        ({"evaluate_every": 1}, "set evaluate_every=0"),
        ({"uplink": "topk:32"}, "does not add up"),
        ({"uplink": "lossless"}, "does not add up"),
        ({"privacy": Privacy(noise=1.0, sampling=0.5), "clients": 10}, "amplifies nothing"),
    ],
)
def test_settings_that_show_more_than_sums_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Federated(**{"evaluate_every": 0, "secure": Secure(), **wrong})


@pytest.mark.parametrize("strategy", ["krum", "coordinate_median", "trimmed_mean", "qfedavg", "opwa"])
def test_strategies_that_look_at_single_updates_are_refused(strategy: str) -> None:
    rule = Federated(strategy, evaluate_every=0, secure=Secure())
    with pytest.raises(UsageError, match="shows sums alone"):
        check_federated(rule, TrainingSpec(steps=1, n_micro=1))


def test_a_job_keeps_its_settings_on_the_wire() -> None:
    wanted = spec(secure=Secure(0.75, 6, 32), evaluate_every=0)
    assert from_proto(to_proto(wanted)) == wanted
    assert from_proto(to_proto(spec())).federated.rule.secure is None


@pytest.mark.parametrize("bits", [24, 25, 48])
def test_a_member_may_store_its_masked_vector_whatever_its_words(bits: int) -> None:
    secure = Secure(bits=bits)
    made = World(spec(evaluate_every=0, secure=secure))
    made.begin(*NAMES)
    elements = sum(meta.elements for meta in made.state.up)
    allowed = ClientRole(made.state).allowance()
    assert allowed.n_bytes > (4 if bits == 24 else 8) * elements + 16 * 2
    assert allowed.blobs == 1


def test_with_two_clients_no_round_begins() -> None:
    made = World(spec(evaluate_every=0, secure=Secure()))
    made.begin("a", "b")
    assert made.state.phase is Phase.GATHERING
    assert "2 clients are ready, 3 are needed" in made.state.reason
