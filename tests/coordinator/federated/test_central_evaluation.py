"""Evaluation on the owner's data, beside clients that train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atoll.opdag import TensorMeta
from coordinator.federated import state as fed
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import RoundEvaluated
from coordinator.messages.jobs import Phase, Record
from tests.coordinator.federated.lone_machine import UP, LoneMachine, name_of, spec


def held_back(rounds: int = 2, up: tuple[TensorMeta, ...] = UP, **options: Any) -> LoneMachine:
    """Two clients, their first round summed, the model not yet evaluated on the owner's data."""
    made = spec(rounds, eval_batches=2, **options)
    world = LoneMachine(replace(made, training=replace(made.training, eval_every=1)), up=up)
    world.begin("a", "b")
    world.aggregator = False
    world.updates("a", "b")
    world.step(summed(world))
    return world


def summed(world: LoneMachine) -> ev.Aggregated:
    state = world.state
    return ev.Aggregated(
        "job-1",
        state.round,
        state.attempt,
        ev.Blob(name_of("s", state.round), 1),
        world.model(state.round + 1),
        None,
        {},
    )


def central(world: LoneMachine) -> list[int]:
    """Rounds whose evaluation on the owner's data was asked for."""
    return [item.round for item in world.todo if isinstance(item, do.EvaluateModel)]


def told_centrally(world: LoneMachine) -> list[int]:
    return [fact.round for fact in world.facts(RoundEvaluated) if fact.where == "central"]


def test_clients_train_while_the_owner_evaluates() -> None:
    world = held_back(evaluate_every=0)
    assert (world.state.phase, world.state.round, central(world)) == (Phase.TRAINING, 1, [1])
    assert len(world.heard("a", do.TrainRound)) == 2
    world.step(ev.CentrallyEvaluated("job-1", 1, 0.25, {}, 8))
    assert (world.state.phase, told_centrally(world)) == (Phase.TRAINING, [1])
    world.updates("a", "b")
    world.step(summed(world))
    assert world.state.phase is Phase.EVALUATING, "nothing comes after the last round"
    world.step(ev.CentrallyEvaluated("job-1", 1, 0.5, {}, 8))
    assert told_centrally(world) == [1], "that one was told already"
    world.step(ev.CentrallyEvaluated("job-1", 2, 0.125, {}, 8))
    assert (world.state.phase, told_centrally(world)) == (Phase.FINISHED, [1, 2])


def test_clients_wait_while_the_owner_evaluates_a_large_model() -> None:
    world = held_back(up=(TensorMeta((3000, 3000), "float32"),), evaluate_every=0)
    assert (world.state.phase, central(world)) == (Phase.EVALUATING, [1])
    world.step(ev.CentrallyEvaluated("job-1", 1, 0.25, {}, 8))
    assert (world.state.phase, world.state.round, told_centrally(world)) == (Phase.TRAINING, 1, [1])


def test_an_aggregator_that_dies_while_clients_train_evaluates_again() -> None:
    world = held_back(evaluate_every=0)
    world.step(ev.AggregatorBroke("job-1", "killed"))
    assert (world.state.phase, world.state.opened) == (Phase.TRAINING, False)
    world.updates("a", "b")
    world.todo.clear()
    world.open()
    assert [type(item) for item in world.todo] == [do.EvaluateModel, do.AggregateRound]
    assert central(world) == [1]


def test_an_evaluation_that_kills_the_aggregator_twice_is_left() -> None:
    world = held_back(evaluate_every=0)
    for _ in range(2):
        world.step(ev.AggregatorBroke("job-1", "killed"))
        world.open()
    assert central(world) == [1, 1]
    assert [item.worker for item in world.todo if isinstance(item, fed.Without)] == ["the owner's data"]
    world.todo.clear()
    world.updates("a", "b")
    assert [type(item) for item in world.todo if not isinstance(item, Record)] == [do.AggregateRound]


def test_clients_that_evaluate_too_late_do_not_end_the_owners_evaluation() -> None:
    world = held_back(evaluate_every=1)
    assert world.state.phase is Phase.EVALUATING
    world.wait(61.0)
    assert (world.state.phase, world.state.central) == (Phase.TRAINING, True)
    world.step(ev.CentrallyEvaluated("job-1", 1, 0.25, {}, 8))
    assert told_centrally(world) == [1]
