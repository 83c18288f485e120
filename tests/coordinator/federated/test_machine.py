"""A federated job's machine: rounds that close without whoever dies, is late or sends nonsense."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.opdag import TensorMeta
from coordinator.federated import machine
from coordinator.federated import rounds as federation_rounds
from coordinator.federated import state as fed
from coordinator.federated.kinds.round import MAX_STRIKES
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import JobEnded, JobSubmitted, Ledger, RoundClosed, RoundEvaluated
from coordinator.messages.jobs import Broken, Cancelled, Phase, Record
from tests.coordinator.federated.lone_machine import UP, LoneMachine, name_of, spec, update


def test_a_job_trains_evaluates_and_finishes() -> None:
    world = LoneMachine(spec(rounds=2, eval_batches=2))
    world.begin("a", "b")
    for at_round in range(2):
        assert (world.state.phase, world.state.round) == (Phase.TRAINING, at_round)
        world.updates("a", "b")
        assert world.state.phase is Phase.EVALUATING
        world.evaluates("a", "b", loss=2.0 - at_round)
    assert (world.state.phase, world.state.reason) == (Phase.FINISHED, "2 rounds done")
    assert [fact.round for fact in world.facts(RoundClosed)] == [0, 1]
    assert [m.taken for m in world.heard("a", do.RoundTaken)] == [True, True]
    (last,) = [fact for fact in world.facts(RoundEvaluated) if fact.where == "central"]
    assert (last.loss, last.metrics) == (0.25, {"accuracy": 0.75})
    assert world.points()["clients_accuracy"] == 0.5
    assert world.points()["bytes_up"] == 80_000.0
    assert world.facts(JobEnded)[0].outcome == "finished"


def test_a_round_is_journalled_before_anybody_hears_of_it() -> None:
    world = LoneMachine()
    world.begin("a", "b")
    world.updates("a", "b")
    closed = next(at for at, item in enumerate(world.todo) if isinstance(item, Record))
    said = [
        at
        for at, item in enumerate(world.todo)
        if isinstance(item, fed.Say) and isinstance(item.message, do.RoundTaken)
    ]
    assert closed < min(said)


def test_a_round_waits_for_as_many_clients_as_it_needs() -> None:
    world = LoneMachine(spec(min_clients=2))
    world.begin("a")
    assert world.state.phase is Phase.GATHERING
    assert "1 clients are ready, 2 are needed" in world.state.reason
    world.step(fed.Invited("b", 100))
    world.says("b", ev.Loaded("job-1", 1))
    assert (world.state.phase, world.state.chosen) == (Phase.TRAINING, ("a", "b"))


def drawn_by_name(identities: Mapping[str, str], **options: Any) -> list[tuple[frozenset[str], set[int]]]:
    """Who trains in each round, by name, and the seeds that they are given."""
    world = LoneMachine(spec(rounds=4, clients=3, evaluate_every=0, **options))
    world.step(fed.Begin())
    for name, worker in identities.items():
        world.step(fed.Invited(worker, 100, 0.0, name))
    names = {worker: name for name, worker in identities.items()}
    for worker in names:
        world.says(worker, ev.Loaded("job-1", 1))
    found: list[tuple[frozenset[str], set[int]]] = []
    for _ in range(4):
        chosen = world.state.chosen
        orders = [m for worker in chosen for m in world.heard(worker, do.TrainRound)]
        seeds = {order.seed for order in orders if order.round == world.state.round}
        found.append((frozenset(names[worker] for worker in chosen), seeds))
        world.updates(*chosen)
    assert world.state.ended
    return found


@pytest.mark.parametrize("selector", ["random", "oort", "bandwidth_aware"])
def test_the_same_names_are_drawn_whatever_identity_their_workers_have(selector: str) -> None:
    hospitals = [f"hospital-{number}" for number in range(8)]
    once = {name: f"w-{number:02d}" for number, name in enumerate(hospitals)}
    again = {name: f"w-{37 * number % 11:02d}" for number, name in enumerate(hospitals)}
    assert sorted(once, key=once.__getitem__) != sorted(again, key=again.__getitem__)
    rounds = drawn_by_name(once, selector=selector)
    assert rounds == drawn_by_name(again, selector=selector)
    assert len(rounds) == 4
    assert len({names for names, _ in rounds}) > 1
    assert all(len(names) == len(seeds) == 3 for names, seeds in rounds)


def test_two_clients_of_one_name_are_told_apart_and_keep_their_names() -> None:
    world = LoneMachine(spec(clients=2))
    world.step(fed.Begin())
    for worker in ("w-1", "w-2", "w-3"):
        world.step(fed.Invited(worker, 100, 0.0, "lab"))
    assert [world.state.called(worker) for worker in ("w-1", "w-2", "w-3")] == ["lab", "lab #2", "lab #3"]
    world.step(fed.Invited("w-1", 100, 0.0, "another"))  # it joined anew, and renamed
    assert world.state.called("w-1") == "lab"
    assert world.state.called("never seen") == "never seen"


def test_those_that_still_load_are_waited_for_but_not_for_ever() -> None:
    world = LoneMachine()
    world.step(fed.Begin())
    world.step(fed.Invited("a", 100))
    world.step(fed.Invited("b", 100))
    world.says("a", ev.Loaded("job-1", 1))
    assert world.state.reason == "1 clients are ready; waits for b"
    world.wait(machine.GATHER_S + 1.0)
    assert world.state.chosen == ("a",)


def test_a_client_that_dies_costs_its_round_nothing_else() -> None:
    world = LoneMachine()
    world.begin("a", "b", "c")
    world.updates("a")
    world.step(fed.ClientLost("b", "silent for 2.0 s"))
    world.updates("c")
    (closed,) = world.facts(RoundClosed)
    assert sorted(closed.participants) == ["a", "c"]
    assert closed.dropped == {"b": "lost: silent for 2.0 s"}
    world.evaluates("a", "c")
    assert world.state.chosen == ("a", "c")


def test_a_client_that_delivered_and_died_still_counts() -> None:
    world = LoneMachine()
    world.begin("a", "b")
    world.updates("a")
    world.step(fed.ClientLost("a", "silent"))
    world.updates("b")
    assert sorted(world.facts(RoundClosed)[0].participants) == ["a", "b"]


def test_an_impossible_evaluation_and_a_metric_called_loss_count_for_nothing() -> None:
    world = LoneMachine()
    world.begin("a", "b", "c")
    world.updates("a", "b", "c")
    told = ev.ClientEvaluated("job-1", world.state.round, 10, 1.0, {"loss": 99.0, "accuracy": 0.5})
    world.says("a", told)
    world.evaluates("b", loss=-1e300)
    world.says("c", ev.ClientEvaluated("job-1", world.state.round, 10, 1.0, {"accuracy": 1e300}))
    assert world.points()["clients_loss"] == 1.0
    assert world.points()["client/a/loss"] == 1.0
    assert world.points()["clients_accuracy"] == 0.5


def test_a_delta_goes_once_the_round_that_began_with_it_is_closed() -> None:
    world = LoneMachine(aggregator=False)
    world.begin("a")
    world.open()
    for at_round in range(2):
        world.updates("a")
        made, delta = ev.Blob(name_of("state", at_round), 9), ev.Blob(name_of("delta", at_round), 5)
        attempt = world.state.attempt
        world.step(ev.Aggregated("job-1", at_round, attempt, made, world.model(at_round + 1), delta, {}))
        world.evaluates("a")
    gone = [blob for item in world.todo if isinstance(item, fed.Forget) for blob in item.blobs]
    first, second = name_of("model", 0), name_of("model", 1)  # the second a fact names: it stays meanwhile
    assert gone == [name_of("a", 0), first, name_of("a", 1), name_of("delta", 0), second]
    assert {first, second} & world.ledger.referenced_blobs() == {second}


def test_a_job_that_ends_before_its_first_round_closes_leaves_no_broadcast() -> None:
    world = LoneMachine()
    world.begin("a")
    todo = world.step(Cancelled("by its owner"))
    assert fed.Forget((name_of("model", 0),)) in todo


def test_a_late_client_is_told_so_and_its_update_does_not_count() -> None:
    world = LoneMachine()
    world.begin("a", "b")
    world.updates("a")
    world.wait(61.0)
    (closed,) = world.facts(RoundClosed)
    assert closed.dropped == {"b": "late: no update within 60 s"}
    todo = world.says("b", update("b", 0))
    assert any(isinstance(i, fed.Say) and not i.message.taken for i in todo)  # type: ignore[union-attr]
    assert world.state.round == 1


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ({"n_samples": 10**12}, "trained on 1000000000000 samples, it registered 100"),
        ({"n_samples": 0}, "trained on 0 samples"),
        ({"steps": 0}, "0 local steps"),
        ({"square_loss": float("nan")}, "squared loss of nan"),
        ({"square_loss": -1.0}, "squared loss of -1"),
        ({"metrics": {"loss": 1e308}}, "metric 'loss' is 1e+308"),
    ],
)
def test_impossible_figures_drop_the_client_with_the_reason(figures: dict[str, Any], why: str) -> None:
    world = LoneMachine()
    world.begin("a", "b")
    world.updates("b", **figures)
    world.updates("a")
    (closed,) = world.facts(RoundClosed)
    assert list(closed.participants) == ["a"]
    assert why in closed.dropped["b"]
    assert world.heard("b", do.RoundTaken)[0].reason == closed.dropped["b"]


@pytest.mark.parametrize("rule", ["fedavg", "coordinate_median"])
def test_who_registers_more_than_may_count_is_turned_down_and_the_job_goes_on(rule: str) -> None:
    world = LoneMachine(spec(rounds=1, strategy=rule, evaluate_every=0))
    world.step(fed.Begin())
    world.step(fed.Invited("a", 100))
    todo = world.step(fed.Invited("huge", 2**40))
    why = world.state.clients["huge"].out
    assert "registered 1099511627776 samples of 'digits', at most 1000000 may count" in why
    assert todo == [fed.Without(0, "huge", why), fed.Let("huge", why)]
    world.says("huge", ev.Loaded("job-1", 1))  # whatever it says
    world.says("a", ev.Loaded("job-1", 1))
    assert world.state.chosen == ("a",)
    world.says("huge", update("huge", 0, n_samples=2 * 10**9))
    world.updates("a")
    (closed,) = world.facts(RoundClosed)
    assert list(closed.participants) == ["a"]
    assert world.state.phase is Phase.FINISHED


def test_who_registers_less_again_is_invited() -> None:
    world = LoneMachine(spec(max_samples=150))
    world.step(fed.Begin())
    world.step(fed.Invited("a", 151))
    assert fed.Invite("a") in world.step(fed.Invited("a", 150))
    assert world.state.clients["a"].out == ""


def test_an_update_that_the_aggregator_refuses_drops_its_client() -> None:
    world = LoneMachine(bad={"b"})
    world.begin("a", "b")
    world.updates("a", "b")
    (closed,) = world.facts(RoundClosed)
    assert closed.dropped == {"b": "1 non-finite elements"}
    assert world.state.clients["b"].dropped == "1 non-finite elements"


def test_a_client_whose_update_was_refused_is_not_in_the_mean_over_clients() -> None:
    world = LoneMachine(spec(rounds=2), bad={"b"})
    world.begin("a", "b")
    world.updates("a", "b")
    assert world.state.asked == {"a"}
    world.bad.clear()
    world.evaluates("a", loss=2.0)
    world.updates("a", "b")
    assert world.state.asked == {"a", "b"}, "an update that counts is forgiveness"


def test_a_client_that_sends_nonsense_again_and_again_is_set_aside() -> None:
    world = LoneMachine(spec(rounds=5, evaluate_every=0), bad={"b"})
    world.begin("a", "b")
    for _ in range(MAX_STRIKES):
        world.updates("a", "b")
    assert world.state.chosen == ("a",)
    assert "3 rounds in a row" in world.state.clients["b"].out
    assert any(isinstance(item, fed.Let) and item.worker == "b" for item in world.todo)


def test_a_replayed_round_is_refused_and_nothing_is_lost() -> None:
    world = LoneMachine(spec(evaluate_every=0))
    world.begin("a", "b")
    world.updates("a", "b")
    before = world.state
    todo = world.says("a", update("a", 0))
    assert world.state == before
    assert not any(isinstance(item, Record) for item in todo)
    world.updates("a", "b", at_round=7)
    assert world.state.updates == {}
    assert "update of round 7; this is round 1" in world.heard("a", do.RoundTaken)[-1].reason


def test_the_same_update_said_twice_counts_once() -> None:
    world = LoneMachine()
    world.begin("a", "b")
    world.updates("a", "a")
    assert list(world.state.updates) == ["a"]
    assert not world.heard("a", do.RoundTaken)


def test_too_few_updates_repeat_the_round_and_then_fail_the_job() -> None:
    world = LoneMachine(spec(min_clients=2, evaluate_every=0), bad={"b"})
    world.begin("a", "b")
    world.updates("a", "b")
    assert world.state.phase is Phase.GATHERING
    assert "repeated" in world.state.reason
    assert world.heard("a", do.RoundTaken)[-1].taken is False
    world.bad = set()
    world.wait(0.25)
    assert (world.state.phase, world.state.round) == (Phase.TRAINING, 0)
    for _ in range(federation_rounds.MAX_REPEATS):
        world.wait(61.0)
        world.wait(0.25)
    assert world.state.phase is Phase.FAILED
    assert "late" in world.state.reason


def test_when_everybody_is_lost_the_job_waits_and_goes_on_at_its_round() -> None:
    world = LoneMachine()
    world.begin("a", "b")
    world.step(fed.ClientLost("a", "gone"))
    world.step(fed.ClientLost("b", "gone"))
    assert world.state.phase is Phase.GATHERING
    world.wait(1.0)
    assert (world.state.phase, world.facts(JobEnded)) == (Phase.GATHERING, [])
    world.step(fed.Invited("c", 50))
    world.says("c", ev.Loaded("job-1", 1))
    assert (world.state.phase, world.state.round, world.state.chosen) == (Phase.TRAINING, 0, ("c",))


def test_a_client_that_reconnects_is_told_again_what_is_under_way() -> None:
    world = LoneMachine(spec(evaluate_every=0))
    world.begin("a", "b")
    world.updates("a", "b")
    world.said.clear()
    todo = world.step(fed.ClientBack("a"))
    assert todo == [fed.Invite("a")]
    world.says("a", ev.Loaded("job-1", 1))
    verdict, train = [message for name, message in world.said if name == "a"]
    assert (verdict.round, verdict.taken) == (0, True)
    assert (train.round, train.seed) == (1, federation_rounds.seed_of(5, "a", 1))


def test_an_aggregator_that_dies_is_started_anew_and_asked_again() -> None:
    world = LoneMachine(aggregator=False)
    world.begin()
    world.open()
    world.step(fed.Invited("a", 100))
    world.says("a", ev.Loaded("job-1", 1))
    world.updates("a")
    assert world.state.phase is Phase.AGGREGATING
    (again,) = world.step(ev.AggregatorBroke("job-1", "its process ended (-9)"))
    assert again == do.OpenAggregator("job-1", world.spec, 0, "", 1)
    inputs = {"x": TensorMeta((4, 8, 8), "float32")}
    (asked,) = world.step(ev.AggregatorOpened("job-1", 0, world.model(0), inputs, UP))
    assert isinstance(asked, do.AggregateRound)
    stale = replace(asked, attempt=asked.attempt - 1)
    world.aggregator = True
    world.sum(stale)
    assert world.state.phase is Phase.AGGREGATING
    world.sum(asked)
    assert world.state.round == 1


def test_an_update_that_kills_the_aggregator_is_dropped_and_the_others_are_summed() -> None:
    world = LoneMachine(spec(rounds=2, evaluate_every=0))
    world.begin("a", "b", "c")
    world.aggregator = False
    world.updates("a", "b", "c")
    assert world.state.phase is Phase.AGGREGATING
    todo = world.step(ev.AggregatorBroke("job-1", "its process ended (-9)", client="b"))
    assert todo[-1] == do.OpenAggregator("job-1", world.spec, 0, "", 3)
    assert fed.Forget((name_of("b", 0),)) in todo
    (told,) = world.heard("b", do.RoundTaken)
    assert (told.taken, told.reason) == (False, world.state.dropped["b"])
    assert "its update broke the aggregator: its process ended (-9)" in told.reason
    assert fed.Without(0, "b", told.reason) in todo
    world.open()
    (asked,) = [
        item for item in world.todo if isinstance(item, do.AggregateRound) and "b" not in item.updates
    ]
    assert set(asked.updates) == {"a", "c"}
    world.aggregator = True
    world.sum(asked)
    (closed,) = world.facts(RoundClosed)
    assert (set(closed.participants), set(closed.dropped)) == ({"a", "c"}, {"b"})
    assert (world.state.failures, world.state.clients["b"].strikes) == (0, 1)


def test_a_client_whose_every_update_kills_the_aggregator_is_set_aside() -> None:
    world = LoneMachine()
    world.begin("a")
    world.aggregator = False
    for _ in range(MAX_STRIKES):
        world.wait(1.0)
        world.updates("a")
        world.step(ev.AggregatorBroke("job-1", "its process ended (-9)", client="a"))
        assert world.state.phase is Phase.GATHERING
        world.open()
    assert world.state.bars("a")
    assert not world.state.ready


def test_an_aggregator_that_cannot_go_on_fails_the_job() -> None:
    world = LoneMachine()
    world.begin("a")
    world.step(ev.AggregatorBroke("job-1", "'w' is not finite after aggregation", True))
    assert world.state.phase is Phase.FAILED
    assert "not finite" in world.state.reason


def test_an_aggregator_whose_disk_is_full_is_asked_again_later() -> None:
    world = LoneMachine()
    world.begin("a", "b")
    world.step(ev.AggregatorBroke("job-1", "the disk is full", storage=True))
    assert (world.state.phase, world.state.failures) == (Phase.PAUSED, 0)
    assert world.state.not_before_s == world.now_s + machine.STORAGE_RETRY_S
    assert world.state.clients["a"].present


def test_a_full_disk_pauses_the_job_and_the_round_begins_again() -> None:
    world = LoneMachine()
    world.begin("a", "b")
    world.updates("a")
    world.step(fed.Interrupted("the disk is full"))
    assert world.state.phase is Phase.PAUSED
    world.step(fed.Begin())
    for name in ("a", "b"):
        world.step(fed.ClientBack(name))
        world.says(name, ev.Loaded("job-1", 1))
    assert (world.state.phase, world.state.round) == (Phase.TRAINING, 0)


@pytest.mark.parametrize("clients", [("a", "b"), ()])
def test_a_job_that_was_interrupted_after_its_last_round_evaluates_and_ends(clients: tuple[str, ...]) -> None:
    world = LoneMachine(spec(rounds=1, eval_batches=1, evaluate_every=1), aggregator=False)
    world.begin("a", "b")
    world.open()
    world.updates("a", "b")
    world.sum(next(item for item in world.todo if isinstance(item, do.AggregateRound)))
    assert world.state.phase is Phase.EVALUATING
    world.step(fed.Interrupted("the disk is full"))
    for name in {"a", "b"} - set(clients):
        world.step(fed.ClientLost(name, "gone"))
    world.aggregator = True
    world.begin(*clients)
    world.wait(61.0)
    world.evaluates(*clients)
    assert world.state.phase is Phase.FINISHED
    assert [fact.round for fact in world.facts(RoundClosed)] == [0]


def test_a_round_whose_candidates_are_gone_before_they_told_their_loss_gathers_again() -> None:
    world = LoneMachine(spec(selector="power_of_choice"))
    world.begin("a", "b")
    for name in "ab":
        world.step(fed.ClientLost(name, "gone"))
    assert (world.state.phase, world.state.chosen) == (Phase.GATHERING, ())


def test_the_loss_that_a_selector_asks_for_decides_who_takes_part() -> None:
    world = LoneMachine(spec(clients=1, selector="power_of_choice", selector_options={"factor": 3.0}))
    world.begin("a", "b", "c")
    assert (world.state.phase, world.state.asking) == (Phase.EVALUATING, True)
    for name, loss in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        world.evaluates(name, loss=loss)
    assert (world.state.phase, world.state.chosen) == (Phase.TRAINING, ("b",))


def test_a_delta_goes_only_to_whom_holds_its_base() -> None:
    world = LoneMachine(spec(downlink="delta", evaluate_every=0))
    world.begin("a", "b")
    world.updates("a")
    asked = replace(world.state)
    delta = ev.Blob(name_of("delta"), 10)
    world.aggregator = False
    world.step(fed.Invited("late", 10))
    world.updates("b")
    world.step(
        ev.Aggregated("job-1", 0, world.state.attempt, ev.Blob(name_of("s"), 1), world.model(1), delta, {})
    )
    assert asked.model is not None
    sent = world.heard("a", do.TrainRound)[1].model
    assert (sent.delta, sent.base) == (delta, asked.model.full.hash)
    world.says("late", ev.Loaded("job-1", 1))
    assert world.state.round == 1


def test_cancelling_ends_it_and_lets_everybody_go() -> None:
    world = LoneMachine()
    world.begin("a", "b")
    world.step(Cancelled("cancelled by the owner"))
    assert world.state.phase is Phase.CANCELLED
    assert do.CloseAggregator("job-1") in world.todo
    assert fed.Let("", "cancelled by the owner") in world.todo
    world.step(Cancelled("again"))


def test_our_own_mistakes_raise_and_a_clients_do_not() -> None:
    world = LoneMachine()
    with pytest.raises(LookupError, match="Invited while queued"):
        world.step(fed.Invited("a", 1))
    world.begin("a")
    todo = world.says("stranger", ev.Loaded("job-1", 1))
    assert [type(item).__name__ for item in todo] == ["Dropped"]
    world.step(Broken("its graph is gone"))
    assert world.state.phase is Phase.FAILED


# ---------------------------------------------------------------- whatever happens

NAMES = ("a", "b", "c", "d")
ACTIONS = st.tuples(
    st.sampled_from(
        [
            "update",
            "bad",
            "late",
            "replay",
            "huge",
            "evaluate",
            "fail",
            "lose",
            "back",
            "join",
            "tick",
            "crash",
        ]
    ),
    st.sampled_from(NAMES),
)


def act(world: LoneMachine, action: str, name: str, draw: random.Random) -> None:
    present = name in world.state.clients and world.state.clients[name].present
    match action:
        case "update" | "bad":
            world.bad = {name} if action == "bad" else set()
            if present:
                world.updates(name)
        case "replay" if present:
            world.updates(name, at_round=max(0, world.state.round - draw.randint(1, 3)))
        case "huge" if present:
            world.updates(name, n_samples=10**9)
        case "evaluate" if present:
            world.evaluates(name, loss=draw.choice([1.0, float("nan")]))
        case "fail" if present:
            during = draw.choice(["train", "evaluate", "load"])
            world.says(name, ev.ClientFailed("job-1", world.state.round, "out of memory", during))
        case "lose" if present:
            world.step(fed.ClientLost(name, "silent"))
        case "back" if present:
            world.step(fed.ClientBack(name))
            world.says(name, ev.Loaded("job-1", 1))
        case "join" if not present and not world.state.ended:
            world.step(fed.Invited(name, 100))
            world.says(name, ev.Loaded("job-1", 1))
        case "tick":
            world.wait(draw.choice([0.25, 61.0]))
        case "crash" if not world.state.ended and world.state.opened:
            world.state = replace(world.state, failures=0)
            world.step(ev.AggregatorBroke("job-1", "killed", client=draw.choice(["", name])))


def check(world: LoneMachine) -> None:
    """What holds after every event."""
    state = world.state
    closed = world.facts(RoundClosed)
    assert [fact.round for fact in closed] == list(range(len(closed)))
    assert state.round == len(closed)
    assert world.ledger.jobs["job-1"].steps == len(closed)
    assert set(state.updates) | set(state.dropped) <= set(state.chosen)
    assert not set(state.updates) & set(state.dropped)
    assert len(world.facts(JobEnded)) == int(state.ended)
    if state.phase is Phase.TRAINING:
        assert len(state.updates) + len(state.dropped) < len(state.chosen)
    if state.phase is Phase.EVALUATING:
        assert state.asked or state.central
    for fact in closed:
        assert not set(fact.participants) & set(fact.dropped)
        assert len(fact.participants) >= federation_rounds.least(state)


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(ACTIONS, max_size=60),
    seed=st.integers(0, 10**6),
    least=st.integers(1, 2),
    clients=st.sampled_from([0, 2, 3]),
    every=st.sampled_from([0, 1, 2]),
    selector=st.sampled_from(["random", "power_of_choice", "oort", "bandwidth_aware"]),
)
def test_no_order_of_faults_breaks_a_round_or_loses_one(
    actions: list[tuple[str, str]], seed: int, least: int, clients: int, every: int, selector: str
) -> None:
    world = LoneMachine(
        spec(rounds=4, min_clients=least, clients=clients, evaluate_every=every, selector=selector)
    )
    world.begin("a", "b", "c")
    draw = random.Random(seed)
    check(world)
    for action, name in actions:
        act(world, action, name, draw)
        check(world)


def resumed(world: LoneMachine, facts: Iterable[Any]) -> Mapping[str, Any]:
    """Figures that survive in the ledger."""
    ledger = Ledger()
    ledger.apply(JobSubmitted("job-1", "", world.spec, 0, {}, 0.0))
    for fact in facts:
        ledger.apply(fact)
    record = ledger.jobs["job-1"]
    return {"steps": record.steps, "state": record.closed[-1].state if record.closed else ""}


def test_the_ledger_knows_the_round_and_the_state_that_the_machine_has() -> None:
    world = LoneMachine(spec(rounds=4, evaluate_every=0))
    world.begin("a", "b")
    for _ in range(3):
        world.updates("a", "b")
    assert resumed(world, world.facts(RoundClosed)) == {"steps": 3, "state": world.state.state}
    assert len(world.ledger.jobs["job-1"].closed) == 2
    assert name_of("state", 0) in world.ledger.take_superseded()
