"""What a run does not survive as it should yet: each is expected to fail until its mending turns it."""

from __future__ import annotations

from coordinator.messages.facts import StepCommitted, from_record
from tests.sim.faults import KillCoordinator
from tests.sim.shrink import holding
from tests.sim.world import Scenario, World


def test_a_restarted_coordinator_loses_at_most_the_step_in_flight() -> None:
    world = holding(Scenario(seed=1, workers=4, pipeline=1, faults=(KillCoordinator(5.0, 0.5),)))
    steps = [fact.step for fact in world.facts(StepCommitted)]
    assert len(steps) <= len(set(steps)) + 1


def test_a_second_coordinator_on_the_same_journal_is_fenced_off() -> None:
    """Of two machines with one database: each machine's lock keeps only its own processes out."""
    world = World(Scenario(seed=1, workers=4, pipeline=1))
    world.begin()
    first = world.coordinator
    world.clock.after(3.0, lambda: world.take_over(0.0))
    until_s = world.clock.now_s + 60.0
    while world.clock.step(until_s):
        pass
    second = world.coordinator
    assert not first.alive
    assert (first.term, second.term) == (1, 2)
    facts = map(from_record, second.folder.records)
    commits = [(fact.version, fact.step) for fact in facts if isinstance(fact, StepCommitted)]
    assert commits == sorted(set(commits))
    assert second.shadow.jobs["job-1"].outcome == "finished"
