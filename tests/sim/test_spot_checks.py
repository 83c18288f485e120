"""Workers whose finite gradients are wrong: found by others that repeat their steps, within a bounded time.

The jobs end with the weights of an undisturbed run, which every world looks at.
"""

from __future__ import annotations

import pytest

from atoll.job import JobSpec
from coordinator.messages.facts import PlanAdopted, SpotChecked, StepCommitted, WorkRejected
from tests.sim.faults import Cheat, Fault, KillCoordinator, Slip
from tests.sim.watched import Watched
from tests.sim.world import Scenario, pipeline_job

SHARE, STEPS, CHEATS_S = 0.1, 60, 12.0
STAGES = 3
FOUND_WITHIN = round(2 * STAGES / SHARE)
REPEATING = 20
"""Steps that are committed while some are repeated, twice."""


class Checked(Watched):
    """A world of one job whose losses are those of an undisturbed run until somebody cheats."""

    def first_wrong(self) -> int:
        """Return the first step whose loss is not that of an undisturbed run; a cheat shows in the next."""
        losses = self.checks.references["job-1"][1]
        committed = self.facts(StepCommitted)
        return next(fact.step for fact in committed if fact.loss != losses[fact.step]) - 1


def world(*faults: Fault, workers: int = 6, seed: int = 1) -> Checked:
    return Checked(Scenario(seed, workers, pipeline=1, faults=faults))


def job(share: float = SHARE) -> JobSpec:
    return pipeline_job(STEPS, spot_checks=share)


@pytest.mark.parametrize(
    ("worker", "seed"),
    [("w1", 1), *(pytest.param(w, s, marks=pytest.mark.slow) for w in ("w0", "w1", "w2") for s in (2, 3))],
)
def test_a_cheat_is_found_in_a_bounded_number_of_steps_and_its_work_is_done_anew(
    worker: str, seed: int
) -> None:
    found = world(Cheat(CHEATS_S, 0.0, worker), seed=seed)
    found.run_job(job())
    assert found.outcome == "finished"
    assert [who for who, _ in found.quarantined] == [worker]
    assert found.quarantined[0][1].startswith(f"wrong: {worker} computed step ")
    (rejected,) = found.facts(WorkRejected)
    assert isinstance(rejected, WorkRejected)
    assert rejected.worker == worker
    wrong = found.first_wrong()
    assert rejected.step <= wrong, "nothing is kept that rests on a wrong step"
    committed = [fact.step for fact in found.facts(StepCommitted)]
    again = committed.index(rejected.step, rejected.step + 1)
    assert committed[again - 1] - wrong <= FOUND_WITHIN + REPEATING
    last = found.facts(PlanAdopted)[-1]
    assert isinstance(last, PlanAdopted)
    assert worker not in [place.worker for place in last.plan.places]


def test_checks_of_honest_workers_agree_and_disturb_nobody() -> None:
    found = world()
    found.run_job(job())
    assert found.outcome == "finished"
    agreed = found.facts(SpotChecked)
    assert {fact.rank for fact in agreed if isinstance(fact, SpotChecked)} == {0, 1, 2}
    assert len(found.facts(PlanAdopted)) == 1
    assert found.suspected == found.quarantined == []


def test_without_spot_checks_nobody_repeats_anything() -> None:
    found = world(workers=4)
    found.run_job(pipeline_job(16, spot_checks=0.0))
    assert found.facts(SpotChecked) == []


def test_who_repeats_wrong_is_outvoted_and_no_step_is_done_again() -> None:
    found = world(*(Slip(1.0, 0.0, "w3"),))
    found.run_job(job())
    assert found.outcome == "finished"
    assert [who for who, _ in found.quarantined] == ["w3"]
    assert "repeated step" in found.quarantined[0][1]
    assert found.facts(WorkRejected) == []
    assert len(found.facts(PlanAdopted)) == 1


def test_one_word_against_another_names_both_and_bars_nobody() -> None:
    found = world(Slip(1.0, 0.0, "w3"), workers=STAGES + 1)
    found.run_job(job())
    assert found.outcome == "finished"
    assert found.quarantined == []
    named = {who for who, _ in found.suspected}
    assert "w3" in named
    assert len(named) >= 2
    assert all("do not agree on step" in why for _, why in found.suspected)


def test_what_is_agreed_survives_a_restart_of_the_coordinator() -> None:
    found = world(KillCoordinator(20.0, 1.0), Cheat(22.0, 0.0, "w1"))
    found.run_job(job())
    assert found.outcome == "finished"
    (rejected,) = found.facts(WorkRejected)
    assert isinstance(rejected, WorkRejected)
    assert rejected.worker == "w1"
