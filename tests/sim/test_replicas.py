"""Replicas in simulated worlds: a step counts when every replica has reported it, whatever is lost."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from coordinator.messages import events as ev
from coordinator.messages.facts import (
    CheckpointStored,
    PlanAdopted,
    Reconfigured,
    StepCommitted,
    from_record,
)
from coordinator.messages.jobs import JobState, Phase
from coordinator.pipeline.changes import whole_replicas
from tests.parameters import sampled
from tests.sim.compute import Bench
from tests.sim.faults import Crash, CutOff, Fault, Freeze, Hang, KillCoordinator, Leave, Partition
from tests.sim.shrink import holding
from tests.sim.test_reconfigure import LOADED_S, ran
from tests.sim.world import Scenario, World, scenario, violation_of


def replicated(seed: int) -> Scenario:
    """A world drawn by its seed in which pipelines are replicated."""
    drawn = scenario(seed)
    return replace(drawn, pipeline=1, federated=0, replicas=2 + seed % 2, local_steps=0)


def test_replicas_of_other_cuts_end_as_an_undisturbed_run_does() -> None:
    for workers, replicas in ((2, 2), (3, 2), (4, 2), (5, 3)):
        world = holding(Scenario(seed=1, workers=workers, replicas=replicas))
        record = world.coordinator.shadow.jobs["job-1"]
        assert record.version == 1
        assert record.plan is not None
        assert len(record.plan.replicas) == replicas


@pytest.mark.parametrize("first", sampled(1, [0, 10]))
def test_everything_holds_where_pipelines_are_replicated(first: int) -> None:
    for seed in range(first, first + 10):
        found = replicated(seed)
        holding(found)


def test_a_replica_that_leaves_out_a_part_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Bench._join_replicas

    def bug(self: Bench) -> None:
        """Take its own part for those of the others."""
        held, running = self.held, self.running
        if held is not None and running is not None and held.replica == 1 and running[2] in held.values:
            for replica in held.others.values():
                self.parts[(*running, replica)] = held.values[running[2]]
        right(self)

    monkeypatch.setattr(Bench, "_join_replicas", bug)
    _, world = violation_of(Scenario(seed=1, workers=4, replicas=2))
    state = world.coordinator.scheduler.jobs["job-1"]
    assert state.phase is Phase.FAILED
    assert "different gradients" in state.reason
    assert world.coordinator.shadow.jobs["job-1"].steps == 0


def test_a_report_that_lacks_losses_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ev.StepReady.__init__

    def fewer(self: ev.StepReady, *given: object, **named: object) -> None:
        made(self, *given, **named)
        if len(self.losses) > 1:  # of a share
            object.__setattr__(self, "losses", self.losses[:-1])

    monkeypatch.setattr(ev.StepReady, "__init__", fewer)
    world = holding(Scenario(seed=1, workers=2, replicas=2))
    found = [from_record(record) for record in world.coordinator.folder.records]
    replicas, under = list[int](), list[int]()
    for fact in found:
        if isinstance(fact, PlanAdopted | Reconfigured) and fact.plan is not None:
            replicas.append(len(fact.plan.replicas))
        elif isinstance(fact, StepCommitted):
            under.append(replicas[-1])
    assert replicas[:2] == [2, 1], "the other replica goes on without who reports so"
    assert under == [1] * 16


# ---------------------------------------------------------------- a replica is lost, and nobody is idle


def replicas_left(moves: list[Reconfigured]) -> list[int]:
    """How many replicas went on at each reconfiguration that left some behind."""
    return [len(fact.plan.replicas) for fact in moves if fact.plan is not None]


@pytest.mark.parametrize(
    ("kind", "worker"),
    [
        (Crash, "w0"),
        (Crash, "w3"),
        (Leave, "w0"),
        (Freeze, "w3"),
        (Hang, "w0"),
        (Partition, "w3"),
        (CutOff, "w0"),
    ],
)
def test_the_replica_that_is_whole_goes_on_whoever_of_the_other_is_lost(
    kind: type[Fault], worker: str
) -> None:
    fault = kind(LOADED_S + 0.7, 0.0 if kind in (Crash, Hang) else 9.0, worker)  # type: ignore[call-arg]
    _, moves = ran(Scenario(seed=1, workers=4, replicas=2, faults=(fault,)))
    assert replicas_left(moves) == [1]
    stay = {"w2", "w3"} if worker == "w0" else {"w0", "w1"}
    assert set(moves[-1].workers) == stay
    assert moves[-1].newcomers == ()


def test_of_three_replicas_two_go_on_and_then_one() -> None:
    faults = tuple(Crash(round(at_s, 2), 0.0, w) for at_s, w in ((6.0, "w0"), (6.0, "w1"), (9.0, "w5")))
    world, moves = ran(Scenario(seed=2, workers=6, replicas=3, faults=faults))
    assert replicas_left(moves) == [2, 1]
    assert moves[-1].workers == ("w2", "w3")
    plan = world.coordinator.shadow.jobs["job-1"].plan
    assert plan is not None
    assert [replica.micros for replica in plan.replicas] == [(0, 4)]


def test_who_is_left_of_the_lost_replica_takes_over_the_next_rank_that_is_lost() -> None:
    faults = (Crash(6.0, 0.0, "w0"), Crash(9.0, 0.0, "w5"))
    _, moves = ran(Scenario(seed=2, workers=6, replicas=3, faults=faults))
    assert [(fact.workers, fact.newcomers) for fact in moves] == [
        (("w2", "w3", "w4", "w5"), ()),
        (("w2", "w3", "w4", "w1"), (3,)),
    ]


def test_whole_replicas_go_on_though_another_is_lost_in_the_same_moment() -> None:
    faults = (Crash(LOADED_S + 0.7, 0.0, "w1"), Crash(LOADED_S + 0.75, 0.0, "w2"))
    _, moves = ran(Scenario(seed=3, workers=6, replicas=3, faults=faults))
    assert moves[-2].workers == ("w4", "w5")
    # Who is left makes a replica, though it repeats steps to compare: one check follows the other.
    assert moves[-1].workers == ("w4", "w5", "w0", "w3")


@pytest.mark.parametrize(
    ("worker", "delay_s"),
    [("w1", 0.02), ("w2", 0.3), ("w1", 0.35), ("w2", 0.4), ("w1", 0.5), ("w2", 0.9)],
)
def test_the_coordinator_dies_while_the_whole_replica_goes_on(worker: str, delay_s: float) -> None:
    faults = (
        Crash(LOADED_S + 1.0, 0.0, worker),
        KillCoordinator(round(LOADED_S + 1.0 + delay_s, 2), 0.2),
    )
    _, moves = ran(Scenario(seed=4, workers=4, replicas=2, faults=faults))
    assert replicas_left(moves) == [1]


@pytest.mark.parametrize(("worker", "late_s"), [("w0", 0.01), ("w0", 0.2), ("w0", 0.45), ("w3", 0.2)])
def test_a_replica_that_is_lost_after_the_last_commit_costs_no_step(worker: str, late_s: float) -> None:
    """Also where it is the one that stores the result: then another does."""
    undisturbed, _ = ran(Scenario(seed=1, workers=4, replicas=2))
    end_s = max(fact.at_s for fact in undisturbed.facts(StepCommitted)) - 1000.0
    ran(Scenario(seed=1, workers=4, replicas=2, faults=(Crash(round(end_s + late_s, 3), 0.0, worker),)))


def test_the_state_is_stored_as_it_is_since_nobody_can_repeat_the_steps_before() -> None:
    world, moves = ran(
        Scenario(seed=1, workers=4, replicas=2, faults=(Crash(LOADED_S + 2.2, 0.0, "w0"),), log_steps=2)
    )
    stored = [fact.step for fact in world.facts(CheckpointStored)]
    assert moves[0].step in stored
    assert moves[0].step % 3  # the job itself asks for one after each third


LONGER = 40


def grown(world: World) -> list[tuple[int, int]]:
    """Replicas, and how many newcomers, of every reconfiguration that changed their number, where each step
    is committed once under one plan that was adopted."""
    assert world.coordinator.shadow.jobs["job-1"].outcome == "finished"
    assert [fact.step for fact in world.facts(StepCommitted)] == list(range(LONGER))
    assert len(world.facts(PlanAdopted)) == 1
    moves = world.facts(Reconfigured)
    return [(len(fact.plan.replicas), len(fact.newcomers)) for fact in moves if fact.plan is not None]


@pytest.mark.parametrize("standbys", [0, 2])
def test_a_worker_that_is_back_makes_a_replica_again(standbys: int) -> None:
    fault = Crash(LOADED_S + 0.7, 0.6, "w3")
    world = holding(Scenario(seed=1, workers=4, replicas=2, faults=(fault,), steps=LONGER, standbys=standbys))
    found = grown(world)
    assert found == [(1, 0), (2, 2)]


@pytest.mark.parametrize(
    "second",
    [Crash(11.5, 0.0, "w2"), Crash(12.0, 0.0, "w2"), KillCoordinator(11.4, 0.3), KillCoordinator(12.0, 0.3)],
)
def test_whatever_is_lost_while_a_replica_is_added(second: Fault) -> None:
    faults = (Crash(LOADED_S + 0.7, 4.0, "w3"), second)
    world = holding(Scenario(seed=1, workers=4, replicas=2, faults=faults, steps=LONGER))
    found = grown(world)
    assert found[0] == (1, 0)


def test_a_job_that_goes_back_though_a_replica_is_whole_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(state: JobState, roster: object, lost: Collection[int]) -> str:
        """Take the replicas that are whole for broken."""
        return "no replica is whole"

    monkeypatch.setattr(whole_replicas, "without", bug)
    worlds = [
        found for found in map(replicated, range(40)) if any(isinstance(f, Crash) for f in found.faults)
    ]
    found = next(filter(None, (violation_of(world)[0] for world in worlds)), "")
    assert "have a whole replica" in found


def test_a_plan_that_forgets_the_micro_batches_of_who_is_lost_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = whole_replicas.without

    def bug(state: JobState, *rest: object) -> object:
        """Let the step end with the shares that the whole replicas had."""
        left = honest(state, *rest)  # type: ignore[arg-type]
        if isinstance(left, str) or state.plan is None:
            return left
        kept = {r.stages[0].worker: r.micros for r in state.plan.replicas}
        return replace(
            left, replicas=tuple(replace(r, micros=kept[r.stages[0].worker]) for r in left.replicas)
        )

    monkeypatch.setattr(whole_replicas, "without", bug)
    why, _ = violation_of(Scenario(seed=1, workers=6, replicas=3, faults=(Crash(LOADED_S, 0.0, "w5"),)))
    assert "is not that of an undisturbed run" in why
