"""New links of a stage: announced by a commit, taken over at a step border."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.worker.session.test_machine import (
    JOINED,
    TRAINING,
    WAITING,
    assigned,
    commit,
    kept,
    relinked,
    through,
    told,
)
from worker.session import events as e
from worker.session import instructions as do
from worker.session import machine as s
from worker.session.machine import Phase, Session, handle


def test_new_links_are_made_before_the_step_in_front_of_theirs_and_take_over_at_it():
    state, todo = told(Session(), *WAITING, relinked(4), e.StepApplied("j", 1, 4))
    assert todo[-2:] == [
        relinked(4),
        do.RunStep("j", 1, 5),
    ]
    state, todo = told(state, e.StepReady("j", 1, 5), commit(5), e.StepApplied("j", 1, 5))
    assert todo[-2:] == [commit(5), do.RunStep("j", 2, 6)]
    assert (state.version, state.phase) == (2, Phase.TRAINING)
    state, todo = told(state, e.StepReady("j", 2, 6))
    assert todo == [do.Send(e.StepReady("j", 2, 6))]


def test_before_the_step_the_new_version_is_strange_and_after_it_the_old_one():
    state, _ = told(Session(), *WAITING, relinked(4), e.StepApplied("j", 1, 4), e.StepReady("j", 1, 5))
    after, _ = handle(state, e.StepCommit("j", 2, 5, 1.0, False, False, False))
    assert after.ignored == state.ignored + 1
    state, _ = told(state, commit(5), e.StepApplied("j", 1, 5), e.StepReady("j", 2, 6))
    after, _ = handle(state, commit(6))
    assert after.ignored == state.ignored + 1
    after, todo = handle(state, e.StepCommit("j", 2, 6, 1.0, False, False, False))
    assert todo == (e.StepCommit("j", 2, 6, 1.0, False, False, False),)


def test_the_evaluation_and_the_snapshot_of_the_last_old_step_are_still_of_the_old_version():
    state, _ = told(Session(), *WAITING, relinked(4), e.StepApplied("j", 1, 4), e.StepReady("j", 1, 5))
    state, todo = told(state, commit(5, evaluate=True, store=True), e.StepApplied("j", 1, 5))
    assert todo[-1] == do.Evaluate(commit(5, evaluate=True, store=True))
    state, todo = told(state, e.EvalReady("j", 1, 5, None))
    assert todo == [do.Send(e.EvalReady("j", 1, 5, None)), do.RunStep("j", 2, 6)]
    state = through(state, 6, 7)
    _, todo = told(state, kept(1, 5))
    assert todo == [do.Send(kept(1, 5))]


def test_new_links_outlive_the_discard_of_the_step_between():
    state, _ = told(Session(), *WAITING, relinked(4), e.StepApplied("j", 1, 4))
    state, todo = told(state, e.StepDiscard("j", 1, 5, "again"), e.StepStart("j", 1, 5))
    assert todo == [e.StepDiscard("j", 1, 5, "again"), do.RunStep("j", 1, 5)]
    state = through(state, 5)
    assert (state.version, state.step) == (2, 6)


@pytest.mark.parametrize("version", [1, 2])
def test_a_discard_and_a_release_may_name_either_version(version: int):
    for steps in ((), (5,)):  # the new links wait, or have just begun
        state, _ = told(Session(), *WAITING, relinked(4), e.StepApplied("j", 1, 4))
        state = through(state, *steps)
        discarded, todo = told(state, e.StepDiscard("j", version, state.step, "stage 1 failed"))
        assert todo == [e.StepDiscard("j", version, state.step, "stage 1 failed")]
        assert discarded.phase is Phase.READY
        _, todo = told(state, e.Release("j", version, "done"))
        assert isinstance(todo[-1], e.Release)


def test_a_new_plan_replaces_links_that_have_not_begun_even_under_their_number():
    state, _ = told(Session(), *WAITING, relinked(4), e.StepApplied("j", 1, 4))
    state, todo = told(state, assigned(2))
    assert todo[-1] == assigned(2)
    assert state.eras == ((0, 2),)


def test_a_plan_and_a_release_from_before_the_assignment_stay_ignored_after_new_links():
    state, _ = told(Session(), *JOINED, assigned(3, first_step=0), e.Loaded("j", 3), e.StepStart("j", 3, 0))
    relink = e.Relink(4, 2)
    for step, carried in ((0, relink), (1, None)):
        told_commit = e.StepCommit("j", 3, step, 1.0, False, False, False, carried)
        state, _ = told(state, e.StepReady("j", 3, step), told_commit, e.StepApplied("j", 3, step))
    assert state.version == 4
    for late in (assigned(3), assigned(4), e.Release("j", 2, "late")):
        after, todo = handle(state, late)
        assert todo == ()
        assert after.ignored == state.ignored + 1


def test_a_commit_repeated_after_a_lost_connection_brings_the_new_links_once():
    state, _ = told(Session(), *WAITING, e.Disconnected("reset", 0.0), e.Welcome("w-a", 0.5))
    state, todo = told(state, relinked(4), relinked(4), e.StepApplied("j", 1, 4), relinked(4))
    assert [type(i) for i in todo] == [e.StepCommit, do.RunStep]
    assert state.eras == ((0, 1), (6, 2))


@pytest.mark.parametrize("wrong", [e.Relink(1, 6), e.Relink(2, 5), e.Relink(0, 9)])
def test_new_links_that_cannot_be_are_a_failure_that_only_a_new_plan_heals(wrong: e.Relink):
    state, todo = told(Session(), *WAITING, commit(4, relink=wrong))
    (failed,) = [i.message for i in todo if isinstance(i, do.Send) and isinstance(i.message, do.StageFailed)]
    assert "too late" in failed.reason
    assert not any(isinstance(i, e.StepCommit) for i in todo)
    assert (state.phase, state.whole) == (Phase.FAILED, False)


def test_later_words_about_links_that_have_not_begun_replace_the_earlier():
    state, _ = told(Session(), *WAITING, relinked(4, 2, 9), e.StepApplied("j", 1, 4))
    state, _ = told(state, e.StepReady("j", 1, 5), relinked(5, 3, 7), e.StepApplied("j", 1, 5))
    assert state.eras == ((0, 1), (7, 3))
    assert [through(state, 6).version, through(state, 6, 7, 8).version] == [3, 3]


def test_what_is_remembered_of_many_new_links_is_bounded():
    state, _ = told(Session(), *TRAINING)
    for step in range(4, 4 + 3 * s.MAX_ERAS):
        version = state.version_at(step)
        relink = e.Relink(state.versions[-1] + 1, step + 2)
        said = replace(commit(step, relink=relink), version=version)
        done, applied = e.StepReady("j", version, step), e.StepApplied("j", version, step)
        state, _ = told(state, done, said, applied)
    assert state.step == 4 + 3 * s.MAX_ERAS
    assert len(state.eras) <= s.MAX_ERAS + 2
    assert state.assigned == 1
