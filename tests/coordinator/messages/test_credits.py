"""Credits of single jobs: pending, useful, discarded, by day, worker and owner."""

from __future__ import annotations

from atoll.messages.from_worker import MAX_WATTS
from atoll.microbatch import ScheduleName
from atoll.plan import Piece, Plan, Replica, stage_of
from coordinator.messages.credits import KEPT_DAYS, Credits, Row, Work, day_of, rows, totals

NOON_S = 1_796_040_000.0  # 2026-11-30 12:00 UTC
DAY_S = 86_400.0
BATCH = 8


def plan() -> Plan:
    stages = (stage_of("w-1", [Piece(0, 1, 0, 1, 1)]), stage_of("w-2", [Piece(1, 2, 1, 2, 1)]))
    return Plan("j", 1, "", "", "even", ScheduleName.GPIPE, 4, (Replica((0, 4), stages, ()),))


def commit(credits: Credits, at: int, at_s: float = NOON_S, *figures: tuple[int, ...]) -> None:
    credits.committed("j", plan(), range(at, at + 1), BATCH, at_s, figures)


def shown(credits: Credits, newest: int = 0) -> dict[tuple[str, str], Row]:
    return {(row.day, row.worker): row for row in rows(credits, {"j": ("alice", newest)})}


def test_a_step_is_pending_until_a_checkpoint_holds_it() -> None:
    credits = Credits()
    commit(credits, 0, NOON_S, (70, 20), (100, 5), (5, 100))
    row = shown(credits)["2026-11-30", "w-1"]
    assert (row.owner, row.useful, row.pending) == ("alice", Work(), Work(1, 4 * BATCH, 70, 100, 5))
    credits.stored("j", [1])
    assert shown(credits, 1)["2026-11-30", "w-2"].useful == Work(1, 4 * BATCH, 20, 5, 100)


def test_a_job_may_go_back_to_every_checkpoint_that_is_kept_and_to_its_first_step() -> None:
    for back, useful, discarded in ((6, 6, 2), (3, 3, 5), (0, 0, 8)):
        credits = Credits()
        for at in range(8):
            commit(credits, at)
            if at in (2, 5):
                credits.stored("j", [3, 6][: 1 + (at == 5)])
        credits.taken_back("j", "alice", back)
        row = shown(credits, back)["2026-11-30", "w-1"]
        assert (row.useful.steps, row.discarded.steps, row.pending.steps) == (useful, discarded, 0)


def test_the_sums_of_all_are_those_of_the_rows() -> None:
    credits = Credits()
    for at in range(8):
        commit(credits, at, NOON_S + at * DAY_S, (70, 20), (100, 5), (5, 100))
    credits.stored("j", [3])
    credits.taken_back("j", "alice", 6)
    found, listed = totals(credits, {"j": 3}), rows(credits, {"j": ("alice", 3)})
    assert {kind: work.steps for kind, work in found.items()} == {"useful": 6, "discarded": 4, "pending": 6}
    for kind, work in found.items():
        assert work.computed_ms == sum(getattr(row, kind).computed_ms for row in listed)


def test_days_are_those_of_utc_whatever_the_time_given() -> None:
    assert [day_of(at) for at in (NOON_S, NOON_S + DAY_S / 2)] == ["2026-11-30", "2026-12-01"]
    for odd in (-1e300, float("nan"), float("inf"), 1e300):
        assert day_of(odd)


def test_what_a_job_leaves_without_a_checkpoint_was_in_vain() -> None:
    credits = Credits()
    for at in range(5):
        commit(credits, at)
    credits.stored("j", [3])
    credits.ended("j", "alice", 3)
    row = shown(credits)["2026-11-30", "w-1"]
    assert (row.useful.steps, row.discarded.steps) == (3, 2)
    assert credits.pending == {}


def test_days_are_apart_and_old_ones_are_dropped() -> None:
    credits = Credits()
    for at in range(2):
        commit(credits, at, NOON_S + at * DAY_S)
    credits.ended("j", "alice", 2)
    assert sorted(day for day, _ in shown(credits)) == [
        "2026-11-30",
        "2026-11-30",
        "2026-12-01",
        "2026-12-01",
    ]
    commit(credits, 0, NOON_S + KEPT_DAYS * DAY_S + DAY_S)
    assert {day for day, _ in shown(credits)} == {"2026-12-01", day_of(NOON_S + (KEPT_DAYS + 1) * DAY_S)}


def test_a_round_credits_who_was_counted_and_not_who_was_dropped() -> None:
    credits = Credits()
    showed = {"n_samples": 40, "train_s": 50.0, "bytes_up": 100, "bytes_down": 200}
    credits.closed("bob", NOON_S, 9.0, {"w-1": showed}, ["w-2"])
    found = {row.worker: row for row in rows(credits, {})}
    assert found["w-1"].useful == Work(1, 40, 9000, 100, 200), "no more seconds than the round took"
    assert found["w-2"].discarded == Work(1)


def test_a_copy_stays_as_it_was() -> None:
    credits = Credits()
    commit(credits, 0)
    copy = credits.copy()
    commit(credits, 1)
    credits.stored("j", [2])
    assert shown(copy)["2026-11-30", "w-1"].pending.steps == 1


def test_energy_adds_up_and_what_was_not_measured_is_not_shown() -> None:
    credits = Credits()
    commit(credits, 0, NOON_S, (70, 20), (100, 5), (5, 100), (4500, 0))
    commit(credits, 1, NOON_S, (70, 20), (100, 5), (5, 100))
    found = shown(credits, 2)
    assert found["2026-11-30", "w-1"].useful.energy_mj == 4500
    assert found["2026-11-30", "w-1"].shown()["useful"]["energy_mj"] == 4500
    assert "energy_mj" not in found["2026-11-30", "w-2"].shown()["useful"]
    assert totals(credits, {"j": 2})["useful"].energy_mj == 4500


def test_a_clients_energy_is_no_more_than_a_machine_takes_in_the_round() -> None:
    credits = Credits()
    showed = {"n_samples": 40, "train_s": 5.0, "bytes_up": 1, "bytes_down": 2}
    claims = {"w-1": 90.5, "w-2": 1e12}
    told = {worker: showed | {"energy_j": joules} for worker, joules in claims.items()}
    credits.closed("bob", NOON_S, 9.0, told | {"w-3": showed}, [])
    found = {row.worker: row.useful.energy_mj for row in rows(credits, {})}
    assert found == {"w-1": 90_500, "w-2": round(9e3 * MAX_WATTS), "w-3": 0}
