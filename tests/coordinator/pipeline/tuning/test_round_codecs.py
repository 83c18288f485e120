"""Codec of peers' rounds while a job runs: judged once a round, changed by a reconfiguration."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.messages.events import Goodput
from coordinator.messages.facts import Reconfigured
from coordinator.messages.jobs import Event, JobState, Phase, PlanChange
from coordinator.pipeline import machine
from coordinator.pipeline.changes.choice import Changes
from coordinator.pipeline.tuning.rounds import Rounds
from tests.coordinator.pipeline.test_periods import DILOCO, facts, loaded, ready, training


def asking(asked: str) -> JobState:
    state = training(DILOCO, steps=20)
    wanted = replace(state.spec.training, exchange=asked)
    return replace(state, spec=replace(state.spec, training=wanted))


def after(state: JobState, busy_s: float) -> JobState:
    """After a period of four steps of a second each, whose round the links carried for so long."""
    for rank in state.present:
        link = Goodput(f"w{(rank + 1) % 3}", 10**6, busy_s, 0.01)
        state, _ = machine.step(state, ready(state, rank, forward_s=0.5, backward_s=0.5, links=(link,)), 9.0)
    return state


def looked(state: JobState) -> list[PlanChange]:
    return list(Rounds(SimpleNamespace(now_s=0.0)).candidates(state))  # type: ignore[arg-type]


def test_a_slow_round_gets_a_codec_and_a_quick_one_loses_it_again() -> None:
    state = asking("diloco:auto")
    assert looked(state) == []  # nothing was exchanged yet
    state = after(state, 30.0)
    (event,) = looked(state)
    assert event.plan is not None
    assert "in int4_block, in none until now" in event.reason
    moved, todo = machine.step(state, event, 9.0)
    assert looked(moved) == []  # until another round has shown what it carries
    (fact,) = facts(todo, Reconfigured)
    assert moved.plan is not None
    assert fact.exchange == moved.plan.exchange == replace(DILOCO, codec="int4_block")
    state = after(loaded(moved), 0.001)
    assert state.step == 8
    (event,) = looked(state)
    assert event.plan is not None
    assert event.plan.exchange == DILOCO


@pytest.mark.parametrize("asked", ["diloco", "diloco:int8_block", "sparseloco"])
def test_nothing_changes_where_the_job_names_what_it_wants(asked: str) -> None:
    assert looked(after(asking(asked), 100.0)) == []


def test_a_round_that_fits_changes_nothing() -> None:
    assert looked(after(asking("diloco:auto"), 0.9)) == []


def test_nothing_changes_after_the_last_round() -> None:
    """An evaluation that is awaited there would be given up for it."""
    state = asking("diloco:auto")
    state = replace(state, spec=replace(state.spec, training=replace(state.spec.training, steps=4)))
    state = after(state, 30.0)
    state = replace(state, phase=Phase.EVALUATING, run=replace(state.run, awaiting_eval=4))
    assert (state.step, state.steps) == (4, 4)
    found = list[Event]()
    effects = cast("Any", SimpleNamespace(now_s=0.0, storage=""))
    rounds = Rounds(effects).candidates
    assert list(rounds(state)), "before the last round it would"
    Changes(effects, lambda job, event: found.append(event), lambda: None, rounds, ()).look(state)
    assert found == []
