"""A large fleet under churn: the checks of every world hold, and the same seed is the same story."""

from __future__ import annotations

import pytest

from coordinator.membership.roster import Roster
from tests.sim.checks import Violation
from tests.sim.fleet import Fleet, FleetRun


def test_two_hundred_workers_join_are_probed_train_and_churn_for_a_minute() -> None:
    figures = Fleet(FleetRun(200, minutes=1.0, seed=1)).run()
    assert figures["members"] >= 190
    assert figures["departures"] > 5
    assert set(figures["jobs"].values()) == {"finished"}
    # Few pairs a worker, not all: 200 workers have 39,800.
    assert 400 < figures["pairs_measured"] < 2000


def test_the_same_seed_is_the_same_fleet() -> None:
    first, again = (Fleet(FleetRun(60, minutes=0.5, churn=0.5, seed=4)).run() for _ in range(2))
    assert first["fingerprint"] == again["fingerprint"]
    assert Fleet(FleetRun(60, minutes=0.5, churn=0.5, seed=5)).run()["fingerprint"] != first["fingerprint"]


def test_a_dead_worker_that_nobody_notices_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roster, "silent", lambda roster, now_s: [])
    with pytest.raises(Violation, match="is gone, its member is suspect"):
        Fleet(FleetRun(60, minutes=1.0, churn=0.5, seed=4)).run()


@pytest.mark.slow
def test_ten_thousand_workers_for_a_minute() -> None:
    figures = Fleet(FleetRun(10_000, minutes=1.5)).run()
    assert figures["members"] > 9_500
    assert figures["jobs"]["job-1"] == "finished"
