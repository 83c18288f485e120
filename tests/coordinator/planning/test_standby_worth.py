"""Whether the last machine is worth more in the plan or idle, and who decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.job import TrainingSpec
from atoll.plan import Outlook, Plan
from coordinator.planning.chosen import grown_fleet
from coordinator.planning.costs.fleet import Device, Fleet, LinkEstimate
from coordinator.planning.peers.replicas import best_plan
from coordinator.planning.planner import PlanRequest, make_plan
from protos.convert import from_proto, to_proto
from tests.coordinator.planning.dags import gpt_like
from tests.coordinator.planning.fleets import same_links

MIB = 2**20
DAG = gpt_like(12, d=512, tokens=128, vocab=4096, tied=False)
TRAINING = TrainingSpec(10_000, 8)
HOME = LinkEstimate(20e6, 0.01)


def homes(slow_gflops: float = 16.0, slow_mib: int = 8192, mbit: float = 20.0) -> Fleet:
    """Two machines and a slower third one, whose share of a step saves a few per cent."""
    devices = [
        Device(name, mib * MIB, gflops={"": gflops}, coordinator=HOME)
        for name, gflops, mib in (("a", 50.0, 8192), ("b", 50.0, 8192), ("slow", slow_gflops, slow_mib))
    ]
    return same_links(devices, 1e6 * mbit)


def planned(fleet: Fleet, **more: object) -> Plan:
    return make_plan(replace(PlanRequest("job", 1, DAG, None, TRAINING, fleet), **more))


def used(plan: Plan) -> list[str]:
    return sorted(place.worker for place in plan.places)


def figures(plan: Plan) -> tuple[list[str], float, Outlook]:
    assert plan.prediction is not None
    assert plan.prediction.outlook is not None
    return used(plan), plan.prediction.step_s, plan.prediction.outlook


def test_a_third_machine_that_saves_a_few_per_cent_is_left_idle_and_the_plan_says_why() -> None:
    fast, fast_s, all_in = figures(planned(homes(), standbys=0))
    plan = planned(homes())
    workers, step_s, outlook = figures(plan)
    assert (fast, workers) == (["a", "b", "slow"], ["a", "b"])
    assert 0.93 * step_s < fast_s < 0.97 * step_s
    assert outlook.standby == "slow"
    assert outlook.other_step_s == pytest.approx(all_in.step_s)
    assert outlook.step_s < all_in.step_s
    assert plan.left_out == (("slow", "it is worth more as a standby"),)
    (words,) = [note for note in plan.prediction.notes if "standby" in note]
    assert words.startswith(
        f"slow is worth more as a standby: in the plan a step takes {fast_s:.3g} s and a loss"
    )
    assert f"{all_in.step_s:.3g} s a step with it, {outlook.step_s:.3g} s without" in words


def test_a_third_machine_that_saves_more_is_in_the_plan() -> None:
    plan = planned(homes(slow_gflops=40.0))
    workers, _, outlook = figures(plan)
    assert workers == ["a", "b", "slow"]
    assert outlook.standby == ""
    assert outlook.other_step_s > outlook.step_s
    assert f"left idle as a standby {outlook.other_step_s:.3g} s" in plan.prediction.notes[-1]


def test_where_losses_are_rare_every_machine_is_in_the_plan() -> None:
    workers, _, outlook = figures(planned(replace(homes(), losses_per_s=1e-8)))
    assert (workers, outlook.standby) == (["a", "b", "slow"], "")


def test_a_machine_without_the_memory_to_take_over_is_left_idle_for_no_loss() -> None:
    """In the plan it is still of use."""
    small = homes(slow_mib=120)
    assert figures(planned(small, standbys=0))[0] == ["a", "b", "slow"]
    workers, _, outlook = figures(planned(small))
    assert (workers, outlook.standby) == (["a", "b", "slow"], "")


@pytest.mark.parametrize("partitioner", ["even", "proportional", "cut:50,100"])
def test_who_asks_for_a_cut_gets_all_devices(partitioner: str) -> None:
    workers, _, outlook = figures(planned(homes(), partitioner=partitioner))
    assert (workers, outlook.standby) == (["a", "b", "slow"], "")


def test_replicas_and_workers_beyond_the_fleet_are_ranked_by_their_step() -> None:
    beyond = planned(homes(), beyond=3)
    assert beyond.prediction is not None
    assert beyond.prediction.outlook is None
    assert used(beyond) == ["a", "b", "slow"]
    split = replace(TRAINING, replicas="2", blocks=2)
    replicas = best_plan(PlanRequest("job", 1, DAG, None, split, homes(mbit=1000.0)))
    assert replicas.prediction is not None
    assert replicas.prediction.outlook is None
    assert not any("loss" in note for note in replicas.prediction.notes)


def test_a_running_job_is_compared_on_all_workers_that_it_has() -> None:
    own, grown = grown_fleet(PlanRequest("job", 2, DAG, None, TRAINING, homes()), ["a", "b", "slow"])
    assert used(own) == ["a", "b", "slow"]
    assert used(grown) == ["a", "b"]


def test_compressed_plans_are_ranked_too() -> None:
    squeezed = replace(TRAINING, compress="auto")
    _, _, all_in = figures(planned(homes(), training=squeezed, standbys=0))
    workers, _, outlook = figures(planned(homes(), training=squeezed))
    assert outlook.step_s <= all_in.step_s
    assert len(workers) == (2 if outlook.standby else 3)


def test_the_same_fleet_gives_the_same_plan_and_its_outlook_travels() -> None:
    plan = planned(homes())
    assert plan == planned(homes())
    assert from_proto(to_proto(plan)) == plan
