"""The worker's session machine: whatever the internet does to messages, the work stays in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.messages.to_worker import Paths, PeerLink, RankPeer
from protos import atoll_control_pb2 as pb
from worker.session import events as e
from worker.session import instructions as do
from worker.session import machine as s
from worker.session.machine import Phase, Session, handle
from worker.session.state import Held, held


def told(state: Session, *events: e.Event) -> tuple[Session, list[do.Instruction]]:
    """Handle events in a row; returns every instruction."""
    todo: list[do.Instruction] = []
    for event in events:
        state, more = handle(state, event)
        todo.extend(more)
    return state, todo


def commit(step: int, **flags: Any) -> e.StepCommit:
    chosen = {"store": False, "evaluate": False, "last": False, **flags}
    return e.StepCommit("j", 1, step, 1.0, **chosen)


def relinked(step: int, version: int = 2, first_step: int = 6) -> e.StepCommit:
    """A commit that announces new links."""
    return commit(step, relink=e.Relink(version, first_step))


def through(state: Session, *steps: int) -> Session:
    """Each of the steps computed, committed and applied, under the version it runs under."""
    for step in steps:
        version = state.version_at(step)
        done, applied = e.StepReady("j", version, step), e.StepApplied("j", version, step)
        state, _ = told(state, done, replace(commit(step), version=version), applied)
    return state


def peer(name: str) -> RankPeer:
    return RankPeer(1, PeerLink(name, Paths()))


def assigned(version: int = 1, job: str = "j", first_step: int = 4, **more: Any) -> e.Assign:
    return e.Assign(job, version, (peer("w-b"),), first_step, pb.Assign(), **more)


def invited(job: str = "f") -> e.Participate:
    return e.Participate(job, 1, pb.Participate())


def kept(version: int, step: int) -> e.StateStored:
    return e.StateStored("j", version, step, {})


OPS = e.ProbeOps(1, pb.ProbeOps())
LINK = e.ProbeLink(2, PeerLink("w-b", Paths()), 1.0, 100)


JOINED: tuple[e.Event, ...] = (e.Welcome("w-a", 0.5),)
LOADED: tuple[e.Event, ...] = (*JOINED, assigned(), e.Loaded("j", 1))
TRAINING: tuple[e.Event, ...] = (*LOADED, e.StepStart("j", 1, 4))
WAITING: tuple[e.Event, ...] = (*TRAINING, e.StepReady("j", 1, 4))
EVALUATING: tuple[e.Event, ...] = (*WAITING, commit(4, evaluate=True), e.StepApplied("j", 1, 4))


def moved(version: int = 2, step: int = 4, base: int = 1, job: str = "j") -> e.Reconfigure:
    return e.Reconfigure(job, version, base, step, (peer("w-c"),), pb.Reconfigure())


def failures(todo: list[do.Instruction]) -> list[do.StageFailed]:
    sent = (i.message for i in todo if isinstance(i, do.Send))
    return [message for message in sent if isinstance(message, do.StageFailed)]


def test_a_start_of_another_step_than_the_next_is_ignored():
    state, _ = told(Session(), *LOADED)
    assert told(state, e.StepStart("j", 1, 3))[1] == []
    state, _ = told(state, e.StepStart("j", 1, 4), e.StepReady("j", 1, 4))
    state, _ = told(state, replace(commit(4), last=True), e.StepApplied("j", 1, 4))
    assert state.phase is Phase.READY
    state, todo = told(state, e.StepStart("j", 1, 4))
    assert (state.phase, todo) == (Phase.READY, [])


def test_a_step_goes_from_start_to_ready_to_commit_to_the_next():
    state, todo = told(Session(), *WAITING, commit(4), e.StepApplied("j", 1, 4))
    assert todo == [
        assigned(),
        do.Send(e.Loaded("j", 1)),
        do.RunStep("j", 1, 4),
        do.Send(e.StepReady("j", 1, 4)),
        commit(4),
        do.RunStep("j", 1, 5),
    ]
    assert state.phase is Phase.TRAINING
    assert state.step == 5


def test_the_last_commit_leaves_the_stage_ready():
    state, todo = told(Session(), *WAITING, commit(4, last=True), e.StepApplied("j", 1, 4))
    assert state.phase is Phase.READY
    assert not any(isinstance(i, do.RunStep) and i.step == 5 for i in todo)


def test_evaluation_comes_between_the_commit_and_the_next_step():
    state, todo = told(Session(), *WAITING, commit(4, evaluate=True), e.StepApplied("j", 1, 4))
    assert state.phase is Phase.EVALUATING
    assert todo[-1] == do.Evaluate(commit(4, evaluate=True))
    state, todo = told(state, e.EvalReady("j", 1, 4, None))
    assert todo == [do.Send(e.EvalReady("j", 1, 4, None)), do.RunStep("j", 1, 5)]


def test_storing_goes_on_beside_the_next_step():
    state, todo = told(Session(), *WAITING, commit(4, store=True), e.StepApplied("j", 1, 4))
    assert commit(4, store=True) in todo
    state, todo = told(state, kept(1, 4))
    assert todo == [do.Send(kept(1, 4))]
    assert state.phase is Phase.TRAINING


def test_a_lost_coordinator_disturbs_no_computation_and_hears_the_result_again():
    state, _ = told(Session(), *WAITING)
    state, todo = told(state, e.Disconnected("reset", jitter=1.0))
    assert todo == [do.Reconnect(s.BACKOFF_FIRST_S, "reset")]
    assert state.phase is Phase.WAITING
    state, todo = told(state, e.Welcome("w-a", 0.5))
    assert todo == [do.Send(e.StepReady("j", 1, 4))]
    state, todo = told(state, commit(4))
    assert todo == [commit(4)]


def test_a_result_that_was_answered_is_not_said_again():
    state, _ = told(Session(), *WAITING, commit(4), e.StepApplied("j", 1, 4))
    _, todo = told(state, e.Disconnected("reset", 0.0), e.Welcome("w-a", 0.5))
    assert [i for i in todo if isinstance(i, do.Send)] == []


def test_a_result_finished_while_the_coordinator_is_away_is_kept():
    state, _ = told(Session(), *TRAINING, e.Disconnected("reset", 0.0), e.StepReady("j", 1, 4))
    _, todo = told(state, e.Welcome("w-a", 0.5))
    assert todo == [do.Send(e.StepReady("j", 1, 4))]


def test_back_off_grows_to_its_bound_and_starts_anew_after_a_welcome():
    state, _ = told(Session(), *JOINED)
    waits = []
    for _ in range(10):
        state, todo = told(state, e.Disconnected("away", jitter=1.0))
        waits += [i.after_s for i in todo if isinstance(i, do.Reconnect)]
    assert waits == sorted(waits)
    assert waits[-1] == s.BACKOFF_MOST_S
    state, todo = told(state, e.Welcome("w-a", 0.5), e.Disconnected("away", jitter=1.0))
    assert todo[-1] == do.Reconnect(s.BACKOFF_FIRST_S, "away")


def test_who_holds_a_stage_comes_back_sooner_as_others_wait_for_it():
    state, _ = told(Session(), *TRAINING)
    waits = []
    for _ in range(8):
        state, todo = told(state, e.Disconnected("away", jitter=1.0))
        waits += [i.after_s for i in todo if isinstance(i, do.Reconnect)]
    assert waits[:3] == [0.2, 0.4, 0.8]
    assert set(waits[3:]) == {s.BACKOFF_STAGED_S}


@pytest.mark.parametrize(
    "late",
    [
        commit(3),
        commit(5),
        e.StepCommit("j", 2, 4, 1.0, False, False, False),
        e.StepCommit("other", 1, 4, 1.0, False, False, False),
        e.StepStart("j", 1, 4),
        e.StepDiscard("j", 1, 3, "late"),
        e.Release("other", 1, "late"),
        e.StepReady("j", 1, 3),
        assigned(),
    ],
)
def test_late_and_duplicate_messages_change_nothing_and_are_counted(late: e.Event):
    state, _ = told(Session(), *WAITING)
    after, todo = handle(state, late)
    assert todo == ()
    assert after.ignored == state.ignored + 1
    assert (after.phase, after.step, after.unacknowledged) == (state.phase, state.step, state.unacknowledged)


def test_a_duplicate_commit_after_the_step_is_ignored():
    state, _ = told(Session(), *WAITING, commit(4), e.StepApplied("j", 1, 4))
    after, todo = handle(state, commit(4))
    assert todo == ()
    assert after.step == 5


def test_a_release_drops_everything_of_the_job():
    state, todo = told(Session(), *TRAINING, e.Release("j", 1, "done"))
    assert todo[-1] == e.Release("j", 1, "done")
    assert (state.phase, state.job, state.unacknowledged) == (Phase.IDLE, "", ())
    _, todo = told(state, e.StepReady("j", 1, 4))
    assert todo == []


def test_a_new_plan_version_replaces_the_old_one_at_any_moment():
    for before in (LOADED, TRAINING, WAITING):
        state, _ = told(Session(), *before)
        state, todo = told(state, assigned(2))
        assert [type(i) for i in todo] == [e.Release, e.Assign]
        assert (state.phase, state.version) == (Phase.LOADING, 2)


def test_an_older_plan_version_is_ignored():
    state, _ = told(Session(), *JOINED, assigned(3))
    after, todo = handle(state, assigned(2))
    assert todo == ()
    assert after.version == 3


def test_a_discard_undoes_the_step_and_waits_for_a_start():
    for before in (TRAINING, WAITING):
        state, _ = told(Session(), *before)
        state, todo = told(state, e.StepDiscard("j", 1, 4, "loss is NaN"))
        assert todo == [e.StepDiscard("j", 1, 4, "loss is NaN")]
        assert state.phase is Phase.READY
        _, todo = told(state, e.Disconnected("reset", 0.0), e.Welcome("w-a", 0.5))
        assert do.Send(e.StepReady("j", 1, 4)) not in todo


def test_a_broken_step_is_told_and_then_discarded():
    state, todo = told(Session(), *TRAINING, e.StageFailed("j", 1, 4, "out of memory"))
    assert todo[-1] == do.Send(do.StageFailed("j", 1, 4, "out of memory"))
    assert state.phase is Phase.FAILED
    state, todo = told(state, e.StepDiscard("j", 1, 4, "stage 1 failed"))
    assert state.phase is Phase.READY


def test_a_broken_apply_can_only_be_replaced_by_a_new_plan():
    state, _ = told(Session(), *WAITING, commit(4), e.StageFailed("j", 1, 4, "disk"))
    after, todo = handle(state, e.StepDiscard("j", 1, 4, "again"))
    assert todo == ()
    after, todo = handle(after, assigned(2))
    assert after.phase is Phase.LOADING


def test_a_lost_neighbour_interrupts_the_step_and_is_named():
    state, todo = told(Session(), *TRAINING, e.PeerLost("w-b", "silent for 2 s"))
    assert isinstance(todo[-2], do.Interrupt)
    assert todo[-1] == do.Send(do.StageFailed("j", 1, 4, "lost w-b: silent for 2 s", "w-b"))
    assert state.phase is Phase.FAILED


def test_a_lost_stranger_disturbs_nothing():
    state, _ = told(Session(), *TRAINING)
    after, todo = handle(state, e.PeerLost("w-z", "left"))
    assert todo == ()
    assert after.phase is Phase.TRAINING


def test_probing_is_refused_while_there_is_work():
    state, todo = told(Session(), *JOINED, OPS, LINK)
    assert todo == [OPS, LINK]
    state, _ = told(state, assigned())
    _, todo = told(state, OPS, LINK)
    assert todo == [
        do.Send(do.OpsProbed(1, {}, "busy: loading")),
        do.Send(do.LinkProbed(2, "w-b", 0.0, 0.0, "busy: loading")),
    ]


def test_leaving_says_so_drops_the_work_and_ends():
    state, todo = told(Session(), *TRAINING, e.LeaveAsked("Ctrl+C"))
    assert todo[-3:] == [
        e.Release("j", 1, "Ctrl+C"),
        do.Send(do.Leaving("Ctrl+C")),
        do.Quit("Ctrl+C", dismissed=False),
    ]
    state, todo = told(state, commit(4), e.Disconnected("gone", 0.0), e.Drained())
    assert todo == []
    assert state.phase is Phase.GONE


def test_a_dismissed_worker_leaves_without_a_word():
    state, todo = told(Session(), *TRAINING, e.Dismiss("kicked", for_good=True))
    assert todo[-1] == do.Quit("kicked", dismissed=True, for_good=True)
    assert state.phase is Phase.DRAINING


# ---------------------------------------------------------------- two coordinators


def test_a_coordinator_of_a_smaller_term_is_hung_up_on_and_nothing_it_says_counts():
    state, _ = told(Session(), e.Welcome("w-a", 0.5, term=3), *WAITING[1:], e.Disconnected("reset", 0.0))
    state, todo = told(state, e.Welcome("w-a", 0.5, term=2))
    (hang_up,) = todo
    assert isinstance(hang_up, do.HangUp)
    assert "term 2 answers, and one of term 3 commands" in hang_up.reason
    orders = (
        commit(4),
        e.StepDiscard("j", 1, 4, "why"),
        assigned(2),
        e.Release("j", 1, "why"),
        OPS,
    )
    for order in orders:
        after, todo = told(state, order)
        assert todo == []
        assert after.ignored == state.ignored + 1
    state, todo = told(state, e.Disconnected("hung up", jitter=1.0))
    assert [type(i) for i in todo] == [do.Reconnect]
    state, todo = told(state, e.Welcome("w-a", 0.5, term=3), commit(4))
    assert todo == [do.Send(e.StepReady("j", 1, 4)), commit(4)]


def test_a_coordinator_of_a_greater_term_is_obeyed_and_work_goes_on_meanwhile():
    state, _ = told(Session(), *TRAINING, e.Disconnected("reset", 0.0), e.Welcome("w-a", 0.5, term=9))
    assert (state.term, state.outdated) == (9, False)
    state, _ = told(state, e.Disconnected("reset", 0.0), e.Welcome("w-a", 0.5, term=8))
    state, todo = told(state, e.StepReady("j", 1, 4))
    assert (state.phase, state.outdated) == (Phase.WAITING, True)
    state, todo = told(state, e.Disconnected("hung up", 0.0), e.Welcome("w-a", 0.5, term=10))
    assert todo[-1] == do.Send(e.StepReady("j", 1, 4))


def test_a_worker_that_never_saw_a_coordinator_takes_any_and_one_refused_waits_longer_each_time():
    state, _ = told(Session(), e.Welcome("w-a", 0.5, term=5))
    waits = []
    for _ in range(4):
        state, todo = told(state, e.Disconnected("x", jitter=1.0), e.Welcome("w-a", 0.5, term=4))
        waits += [i.after_s for i in todo if isinstance(i, do.Reconnect)]
    assert waits == sorted(set(waits))


# ---------------------------------------------------------------- what a restarted coordinator is told


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (JOINED, None),
        ((*JOINED, assigned()), Held("j", 1, 4, loaded=False, ready=False)),
        (LOADED, Held("j", 1, 4, loaded=True, ready=False)),
        (TRAINING, Held("j", 1, 4, loaded=True, ready=False)),
        (WAITING, Held("j", 1, 4, loaded=True, ready=True)),
        ((*WAITING, commit(4, evaluate=True)), Held("j", 1, 4, loaded=True, ready=True)),
        (
            (*WAITING, commit(4, evaluate=True), e.StepApplied("j", 1, 4)),
            Held("j", 1, 5, loaded=True, ready=False),
        ),
        ((*WAITING, commit(4), e.StepApplied("j", 1, 4)), Held("j", 1, 5, loaded=True, ready=False)),
        ((*WAITING, commit(4), e.StageFailed("j", 1, 4, "disk")), None),
        ((*TRAINING, e.StageFailed("j", 1, 4, "killed", gone=True)), None),
        ((*TRAINING, e.PeerLost("w-b", "reset")), Held("j", 1, 4, loaded=True, ready=False)),
        ((*EVALUATING, e.PeerLost("w-b", "reset")), Held("j", 1, 5, loaded=True, ready=False)),
        ((*TRAINING, moved()), Held("j", 2, 4, loaded=False, ready=False)),
        ((*TRAINING, moved(), e.Loaded("j", 2)), Held("j", 2, 4, loaded=True, ready=False)),
        ((*TRAINING, moved(), e.StageFailed("j", 2, 4, "no", "w-c")), Held("j", 2, 4, True, False)),
        ((*TRAINING, e.Release("j", 1, "why")), None),
        ((*JOINED, invited()), None),
    ],
)
def test_what_is_held_names_the_steps_applied_and_the_one_that_is_ready(
    events: tuple[e.Event, ...], expected: Held | None
):
    state, _ = told(Session(), *events)
    assert held(state) == expected
    assert held(told(state, e.Disconnected("killed", 0.0))[0]) == expected


def test_a_stage_whose_links_have_changed_names_the_version_that_was_assigned():
    state, _ = told(Session(), *WAITING, relinked(4), e.StepApplied("j", 1, 4))
    state = through(state, 5, 6)
    assert state.version == 2
    assert held(state) == Held("j", 1, 7, loaded=True, ready=False)


# ---------------------------------------------------------------- new links at a step border


def test_a_coded_evaluation_is_asked_for_by_the_commit():
    asked = commit(4, evaluate=True, evaluate_coded=True)
    _, todo = told(Session(), *WAITING, asked, e.StepApplied("j", 1, 4))
    assert todo[-1] == do.Evaluate(asked)


# ---------------------------------------------------------------- other neighbours, the same stage


RELINKS = st.none() | st.builds(e.Relink, st.integers(1, 3), st.integers(0, 5))
EVENTS = st.one_of(
    st.sampled_from([*JOINED, assigned(), assigned(2), assigned(1, "k"), e.Drained()]),
    st.builds(e.StepStart, st.just("j"), st.integers(1, 4), st.integers(0, 3)),
    st.builds(e.Loaded, st.just("j"), st.integers(1, 4)),
    st.builds(e.StepReady, st.just("j"), st.integers(1, 4), st.integers(0, 3)),
    st.builds(e.StepApplied, st.just("j"), st.integers(1, 4), st.integers(0, 3)),
    st.builds(e.EvalReady, st.just("j"), st.integers(1, 4), st.integers(0, 3), st.none()),
    st.builds(
        e.StepCommit, st.just("j"), st.integers(1, 4), st.integers(0, 3), st.just(1.0), st.booleans(),
        st.booleans(), st.booleans(), st.booleans(), RELINKS,
    ),
    st.builds(e.StepDiscard, st.just("j"), st.integers(1, 4), st.integers(0, 3), st.just("why")),
    st.builds(
        e.Reconfigure, st.just("j"), st.integers(2, 4), st.integers(0, 3), st.integers(0, 3),
        st.just((peer("w-c"),)), st.just(pb.Reconfigure()),
    ),
    st.builds(e.Release, st.sampled_from("jk"), st.integers(1, 2), st.just("why")),
    st.builds(e.StageFailed, st.just("j"), st.integers(1, 4), st.integers(0, 3), st.just("why")),
    st.builds(e.PeerLost, st.just("w-b"), st.just("why")),
    st.builds(e.Disconnected, st.just("why"), st.floats(0, 0.99)),
    st.builds(e.Dismiss, st.just("why"), st.booleans()),
    st.builds(e.LeaveAsked, st.just("why")),
)  # fmt: skip


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.lists(EVENTS, max_size=60))
def test_no_order_of_events_applies_a_step_twice_or_two_at_a_time(events: list[e.Event]):
    state = Session()
    computed: set[tuple[str, int, int]] = set()
    applied: set[int] = set()  # of the stage that is held
    for event in events:
        loaded_before = (state.job, state.version)
        state, todo = handle(state, event)
        assert len(state.unacknowledged) <= 5
        assert len(state.recent) <= s.RECENT
        assert [first for first, _ in state.eras] == sorted({first for first, _ in state.eras})
        assert list(state.versions) == sorted(set(state.versions))
        for instruction in todo:
            if isinstance(instruction, do.RunStep):
                computed = {(instruction.job, instruction.version, instruction.step)}
            if isinstance(instruction, e.StepCommit):
                at = (instruction.job, instruction.version, instruction.step)
                assert at in computed, "a step was applied that was not the one computed"
                assert instruction.step not in applied, "a step was applied twice"
                computed, applied = set(), applied | {instruction.step}
            if isinstance(instruction, e.Assign):
                applied = set()
                assert (instruction.job, instruction.version) != loaded_before


def test_every_phase_of_the_table_can_be_left():
    for phase in Phase:
        if phase not in (Phase.GONE, Phase.DRAINING):
            assert (phase, e.LeaveAsked) in s.TRANSITIONS
            assert (phase, e.Dismiss) in s.TRANSITIONS


def test_every_event_has_a_handler_in_some_phase():
    assert {kind for _, kind in s.TRANSITIONS} == s.TRANSITIONS.events


def test_a_pause_drops_the_work_frees_the_machine_and_keeps_the_session():
    for before in (LOADED, TRAINING, WAITING):
        state, todo = told(Session(), *before, e.PauseAsked("by its owner"))
        assert todo[-2:] == [e.Release("j", 1, "by its owner"), do.Suspend("by its owner")]
        assert (state.phase, state.job, state.unacknowledged) == (Phase.PAUSED, "", ())
        state, todo = told(
            state, commit(4), e.Release("j", 1, "paused"), assigned(2), e.PauseAsked("on battery")
        )
        assert (state.phase, todo) == (Phase.PAUSED, [])
        state, todo = told(state, e.Disconnected("reset", 0.0), e.Welcome("w-a", 0.5))
        assert [type(i) for i in todo] == [do.Reconnect]
        state, todo = told(state, e.ResumeAsked())
        assert (state.phase, todo) == (Phase.IDLE, [do.Wake()])
        _, todo = told(state, assigned(3))
        assert [type(i) for i in todo] == [e.Assign]


def test_a_paused_worker_measures_nothing():
    state, _ = told(Session(), *JOINED, e.PauseAsked("by its owner"))
    _, todo = told(state, OPS, LINK)
    assert todo == [
        do.Send(do.OpsProbed(1, {}, "busy: paused")),
        do.Send(do.LinkProbed(2, "w-b", 0.0, 0.0, "busy: paused")),
    ]


def test_who_starts_paused_is_welcomed_so_and_may_resume_before():
    state, todo = told(Session(), e.PauseAsked("outside its hours"))
    assert todo == [do.Suspend("outside its hours")]
    welcomed, _ = told(state, e.Welcome("w-a", 0.5))
    assert welcomed.phase is Phase.PAUSED
    assert told(welcomed, e.ResumeAsked())[0].phase is Phase.IDLE
    early, _ = told(state, e.ResumeAsked())
    assert early.phase is Phase.CONNECTING
    assert told(early, e.Welcome("w-a", 0.5))[0].phase is Phase.IDLE
