"""A job whose data stay with one worker: its owner's word, and nobody in its place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.dataset_spec import DataSpec, PinnedData
from atoll.federated import ConsentWord as Word
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.jobs import Phase
from tests.sim.scripted import Scripted, spec

PINNED = DataSpec((), 8, 1, 0, PinnedData("a", "diary", {"x": "text"}))


class Owned(Scripted):
    """Whose planner makes no plan without ``a``."""

    def plan(self, asked: do.MakePlan) -> ev.Event:
        if "a" in asked.fleet.index:
            return super().plan(asked)
        return ev.PlanFailed(asked.job, asked.attempt, "worker a has the job's data", hopeless=False)


def submitted() -> Scripted:
    """A job around the data of ``a``, which is the first to join, while its stages load."""
    world = Owned()
    world.join("a", "b", "c")
    world.submit(what=replace(spec(), data=PINNED))
    assert world.holders() == ["a", "b"]
    return world


def says(world: Scripted, word: Word, reason: str = "its data owner has not said") -> None:
    world.says("a", ev.ConsentSaid("job-1", word, reason))


def training() -> Scripted:
    world = submitted()
    world.load()
    world.step()
    return world


def test_it_waits_for_the_owners_word_and_goes_on_with_it() -> None:
    world = submitted()
    says(world, Word.AWAITED)
    assert world.state().phase is Phase.PAUSED
    assert world.state().reason.startswith("a: its data owner has not said")
    assert world.to("a", do.Release) == []  # it holds nothing, and must not hear that the job is over
    assert len(world.to("b", do.Release)) == 1
    world.join("d")  # another fleet is no consent
    world.wait(5.0)
    assert world.state().phase is Phase.PAUSED
    says(world, Word.GIVEN)
    assert world.state().phase is Phase.LOADING
    world.load()
    world.step()
    assert world.state().step == 1
    assert world.state().failures == 0


def test_a_refusal_ends_it_and_names_whose() -> None:
    world = submitted()
    says(world, Word.REFUSED, "not this one")
    assert world.state().phase is Phase.FAILED
    assert world.state().reason.startswith("a: not this one")


def test_a_word_that_is_taken_back_stops_a_running_job() -> None:
    world = training()
    says(world, Word.AWAITED)
    assert world.state().phase is Phase.PAUSED


def test_who_is_asked_hears_that_the_job_is_over() -> None:
    world = submitted()
    says(world, Word.AWAITED)
    world.handle(ev.CancelAsked("job-1"))
    assert [m.reason for m in world.to("a", do.Release)] == ["the job is cancelled"]
    says(world, Word.GIVEN)
    assert world.state().phase is Phase.CANCELLED


@pytest.mark.parametrize("worker", ["b", "c"])
def test_nobody_else_speaks_for_the_owner(worker: str) -> None:
    world = submitted()
    world.says(worker, ev.ConsentSaid("job-1", Word.REFUSED, "mine"))
    assert world.state().phase is Phase.LOADING


def test_nobody_takes_the_owners_place() -> None:
    world = training()
    world.lose("a")
    world.wait(0.5)
    assert world.state().phase in (Phase.PAUSED, Phase.QUEUED)
    assert "worker a has the job's data" in world.state().reason
    world.join("a")
    world.wait(0.5)
    assert world.holders() == ["a", "b"]


def test_a_helpers_place_is_taken_as_any_others() -> None:
    world = training()
    world.lose("b")
    world.wait(0.5)
    assert world.holders() == ["a", "c"]
