"""Codec of peers' rounds while a job runs: judged once a round, changed by a reconfiguration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.messages.events import Goodput
from coordinator.messages.facts import Reconfigured
from coordinator.messages.jobs import Event, JobState, Phase, PlanChange
from coordinator.pipeline import machine
from coordinator.pipeline.tuning.round_codecs import RoundCodecs
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


def looked(codecs: RoundCodecs, state: JobState, found: list[Event]) -> list[Event]:
    found.clear()
    codecs.look(state)
    return list(found)


def watching() -> tuple[RoundCodecs, list[Event]]:
    found: list[Event] = []
    return RoundCodecs(lambda job, event: found.append(event)), found


def test_a_slow_round_gets_a_codec_and_a_quick_one_loses_it_again() -> None:
    codecs, found = watching()
    state = asking("diloco:auto")
    assert looked(codecs, state, found) == []  # nothing was exchanged yet
    state = after(state, 30.0)
    (event,) = looked(codecs, state, found)
    assert isinstance(event, PlanChange)
    assert event.plan is not None
    assert "in int4_block, in none until now" in event.reason
    assert looked(codecs, state, found) == []  # once a round
    moved, todo = machine.step(state, event, 9.0)
    (fact,) = facts(todo, Reconfigured)
    assert moved.plan is not None
    assert fact.exchange == moved.plan.exchange == replace(DILOCO, codec="int4_block")
    state = after(loaded(moved), 0.001)
    assert state.step == 8
    (event,) = looked(codecs, state, found)
    assert isinstance(event, PlanChange)
    assert event.plan is not None
    assert event.plan.exchange == DILOCO


@pytest.mark.parametrize("asked", ["diloco", "diloco:int8_block", "sparseloco"])
def test_nothing_changes_where_the_job_names_what_it_wants(asked: str) -> None:
    codecs, found = watching()
    assert looked(codecs, after(asking(asked), 100.0), found) == []


def test_a_round_that_fits_changes_nothing() -> None:
    codecs, found = watching()
    assert looked(codecs, after(asking("diloco:auto"), 0.9), found) == []


def test_nothing_changes_after_the_last_round() -> None:
    """An evaluation that is awaited there would be given up for it."""
    codecs, found = watching()
    state = asking("diloco:auto")
    state = replace(state, spec=replace(state.spec, training=replace(state.spec.training, steps=4)))
    state = after(state, 30.0)
    state = replace(state, phase=Phase.EVALUATING, run=replace(state.run, awaiting_eval=4))
    assert (state.step, state.steps) == (4, 4)
    assert looked(codecs, state, found) == []
