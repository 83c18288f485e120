"""Membership: who is there, who is silent, who is gone, and in which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.config import Liveness
from coordinator.membership import member as members
from coordinator.membership.member import (
    Admitted,
    AssignedTo,
    ConnectionLost,
    Heard,
    Joined,
    Kicked,
    LeavingSaid,
    Member,
    Phase,
    Released,
    Tick,
    joined,
    step,
)

TIMING = Liveness()


def after(*events: tuple[float, members.Event]) -> Member:
    member = joined("w1", 7, 0.0)
    for at, event in events:
        member, _ = step(member, event, at, TIMING)
    return member


def test_a_worker_that_joins_waits_in_the_pool_with_a_reason() -> None:
    member = after((0.0, Admitted()))
    assert (member.phase, member.reason) == (Phase.POOL, "in the backup pool")


def test_silence_makes_a_worker_suspect_and_then_dead() -> None:
    base = [(0.0, Admitted()), (0.0, AssignedTo("j", 0))]
    assert after(*base, (1.4, Tick())).phase is Phase.ASSIGNED
    assert after(*base, (1.6, Tick())).phase is Phase.SUSPECT
    dead = after(*base, (1.6, Tick()), (2.1, Tick()))
    assert (dead.phase, dead.reason) == (Phase.DEAD, "silent for 2.1 s")


def test_a_worker_without_a_stage_may_be_silent_longer() -> None:
    base = [(0.0, Admitted()), (6.0, Tick())]
    assert after(*base).phase is Phase.POOL
    assert after(*base, (7.6, Tick())).phase is Phase.SUSPECT
    assert after(*base, (10.1, Tick())).phase is Phase.DEAD


def test_a_worker_that_was_silent_as_the_idle_may_be_is_not_suspected_once_it_has_work() -> None:
    base = [(0.0, Admitted()), (2.5, AssignedTo("j", 0))]
    assert after(*base, (3.9, Tick())).phase is Phase.ASSIGNED
    assert after(*base, (4.1, Tick()), (4.4, Tick())).phase is Phase.SUSPECT
    assert after(*base, (4.1, Tick()), (4.6, Tick())).phase is Phase.DEAD


def test_heartbeats_of_the_idle_are_at_most_2000_a_second_until_they_would_be_suspected() -> None:
    assert [TIMING.idle_heartbeat_s(n) for n in (1, 1000, 4000, 10_000)] == [0.5, 0.5, 2.0, 2.5]
    quick = Liveness(idle_patience=1.0)
    assert quick.idle_heartbeat_s(10_000) == quick.suspect_after_s / 3


def test_a_suspect_that_is_heard_again_keeps_its_stage() -> None:
    member = after((0.0, Admitted()), (0.0, AssignedTo("j", 2)), (1.6, Tick()), (1.7, Heard()))
    assert (member.phase, member.job, member.rank) == (Phase.ASSIGNED, "j", 2)


def test_a_broken_connection_is_death_unless_it_returns_at_once() -> None:
    base = [(0.0, Admitted()), (0.0, AssignedTo("j", 0)), (1.0, ConnectionLost())]
    assert after(*base).phase is Phase.SUSPECT
    assert after(*base, (1.2, Joined(7))).phase is Phase.ASSIGNED
    dead = after(*base, (1.4, Tick()))
    assert (dead.phase, dead.reason) == (Phase.DEAD, "connection lost and not back within 0.4 s")


def test_a_heartbeat_under_way_does_not_revive_a_broken_connection() -> None:
    member = after((0.0, Admitted()), (1.0, ConnectionLost()), (1.1, Heard()), (1.4, Tick()))
    assert member.phase is Phase.DEAD


def test_a_new_process_replaces_its_ghost() -> None:
    member = after((0.0, Admitted()), (0.0, AssignedTo("j", 0)), (1.0, Joined(8)))
    assert (member.phase, member.incarnation, member.job) == (Phase.JOINED, 8, "")


def test_the_dead_may_come_back_with_nothing() -> None:
    member = after((0.0, Admitted()), (0.0, AssignedTo("j", 0)), (3.0, Tick()), (4.0, Joined(7)))
    assert (member.phase, member.job) == (Phase.JOINED, "")


def test_leaving_from_the_pool_is_immediate_and_from_a_stage_it_drains() -> None:
    assert after((0.0, Admitted()), (1.0, LeavingSaid("night"))).phase is Phase.LEFT
    draining = after((0.0, Admitted()), (0.0, AssignedTo("j", 0)), (1.0, LeavingSaid("night")))
    assert draining.phase is Phase.DRAINING
    left, _ = step(draining, Released("job ended"), 2.0, TIMING)
    assert (left.phase, left.reason) == (Phase.LEFT, "left: night")


def test_a_peers_event_out_of_place_is_refused_with_the_last_changes() -> None:
    gone = after((0.0, Admitted()), (1.0, Kicked("wrong results")))
    same, refused = step(gone, Heard(), 2.0, TIMING)
    assert same == gone
    assert refused is not None
    assert "kicked: wrong results" in refused


def test_our_own_event_out_of_place_raises() -> None:
    with pytest.raises(LookupError, match="AssignedTo while dead"):
        step(after((0.0, Admitted()), (11.0, Tick())), AssignedTo("j", 0), 11.0, TIMING)


def test_our_stall_is_nobodys_silence() -> None:
    member = members.silence_forgiven(after((0.0, Admitted())), 5.0)
    assert step(member, Tick(), 6.0, TIMING)[0].phase is Phase.POOL


EVENTS = st.sampled_from(
    [Joined(7), Joined(8), Heard(), ConnectionLost(), Tick(), LeavingSaid("x"), Kicked("y")]
)


@given(st.lists(st.tuples(st.floats(0, 1.0), EVENTS), max_size=20))
def test_whatever_peers_do_a_member_has_a_phase_and_a_reason(
    events: list[tuple[float, members.Event]],
) -> None:
    member, now_s = after((0.0, Admitted())), 0.0
    for gap_s, event in events:
        now_s += gap_s
        before = member
        member, refused = step(member, event, now_s, TIMING)
        assert member.reason
        assert refused is None or member == before
        if member.phase is Phase.SUSPECT:
            assert member.before in (Phase.JOINED, Phase.POOL)
