"""A session that stands by: it carries out what it hears one after the other, until it has the rank."""

from __future__ import annotations

import pytest

from atoll.messages.to_worker import Era, Replay, Standbys
from protos import atoll_control_pb2 as pb
from tests.worker.session.test_machine import LINK, peer
from worker.session import events as ev
from worker.session import instructions as do
from worker.session import wire
from worker.session.machine import Session, handle
from worker.session.state import Held, Phase, held

IDLE = Session(Phase.IDLE, "w9", connected=True)
ERAS = (Era(1, 0, ()), Era(3, 6, ()), Era(4, 11, ()))
ASSIGN = ev.Assign("job", 3, (peer("a"), peer("c")), 10, pb.Assign(), Replay(10, ERAS, (), standby=True))


def commit(step: int, version: int = 3, relink: ev.Relink | None = None) -> ev.StepCommit:
    return ev.StepCommit("job", version, step, 0.5, True, True, False, relink=relink, replay_from=2)


def after(state: Session, *events: ev.Event) -> tuple[Session, list[do.Instruction]]:
    done: list[do.Instruction] = []
    for event in events:
        state, todo = handle(state, event)
        done += todo
    return state, done


def standing(loaded: bool = True) -> Session:
    events: list[ev.Event] = [ASSIGN, *([ev.Loaded("job", 3)] if loaded else ())]
    return after(IDLE, *events)[0]


@pytest.mark.parametrize("loaded", [True, False])
def test_every_commit_is_carried_out_in_turn_also_while_the_stage_is_being_loaded(loaded: bool) -> None:
    state, done = after(standing(loaded), commit(10), commit(10), commit(12), commit(11, 4))
    assert done == [
        do.RepeatStep(commit(10)),
        do.RepeatStep(commit(11, 4)),
    ]
    assert state.phase is (Phase.STANDING_BY if loaded else Phase.LOADING)
    assert held(state) == Held("job", 3, 12, loaded, False)
    state, done = after(state, ev.StepApplied("job", 3, 10))
    assert (state.repeated, done) == (11, [])


def test_new_links_are_announced_in_front_of_the_step_that_says_them() -> None:
    relink = ev.Relink(7, 13)
    state, done = after(standing(), commit(10), commit(11, 4, relink), commit(12, 4), commit(13, 7))
    commits = (commit(10), commit(11, 4, relink), commit(12, 4), commit(13, 7))
    assert done == [do.RepeatStep(commit) for commit in commits]
    assert state.version == 7


def moved(step: int, *, standby: bool, base: int = 0) -> ev.Reconfigure:
    return ev.Reconfigure("job", 9, base, step, (peer("a"), peer("d")), pb.Reconfigure(), standby)


@pytest.mark.parametrize("loaded", [True, False])
def test_it_takes_the_rank_after_what_it_has_heard_of(loaded: bool) -> None:
    state, done = after(standing(loaded), commit(10), moved(11, standby=False))
    assert done[-1] == do.Reconfigure(moved(11, standby=False), repeating=True)
    assert (state.phase, state.assigned, state.standby, state.whole) == (Phase.LOADING, 9, False, False)
    late = ev.Loaded("job", 3)
    state, done = after(state, late, ev.Loaded("job", 9), ev.StepStart("job", 9, 11))
    assert done == [do.Send(ev.Loaded("job", 9)), do.RunStep("job", 9, 11)]


def test_it_goes_on_standing_by_when_another_rank_is_taken_over() -> None:
    state, done = after(standing(), moved(10, standby=True), commit(10, 9))
    assert done == [
        do.Reconfigure(moved(10, standby=True), repeating=True),
        do.RepeatStep(commit(10, 9)),
    ]
    assert state.phase is Phase.STANDING_BY


def test_what_it_was_to_repeat_and_cannot_is_said_under_the_version_of_the_rank() -> None:
    broke = ev.StageFailed("job", 3, 10, "a message has left the send log")
    _, done = after(standing(), commit(10), broke)
    assert done[-1] == do.Send(do.StageFailed("job", 3, 10, broke.reason))
    state, done = after(standing(), commit(10), moved(11, standby=False), broke)
    assert done[-1] == do.Send(do.StageFailed("job", 9, 11, broke.reason))
    assert state.phase is Phase.FAILED
    missed, done = after(standing(), moved(12, standby=False))
    assert isinstance(done[-1], do.Send)
    assert "after 10 steps, not 12" in done[-1].message.reason
    assert missed.phase is Phase.FAILED


def test_a_lost_peer_is_the_computations_business_and_a_release_ends_it() -> None:
    state, done = after(standing(), ev.PeerLost("a", "killed"))
    assert (state.phase, done) == (Phase.STANDING_BY, [])
    state, done = after(state, ev.Release("job", 4, "enough"))
    assert (state.phase, state.standby) == (Phase.IDLE, False)
    assert [type(instruction) for instruction in done] == [ev.Release]
    refused, done = after(standing(), LINK)
    assert isinstance(done[-1], do.Send)
    assert refused.phase is Phase.STANDING_BY


def test_who_stands_by_and_is_invited_to_a_federated_job_stands_by_no_more() -> None:
    beside, _ = after(standing(), commit(10), ev.StepApplied("job", 3, 10))
    assert (beside.standby, beside.repeated) == (True, 11)
    state, done = after(beside, ev.Participate("f", 1, pb.Participate()))
    assert (state.phase, state.job, state.step) == (Phase.JOINING, "f", 0)
    assert not state.standby, "or its heartbeats would give the steps that it repeated as its round"
    assert [type(instruction) for instruction in done] == [ev.Release, ev.Participate]


def test_the_wire_says_who_stands_by() -> None:
    eras = [pb.PlanEra(plan_version=1, first_step=0), pb.PlanEra(plan_version=4, first_step=11)]
    replay = pb.Replay(first_step=10, eras=eras, standby=True)
    assign = pb.ToWorker(assign=pb.Assign(job="job", plan_version=3, first_step=10, replay=replay))
    event = wire.event_from(assign)
    assert isinstance(event, ev.Assign)
    assert (event.standby, event.eras) == (True, ((0, 1), (11, 4)))
    peer = pb.RankPeer(rank=1, peer=pb.PeerAddress(worker="w9"))
    beside = wire.event_from(pb.ToWorker(standbys=pb.Standbys(job="job", plan_version=3, peers=[peer])))
    assert isinstance(beside, Standbys)
    assert wire.ranks_of(beside.peers) == {"w9": 1}
