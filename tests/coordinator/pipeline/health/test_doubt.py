"""Whether it is the model or a worker shows when a step is done again, whoever reports what."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.microbatch import ScheduleName
from atoll.plan import Plan, StageSpec, one_replica
from coordinator.messages.events import Loaded, StageFailed, StepReady
from coordinator.messages.facts import Checkpoint
from coordinator.messages.jobs import Doubt, JobState
from coordinator.pipeline.health import doubt
from tests.sim.scripted import HASH, Scripted, spec

STATE = JobState("job-1", spec(), Checkpoint(0, {}), 0.0)


def plan(*workers: str) -> Plan:
    stages = tuple(StageSpec(at, at + 1, 0, 0, worker, 1) for at, worker in enumerate(workers))
    return Plan("job-1", 1, HASH, "", "even", ScheduleName.GPIPE, 2, one_replica(2, stages))


def reports(of: Plan, bad: set[str], *, forward: bool = True) -> dict[int, StepReady]:
    """Return what honest ranks report: what is not finite goes up to the loss and down again, or, where it
    arose backwards, only down."""
    ranks = [rank for rank, place in enumerate(of.places) if place.worker in bad]
    top = len(of.places) - 1
    lost = bool(ranks) and forward
    return {
        rank: StepReady(
            "job-1", 1, 0, (math.nan if lost else 1.0,) if rank == top else (),
            finite=not (lost or any(rank <= at for at in ranks)),
        )
        for rank in range(len(of.places))
    }  # fmt: skip


@dataclass
class Tried:
    """What came of a step: ``guilty`` None, the model has diverged."""

    guilty: tuple[str, ...] | None
    tries: int


def tried(fleet: list[str], needed: int, bad: set[str], *, diverges: bool, forward: bool) -> Tried:
    """Do a step again on a fleet whose plans take exactly ``needed`` workers, until it is clear."""
    known: Doubt | None = None
    for tries in range(1, 50):
        choices = doubt.left_out(replace(STATE, doubt=known))
        fleets = [[worker for worker in fleet if worker not in some] for some in choices]
        workers = next(idle for idle in fleets if len(idle) >= needed)[:needed]
        found = reports(plan(*workers), set(workers) if diverges else bad, forward=forward)
        if all(report.finite for report in found.values()):
            assert known is not None
            return Tried(doubt.cleared(known, plan(*workers)), tries)
        known = doubt.doubted(known, plan(*workers), 0, found)
        if doubt.diverged(known):
            return Tried(None, tries)
    raise AssertionError("it never becomes clear")


@given(st.integers(1, 5), st.integers(1, 6), st.booleans(), st.data())
def test_one_bad_worker_is_found_wherever_it_sits_as_long_as_one_can_be_spared(
    needed: int, spare: int, forward: bool, data: st.DataObject
) -> None:
    fleet = [f"w{at}" for at in range(needed + spare)]
    bad = data.draw(st.sampled_from(fleet[:needed]))
    found = tried(fleet, needed, {bad}, diverges=False, forward=forward)
    assert found.guilty is not None
    assert bad in found.guilty
    assert found.tries <= needed + 1
    if not forward:  # what arose backwards shows where, at once
        assert found == Tried((bad,), 2)


@given(st.integers(1, 5), st.integers(0, 6))
def test_a_model_that_diverges_is_believed_after_few_tries(needed: int, spare: int) -> None:
    fleet = [f"w{at}" for at in range(needed + spare)]
    found = tried(fleet, needed, set(), diverges=True, forward=True)
    assert found.guilty is None
    assert found.tries <= needed + 1
    if spare >= needed:
        assert found.tries <= 3


def test_a_fleet_without_a_spare_tries_twice() -> None:
    assert tried(["a", "b"], 2, {"a"}, diverges=False, forward=True) == Tried(None, 2)


@pytest.mark.parametrize("said", [{"losses": (math.nan,)}, {"losses": (-math.inf,)}, {}])
def test_the_likeliest_is_whoever_reports_it_nearest_to_the_loss(said: dict[str, Any]) -> None:
    found = reports(plan("a", "b", "c"), set())
    found[1] = replace(found[1], finite=False)
    assert doubt.doubted(None, plan("a", "b", "c"), 0, found).suspects == ("b", "c", "a")
    found[2] = StepReady("job-1", 1, 0, **{"losses": (1.0,), "finite": False, **said})
    assert doubt.doubted(None, plan("a", "b", "c"), 0, found).suspects == ("c", "b", "a")


def test_another_step_is_another_doubt() -> None:
    found = reports(plan("a", "b"), {"a"})
    first = doubt.doubted(None, plan("a", "b"), 0, found)
    assert len(doubt.doubted(first, plan("a", "b"), 1, found).tries) == 1
    assert len(doubt.doubted(first, plan("a", "b"), 0, found).tries) == 2


def test_a_worker_whose_stage_fails_gives_its_place_to_a_spare_one() -> None:
    world = Scripted().training("a", "b", "c")
    world.says("b", StageFailed("job-1", world.state().version, 0, "its driver is broken"))
    assert world.holders() == ["a", "c"]
    world.load()
    for _ in range(3):
        world.step()
    assert world.state().step == 3


def test_a_worker_whose_stage_fails_is_used_where_the_fleet_needs_it() -> None:
    world = Scripted().training("a", "b")
    for _ in range(2):
        world.says("b", StageFailed("job-1", world.state().version, 0, "its driver is broken"))
    assert world.holders() == ["a", "b"]
    world.says("a", Loaded("job-1", world.state().version))
    assert world.state().phase.value == "loading"


def test_what_the_owner_sees_of_a_doubt_names_the_worker_and_the_reason() -> None:
    world = Scripted().training("a", "b", "c")
    world.ready("a", finite=False)
    assert world.state().phase.value == "training"
    world.ready("b", losses=(math.nan,), finite=False)
    assert world.holders() == ["a", "c"]
    suspected = world.scheduler.roster.workers["b"]
    assert "suspected: loss became nan at step 1 on stage 1 on b" in suspected.reason
    world.load()
    world.step()
    assert (
        suspected.quarantined == "b: loss became nan at step 1 on stage 1 on b, finite without it; for 60 s"
    )
    assert suspected.suspected == ""
