"""Other neighbours for the same stage: what is kept, given up or done first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.messages.to_worker import Era, Replay
from tests.worker.session.test_machine import (
    EVALUATING,
    JOINED,
    LOADED,
    TRAINING,
    WAITING,
    assigned,
    commit,
    failures,
    invited,
    kept,
    moved,
    relinked,
    through,
    told,
)
from worker.session import events as e
from worker.session import instructions as do
from worker.session.machine import Phase, Session
from worker.session.state import Held, held

RECONFIGURE = do.Reconfigure(moved(2, step=4))


@pytest.mark.parametrize(
    "before",
    [
        LOADED,
        TRAINING,
        WAITING,
        (*TRAINING, e.PeerLost("w-b", "reset")),
        (*TRAINING, e.StageFailed("j", 1, 4, "no answer", "w-b")),
        (*TRAINING, e.StepDiscard("j", 1, 4, "again")),
    ],
)
def test_a_stage_stays_and_the_step_in_flight_begins_anew_with_other_neighbours(before: tuple[e.Event, ...]):
    state, _ = told(Session(), *before)
    state, todo = told(state, moved())
    assert todo == [RECONFIGURE]
    assert (state.phase, state.peers, state.unacknowledged) == (Phase.LOADING, frozenset({"w-c"}), ())
    late = (e.StepReady("j", 1, 4), commit(4), e.Loaded("j", 1), moved())
    assert told(state, *late)[1] == []
    state, todo = told(state, e.Loaded("j", 2), e.StepStart("j", 2, 4))
    assert todo == [do.Send(e.Loaded("j", 2)), do.RunStep("j", 2, 4)]
    again = replace(commit(4), version=2)
    state, todo = told(state, e.StepReady("j", 2, 4), again, e.StepApplied("j", 2, 4))
    assert todo[-1] == do.RunStep("j", 2, 5)


@pytest.mark.parametrize("flags", [{}, {"evaluate": True}, {"last": True}, {"store": True}])
def test_what_is_applied_goes_first_and_its_evaluation_is_left_out(flags: dict[str, bool]):
    state, todo = told(Session(), *WAITING, commit(4, **flags), moved(step=5))
    assert (state.phase, held(state)) == (Phase.APPLYING, Held("j", 1, 4, loaded=True, ready=True))
    assert not any(isinstance(i, do.Reconfigure) for i in todo)
    state, todo = told(state, e.StepApplied("j", 1, 4))
    assert todo == [do.Reconfigure(moved(2, step=5))]
    assert held(state) == Held("j", 2, 5, loaded=False, ready=False)
    _, todo = told(state, kept(1, 4))
    assert todo == [do.Send(kept(1, 4))], "a snapshot is of the version of its step"


def test_the_newest_of_two_that_wait_for_an_apply_counts():
    state, _ = told(Session(), *WAITING, commit(4), moved(step=5), moved(3, step=5), moved(step=5))
    assert told(state, e.StepApplied("j", 1, 4))[1] == [do.Reconfigure(moved(3, step=5))]


def test_an_apply_that_breaks_leaves_nothing_to_go_on_with():
    state, _ = told(Session(), *WAITING, commit(4), moved(step=5), e.StageFailed("j", 1, 4, "disk"))
    (failed,) = failures(told(state, moved(3, step=5))[1])
    assert "not whole" in failed.reason


def test_an_evaluation_under_way_is_left_for_the_next_neighbours():
    state, todo = told(Session(), *EVALUATING, moved(step=5))
    assert [type(i) for i in todo[-2:]] == [do.Interrupt, do.Reconfigure]
    assert told(state, e.EvalReady("j", 1, 4, None))[1] == []


def test_an_evaluation_that_lost_a_neighbour_leaves_the_stage_as_it_was_after_the_step():
    state, todo = told(Session(), *EVALUATING, e.PeerLost("w-b", "reset"))
    assert [(f.version, f.step, f.lost_peer) for f in failures(todo)] == [(1, 4, "w-b")]
    assert told(state, moved(step=5))[1] == [do.Reconfigure(moved(2, step=5))]


def test_a_second_loss_while_the_first_is_being_replaced():
    state, _ = told(Session(), *WAITING, moved())
    broke = e.StageFailed("j", 2, 0, "cannot connect", "w-c")
    state, todo = told(state, broke)
    assert [(f.version, f.step) for f in failures(todo)] == [(2, 4)]
    state, todo = told(state, moved(3))
    assert todo == [do.Reconfigure(moved(3, step=4))]
    state, todo = told(state, moved(4), e.Loaded("j", 3), e.Loaded("j", 4))
    assert todo == [do.Reconfigure(moved(4, step=4)), do.Send(e.Loaded("j", 4))]
    assert told(state, e.StepStart("j", 4, 4))[1] == [do.RunStep("j", 4, 4)]


@pytest.mark.parametrize(
    ("before", "asked", "why"),
    [
        (JOINED, moved(), "holds no stage"),
        (TRAINING, moved(job="k"), "holds no stage"),
        ((*JOINED, invited("j")), moved(), "holds no stage"),
        ((*JOINED, assigned()), moved(), "not whole"),
        ((*TRAINING, e.StageFailed("j", 1, 4, "killed", gone=True)), moved(), "not whole"),
        (TRAINING, moved(step=5), "after 4 steps, not 5"),
        (WAITING, moved(step=3), "after 4 steps, not 3"),
        ((*WAITING, commit(4)), moved(step=4), "after 4 steps, not 4"),
        (TRAINING, moved(4, base=3), "older than plan 3"),
    ],
)
def test_what_does_not_fit_is_said(before: tuple[e.Event, ...], asked: e.Reconfigure, why: str):
    state, _ = told(Session(), *before)
    after, todo = told(state, asked)
    (failed,) = failures(todo)
    assert why in failed.reason
    assert (failed.job, failed.version, failed.step) == (asked.job, asked.version, asked.step)
    assert not any(isinstance(i, do.Reconfigure) for i in todo)
    assert after.job == state.job
    if state.job == asked.job:
        assert isinstance(told(after, e.Release("j", asked.version, "back"))[1][-1], e.Release)


def test_links_that_have_not_begun_are_forgotten():
    state, _ = told(Session(), *WAITING, relinked(4), e.StepApplied("j", 1, 4), moved(3, step=5))
    assert state.eras == ((0, 1), (5, 3))
    state, _ = told(state, e.Loaded("j", 3), e.StepStart("j", 3, 5))
    assert through(state, 5, 6).version == 3


def test_steps_that_are_repeated_are_reported_under_the_versions_that_they_had():
    news = replace(assigned(4, first_step=9), replay=Replay(5, (Era(1, 0, ()), Era(3, 6, ())), (1.0,) * 4))
    state, todo = told(Session(), *JOINED, news)
    assert todo == [news]
    assert [state.version_at(step) for step in (5, 6, 8, 9)] == [1, 3, 3, 4]
    state, todo = told(state, kept(3, 8), e.Loaded("j", 4))
    assert todo == [do.Send(kept(3, 8)), do.Send(e.Loaded("j", 4))]
    assert told(state, e.StepStart("j", 4, 9))[1] == [do.RunStep("j", 4, 9)]


def test_a_stage_that_cannot_be_repeated_names_the_step_that_waits_for_it():
    news = replace(assigned(4, first_step=9), replay=Replay(6, (Era(3, 6, ()),), (1.0,) * 3))
    state, _ = told(Session(), *JOINED, news)
    (failed,) = failures(told(state, e.StageFailed("j", 4, 0, "a message is missing"))[1])
    assert (failed.version, failed.step) == (4, 9)


def test_a_coordinator_of_a_smaller_term_reconfigures_nothing():
    state, _ = told(Session(), e.Welcome("w-a", 0.5, term=2), *TRAINING[1:], e.Welcome("w-a", 0.5, term=1))
    assert told(state, moved())[1] == []
