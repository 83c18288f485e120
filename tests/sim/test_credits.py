"""Credits of worlds in which anything goes wrong add up to the steps that the journal calls committed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from atoll.plan import Plan
from coordinator.messages.facts import (
    JobEnded,
    PlanAdopted,
    Reconfigured,
    RoundClosed,
    StepCommitted,
    from_record,
)
from tests.parameters import sampled
from tests.sim.faults import Crash, KillCoordinator
from tests.sim.world import Scenario, World, pipeline_job, scenario


def ranks_committed(world: World) -> tuple[int, int]:
    """Return the ranks of all committed steps, and those of the steps that count of jobs that finished, read
    off the journal alone."""
    plans: dict[str, Plan] = {}
    counted: dict[str, dict[int, int]] = {}
    total = rounds = 0
    finished = set()
    for fact in map(from_record, world.coordinator.folder.records):
        match fact:
            case PlanAdopted(job, plan):
                plans[job] = plan
            case Reconfigured():
                before = fact.plan or plans[fact.job]
                plans[fact.job] = before.moved(
                    fact.version, fact.workers, frozenset(fact.absent), fact.exchange
                )
            case StepCommitted():
                ranks = len(plans[fact.job].present)
                total += ranks
                counted.setdefault(fact.job, {})[fact.step] = ranks
            case RoundClosed():
                rounds += len(fact.participants)
            case JobEnded(job, outcome):
                finished |= {job} if outcome == "finished" else set()
    useful = sum(sum(found.values()) for job, found in counted.items() if job in finished)
    return total, useful + rounds


@pytest.mark.parametrize("seed", sampled(16, [at for at in range(60) if not scenario(at).local_steps][:40]))
def test_credits_add_up_to_the_committed_steps(seed: int) -> None:
    world = World(scenario(seed))
    world.run()
    total, useful = ranks_committed(world)
    given = world.coordinator.shadow.given()
    dropped = sum(len(fact.dropped) for fact in world.facts(RoundClosed))
    rounds = sum(len(fact.participants) for fact in world.facts(RoundClosed))
    assert sum(row.pending.steps for row in given) == 0, "all jobs have ended"
    assert sum(row.useful.steps for row in given) == useful
    assert sum(row.useful.steps + row.discarded.steps for row in given) == total + rounds + dropped


def test_each_owner_is_credited_its_own_jobs_and_each_worker_what_it_did() -> None:
    world = World(Scenario(7, workers=4, pipeline=0, stages=2))
    world.coordinator.fewest = 2
    for job, owner in (("a", "alice"), ("b", "bob the builder")):
        world.submit(job, replace(pipeline_job(20), owner=owner), 1.0)
    world.run()
    rows = world.coordinator.shadow.given()
    steps = Counter[str]()
    for row in rows:
        steps[row.owner] += row.useful.steps
    assert steps == {"alice": 40, "bob the builder": 40}
    assert sum(row.useful.samples for row in rows) == 2 * 2 * 20 * pipeline_job().data.batch * 2
    assert {row.worker for row in rows} == {"w0", "w1", "w2", "w3"}


def test_steps_that_are_done_again_are_discarded_where_they_were_done_first() -> None:
    """Without a successor the job goes back to its checkpoint."""
    faults = (Crash(4.2, 4.0, "w0"), KillCoordinator(9.0, 1.0))
    world = World(Scenario(11, workers=2, stages=2, faults=faults))
    world.coordinator.fewest = 2
    world.run()
    given = world.coordinator.shadow.given()
    assert sum(row.useful.steps for row in given) == 2 * 16
    assert sum(row.discarded.steps for row in given) > 0
