"""A coordinator that is killed and started again costs at most the step in flight: workers keep theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest

from coordinator.messages.facts import Fact, PlanAdopted, StepCommitted
from tests.parameters import sampled
from tests.sim.faults import Crash, Fault, KillCoordinator
from tests.sim.shrink import holding
from tests.sim.world import FAULTS_WITHIN_S, Scenario, World

JOB = "job-1"
LOADED_S = 3.1  # every stage has loaded by then; before, a plan may have to be made
STEPS = 16


@dataclass(frozen=True)
class Outcome:
    """Steps in the order of their commits, and versions of the plans that were adopted."""

    steps: list[int]
    plans: list[int]


def outcome(world: World) -> Outcome:
    assert world.coordinator.shadow.jobs[JOB].outcome == "finished"
    return Outcome(
        [fact.step for fact in world.facts(StepCommitted)],
        [fact.plan.version for fact in world.facts(PlanAdopted)],
    )


UNDISTURBED = Outcome(list(range(STEPS)), [1])


def ran(*faults: Fault, seed: int = 1) -> Outcome:
    world = holding(Scenario(seed=seed, workers=4, pipeline=1, faults=faults))
    return outcome(world)


@pytest.mark.parametrize("seed", sampled(12, range(40)))
def test_killed_at_any_moment_every_step_is_committed_once_under_one_plan(seed: int) -> None:
    random = Random(seed)
    kills, at_s = [], LOADED_S
    for _ in range(random.randint(1, 3)):
        at_s += 4.0 * random.random()
        kills.append(KillCoordinator(round(at_s, 3), round(0.05 + 5.0 * random.random() ** 3, 3)))
        at_s += kills[-1].seconds + 1.0
    over = [kill for kill in kills if kill.at_s + kill.seconds < FAULTS_WITHIN_S]
    assert ran(*over, seed=seed) == UNDISTURBED


def at_commit(step: int, act: Callable[[World], None], *, written: bool) -> Outcome:
    """Run a world in which something happens when a step's commit is written, or is about to be."""
    world = World(Scenario(seed=1, workers=4, pipeline=1))
    coordinator, write = world.coordinator, world.coordinator._write
    done: list[Fact] = []

    def writing(facts: list[Fact]) -> None:
        ours = [fact for fact in facts if isinstance(fact, StepCommitted) and fact.step == step]
        if written:
            write(facts)
        if ours and not done:
            done.extend(ours)
            act(world)
        if not written and coordinator.alive:
            write(facts)

    coordinator._write = writing  # type: ignore[method-assign, assignment]
    world.run()
    assert done, "the moment never came"
    return outcome(world)


def killed(world: World) -> None:
    KillCoordinator(0.0, 0.1).strike(world)


# Of a step that is stored (2), evaluated (3), both (11), neither (4), the first and the last.
@pytest.mark.parametrize("step", [0, 2, 3, 4, 11, 15])
@pytest.mark.parametrize("written", [True, False])
def test_killed_between_a_commit_and_its_words_the_words_are_said_again(step: int, written: bool) -> None:
    assert at_commit(step, killed, written=written) == UNDISTURBED


@pytest.mark.parametrize("written", [True, False])
def test_a_worker_that_dies_with_the_coordinator_is_replaced(written: bool) -> None:
    def both(world: World) -> None:
        killed(world)
        Crash(0.0, 0.0, "w1").strike(world)

    assert at_commit(7, both, written=written) == UNDISTURBED


def test_a_worker_that_comes_back_too_late_is_not_waited_for() -> None:
    world = World(Scenario(seed=1, workers=4, pipeline=1, faults=(KillCoordinator(5.0, 0.5),)))
    world.clock.after(5.1, lambda: world.network.partition("w1", "coordinator", 25.0))
    world.run()
    assert outcome(world) == UNDISTURBED
    assert any("w1 did not come back after our restart" in text for _, text in world.clock.story)


def test_killed_while_stages_load_the_same_plan_is_gone_on_with() -> None:
    """Some have heard of the plan and some have not; the last one's load is over when the others' is not."""
    for at_s in (2.36, 2.375, 2.6, 2.97, 2.975, 2.99, 3.0, 3.01, 3.02):
        found = ran(KillCoordinator(at_s, 0.1))
        assert (at_s, found.steps) == (at_s, UNDISTURBED.steps)
        assert len(found.plans) <= 2


def test_two_jobs_go_on_and_a_federated_one_beside_them() -> None:
    faults = (KillCoordinator(6.0, 0.5), KillCoordinator(9.0, 2.0))
    for scenario in (Scenario(3, 6, 2, 0, faults), Scenario(3, 6, 1, 1, faults)):
        world = holding(scenario)
        commits = [(fact.job, fact.step) for fact in world.facts(StepCommitted)]
        assert len(commits) == len(set(commits))
