"""A tick moves those whose time has come, and would have changed nobody else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.config import Liveness, Probing
from coordinator.membership import member as members
from coordinator.membership.deadlines import Deadlines
from coordinator.membership.member import Phase
from coordinator.membership.roster import Roster
from coordinator.messages.events import Introduction


def test_the_earliest_time_counts_and_each_name_comes_once():
    due = Deadlines()
    due.at("a", 5.0)
    due.at("a", 3.0)
    due.at("a", 9.0)
    due.at("b", 4.0)
    due.drop("b")
    assert due.take(2.9) == []
    assert due.take(10.0) == ["a"]
    assert "a" not in due
    assert due.take(10.0) == []


MOVES = st.sampled_from(("heard", "lost", "assigned", "released", "leaving", "kicked", "opened", "forgiven"))


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from("abc"), MOVES), max_size=60))
def test_a_tick_passes_over_only_workers_that_it_would_not_change(moves: list[tuple[float, str, str]]):
    liveness, now_s = Liveness(), 100.0
    roster = Roster(liveness, Probing())
    for session, (waited_s, worker, move) in enumerate(moves, 1):
        now_s += waited_s
        known = roster.workers.get(worker)
        if known is None or move == "opened":
            incarnation = session if known is None or known.member.gone else known.member.incarnation
            roster.open(worker, session, Introduction(worker, incarnation, "cpu", "m", 1, 1, 1), now_s)
            if roster.workers[worker].member.phase is Phase.JOINED:
                roster.move(worker, members.Admitted(), now_s)
        elif move == "forgiven":
            roster.forgive(waited_s)
        elif move == "lost":
            roster.disconnected(worker)
            roster.move(worker, members.ConnectionLost(), now_s)
        elif move == "assigned" and known.member.phase in (Phase.POOL, Phase.ASSIGNED):
            roster.move(worker, members.AssignedTo("job", 0), now_s)
        elif move == "released":
            roster.move(worker, members.Released("over"), now_s)
        elif move in ("heard", "leaving", "kicked") and not known.member.gone:
            made = {
                "heard": members.Heard(),
                "leaving": members.LeavingSaid(""),
                "kicked": members.Kicked(""),
            }
            roster.move(worker, made[move], now_s)
        due = roster.silent(now_s)
        for name, other in roster.workers.items():
            if name in due:
                roster.move(name, members.Tick(), now_s)
            elif not other.member.gone:
                assert members.step(other.member, members.Tick(), now_s, liveness)[0] == other.member
        assert roster.idle() == [name for name, other in roster.workers.items() if other.idle]
