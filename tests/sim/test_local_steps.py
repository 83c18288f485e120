"""Peers with local steps in simulated worlds: whoever is lost, the others go on with the steps they took."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from atoll.job import TrainingSpec
from atoll.plan import Plan
from coordinator.messages import instructions as do
from coordinator.messages.facts import PlanAdopted, Reconfigured, RoundMet, StepCommitted
from coordinator.messages.jobs import Phase
from strategies.exchanges.partners import Group, groups_of
from tests.parameters import sampled
from tests.sim import compute, local_steps
from tests.sim.compute import Bench
from tests.sim.faults import Crash, Slow
from tests.sim.shrink import holding
from tests.sim.world import Scenario, scenario, violation_of
from worker.session import events as e


def peers(seed: int) -> Scenario:
    """A world drawn by its seed in which peers take steps of their own."""
    drawn, replicas = scenario(seed), 2 + seed % 3
    return replace(
        drawn,
        workers=max(drawn.workers, replicas + seed % 2),
        pipeline=1,
        federated=0,
        steps=40,
        replicas=replicas,
        local_steps=1 + seed % 7,
        standbys=0,
    )


def test_undisturbed_peers_commit_once_a_period() -> None:
    world = holding(Scenario(seed=1, workers=3, replicas=3, local_steps=5))
    assert [fact.step for fact in world.facts(StepCommitted)] == [4, 9, 14, 15]
    assert all(len(fact.included) == 3 for fact in world.facts(RoundMet))


def test_a_peers_death_costs_no_step_of_the_others() -> None:
    crash = Crash(4.0, 0.0, "w1")
    world = holding(Scenario(seed=2, workers=3, replicas=3, local_steps=5, faults=(crash,)))
    assert [fact.step for fact in world.facts(StepCommitted)] == [4, 9, 14, 15]
    met = world.facts(RoundMet)
    assert [len(fact.included) for fact in met][-1] == 2
    assert "w1" in met[-1].missing
    assert world.coordinator.shadow.jobs["job-1"].outcome == Phase.FINISHED


def test_an_idle_worker_takes_a_lost_peers_place() -> None:
    crash = Crash(6.0, 0.0, "w0")
    world = holding(Scenario(seed=3, workers=4, replicas=3, local_steps=4, steps=40, faults=(crash,)))
    moves = world.facts(Reconfigured)
    assert any(fact.absent for fact in moves)
    assert any(fact.newcomers for fact in moves)
    met = world.facts(RoundMet)
    assert len(met[-1].included) == 3
    assert not met[-1].missing


def test_a_lost_peer_that_is_back_takes_its_own_place() -> None:
    crash = Crash(6.0, 3.0, "w1")
    world = holding(Scenario(seed=3, workers=3, replicas=3, local_steps=4, steps=60, faults=(crash,)))
    met = world.facts(RoundMet)
    assert any("w1" in fact.missing for fact in met)
    assert not met[-1].missing


def test_a_worker_that_never_loads_a_lost_peers_stage_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Bench._load

    def broken(self: Bench, work: do.Assign) -> None:
        if self.process.name != "w3":
            right(self, work)
            return
        reason = "its disk is full"
        self.post(e.StageFailed(work.job, work.plan.version, work.first_step, reason))

    monkeypatch.setattr(Bench, "_load", broken)
    crash = Crash(6.0, 0.0, "w1")
    world = holding(Scenario(seed=3, workers=4, replicas=3, local_steps=40, steps=400, faults=(crash,)))
    assert world.coordinator.shadow.jobs["job-1"].outcome == Phase.FINISHED
    assert len(world.facts(PlanAdopted)) == 1
    tried = [fact for fact in world.facts(Reconfigured) if fact.newcomers]
    assert 1 <= len(tried) <= 2


def test_a_round_does_not_wait_for_a_slow_peer() -> None:
    """With a quorum the others' rounds begin with the steps that it has."""
    slow = Slow(4.0, 60.0, "w1")
    three = Scenario(seed=2, workers=3, replicas=3, local_steps=20, steps=120, faults=(slow,))
    patient, met = holding(three).facts(RoundMet), holding(replace(three, quorum=2)).facts(RoundMet)
    assert all(set(fact.late) <= {"w1"} and not fact.missing for fact in met)
    late = [fact.late["w1"] for fact in met if fact.late]
    assert late
    assert median(late) < 10, "five times slower, but for the way to the coordinator and back"
    patient_s, early_s = (rounds[-1].at_s - rounds[0].at_s for rounds in (patient, met))
    assert early_s < 0.6 * patient_s


@pytest.mark.parametrize("first", sampled(1, [0, 8]))
def test_everything_holds_where_rounds_begin_early(first: int) -> None:
    for seed in range(first, first + 8):
        drawn = peers(seed)
        holding(replace(drawn, quorum=max(1, drawn.replicas - 1), local_steps=2 + seed % 6))


@pytest.mark.parametrize("first", sampled(1, [0, 8]))
def test_everything_holds_where_peers_take_local_steps(first: int) -> None:
    for seed in range(first, first + 8):
        found = peers(seed)
        holding(found)


GOSSIP = ("saps", "swarm", "wagma")


@pytest.mark.parametrize("rule", GOSSIP)
def test_gossip_exchanges_in_groups_and_ends_with_one_model(rule: str) -> None:
    world = holding(Scenario(seed=1, workers=5, replicas=4, local_steps=2, exchange=rule))
    met = world.facts(RoundMet)
    assert [fact.step for fact in met] == list(range(1, 16, 2))
    assert all(len(fact.groups) > 1 for fact in met[:-1])
    assert met[-1].groups == ()


@pytest.mark.parametrize("first", sampled(1, [3, 6]))
@pytest.mark.parametrize("rule", GOSSIP)
def test_everything_holds_where_peers_gossip(rule: str, first: int) -> None:
    for seed in range(first, first + 3):
        found = replace(peers(seed), exchange=rule)
        holding(found)


def test_a_peer_with_another_result_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Bench._join_peers

    def bug(self: Bench) -> None:
        """Take its own part for that of another."""
        held, running = self.held, self.running
        if held is not None and running is not None and held.replica == 1 and held.own:
            for rank in held.other_ranks.values():
                self.parts[(*running, rank)] = local_steps.coded(held.own)
        right(self)

    monkeypatch.setattr(Bench, "_join_peers", bug)
    _, world = violation_of(Scenario(seed=1, workers=2, replicas=2, local_steps=4))
    state = world.coordinator.scheduler.jobs["job-1"]
    assert state.phase is Phase.FAILED, "of two nobody knows which"
    assert "different results" in state.reason
    assert world.coordinator.shadow.jobs["job-1"].steps == 0
    world = holding(Scenario(seed=1, workers=4, replicas=3, local_steps=4))
    assert world.coordinator.shadow.jobs["job-1"].outcome == Phase.FINISHED
    assert len(world.facts(PlanAdopted)) == 1
    moves = world.facts(Reconfigured)
    assert next(fact.absent for fact in moves if "different results" in fact.reason) == (1,)
    first = next(fact for fact in world.facts(RoundMet))
    assert len(first.included) == 2


def test_peers_that_derive_other_groups_commit_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def others(plan: Plan, training: TrainingSpec, last: int) -> tuple[Group, ...]:
        return groups_of(plan, replace(training, seed=training.seed + 1), last)

    monkeypatch.setattr(compute, "groups_of", others)
    _, world = violation_of(Scenario(seed=1, workers=5, replicas=4, local_steps=2, exchange="swarm"))
    state = world.coordinator.scheduler.jobs["job-1"]
    assert state.phase is Phase.FAILED
    assert "expected are those of" in state.reason
