"""Slow workers, broken devices and slander: named, replaced when they persist, and never the end of a job."""

from __future__ import annotations

import pytest

from coordinator.messages.facts import PlanAdopted, Reconfigured, from_record
from tests.parameters import sampled
from tests.sim.faults import Fault, KillCoordinator, Poison, Slander, Slow
from tests.sim.watched import Watched
from tests.sim.world import Scenario, pipeline_job


class Slandered(Watched):
    """A world of one job, its plans and how it ended."""

    @property
    def reason(self) -> str:
        return self.coordinator.scheduler.jobs["job-1"].reason

    def plans(self) -> list[list[str]]:
        """Workers by rank of each plan, adopted or reconfigured."""
        found = []
        for fact in map(from_record, self.coordinator.folder.records):
            if isinstance(fact, PlanAdopted):
                found.append([place.worker for place in fact.plan.places])
            elif isinstance(fact, Reconfigured):
                found.append(list(fact.workers))
        return found


def world(*faults: Fault, workers: int = 5, seed: int = 1) -> Slandered:
    return Slandered(Scenario(seed, workers, pipeline=1, faults=faults))


# ---------------------------------------------------------------- slow


def test_a_straggler_is_named_and_replaced_when_it_persists() -> None:
    found = world(Slow(25.0, 500.0, "w1"))
    found.run_job(pipeline_job(200))
    assert found.outcome == "finished"
    assert found.suspected[0][0] == "w1"
    assert "slow: computes 1 s a step, 5.0 times the usual 0.2 s" in found.suspected[0][1]
    assert [worker for worker, _ in found.quarantined] == ["w1"]
    assert "w1" not in found.plans()[1]


def test_a_worker_that_is_slow_for_a_while_is_named_and_stays() -> None:
    found = world(Slow(25.0, 10.0, "w1"))
    found.run_job(pipeline_job(200))
    assert "w1" in [worker for worker, _ in found.suspected]
    assert found.quarantined == []
    assert len(found.plans()) == 1
    assert found.coordinator.scheduler.roster.workers["w1"].suspected == ""


def test_a_straggler_stays_where_nobody_could_take_its_place() -> None:
    found = world(Slow(25.0, 500.0, "w1"), workers=3)
    found.run_job(pipeline_job(200))
    assert "w1" in [worker for worker, _ in found.suspected]
    assert len(found.plans()) == 1


def test_nobody_is_slow_where_all_are() -> None:
    found = world(*(Slow(25.0, 500.0, f"w{at}") for at in range(3)))
    found.run_job(pipeline_job(200))
    assert found.suspected == found.quarantined == []


def test_a_straggler_near_the_end_is_not_worth_a_plan() -> None:
    found = world(Slow(25.0, 500.0, "w1"))
    found.run_job(pipeline_job(60))
    assert "w1" in [worker for worker, _ in found.suspected]
    assert len(found.plans()) == 1


# ---------------------------------------------------------------- not finite


@pytest.mark.parametrize("seed", sampled(1, range(3)))
@pytest.mark.parametrize("worker", ["w0", "w1", "w2"])
def test_a_producer_of_nans_is_replaced_and_the_job_ends_as_an_undisturbed_one(
    worker: str, seed: int
) -> None:
    """Whichever stage it is: what is not finite reaches all of them, so no report shows where it began."""
    found = world(Poison(8.0, 0.0, worker), workers=6, seed=seed)
    found.run_job(pipeline_job())
    assert found.outcome == "finished"
    assert worker in [who for who, _ in found.quarantined]
    assert all("finite without" in why for _, why in found.quarantined)
    assert worker not in found.plans()[-1]


@pytest.mark.parametrize("worker", ["w0", "w1", "w2"])
def test_slander_ends_no_job_and_costs_the_slanderer(worker: str) -> None:
    found = world(Slander(8.0, 0.0, worker))
    found.run_job(pipeline_job())
    assert found.outcome == "finished"
    assert [who for who, _ in found.quarantined] == [worker]
    assert len(found.plans()) == 2


def test_of_a_fleet_with_one_to_spare_each_is_left_out_in_turn() -> None:
    found = world(Poison(8.0, 0.0, "w0"), workers=4)
    found.coordinator.fewest = 3
    found.run_job(pipeline_job())
    assert found.outcome == "finished"
    assert [who for who, _ in found.quarantined] == ["w0"]


def test_a_nan_that_does_not_come_again_costs_a_step() -> None:
    found = world(Poison(8.0, 0.5, "w1"), workers=2)
    found.coordinator.fewest = 2
    found.run_job(pipeline_job())
    assert found.outcome == "finished"
    assert found.quarantined == []
    assert "finite when the same workers did it again" in found.suspected[-1][1]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 8])
def test_a_model_that_diverges_ends_its_job(workers: int) -> None:
    found = world(workers=workers)
    for worker in found.workers.values():
        worker.diverges_at = 10
    found.run_job(pipeline_job())
    assert found.outcome == "failed"
    assert "loss became nan at step 11" in found.reason
    assert "the last good checkpoint is of step 9; lower the learning rate" in found.reason
    assert found.quarantined == []
    assert len(found.plans()) <= 4


@pytest.mark.parametrize("after_s", sampled(4, [0.3, 0.7, 1.1, 1.5, 1.9, 2.5, 3.2, 4.0]))
def test_a_doubt_that_a_restart_forgets_costs_no_more_than_the_tries_before_it(after_s: float) -> None:
    """No try is ever committed, and one that is forgotten makes nobody less suspect (decision 043)."""
    broken = world(Poison(8.0, 0.0, "w1"), KillCoordinator(8.0 + after_s, 0.1), workers=6)
    broken.run_job(pipeline_job())
    assert broken.outcome == "finished"
    assert "w1" not in broken.plans()[-1]
    model = world(KillCoordinator(9.0 + after_s, 0.1), workers=6)
    for worker in model.workers.values():
        worker.diverges_at = 10
    model.run_job(pipeline_job())
    assert model.outcome == "failed"
    assert "loss became nan at step 11" in model.reason
    assert len(model.plans()) <= 4 + 3, "those of before, and as many as without a restart"


def test_a_restart_after_the_end_makes_no_second_try_undone() -> None:
    """What had been tried is not journalled; the job has ended as it should."""
    found = world(Poison(8.0, 0.0, "w0"), KillCoordinator(15.0, 0.1), workers=1)
    found.run_job(pipeline_job())
    assert found.outcome == "failed"
    assert found.coordinator.scheduler.jobs["job-1"].doubt is None
    assert len(found.plans()) == 2


def test_one_worker_alone_is_tried_twice() -> None:
    found = world(Poison(8.0, 0.0, "w0"), workers=1)
    found.run_job(pipeline_job())
    assert found.outcome == "failed"
    assert len(found.plans()) == 2
