"""Sites of several devices in plans: their inside plan, its seconds and bytes, and what plans say of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from atoll.job import EXACTLY, Optimizer, TrainingSpec
from atoll.mesh.layout import Inside
from atoll.mesh.share import Terms, share, trained_names
from atoll.opdag import OpDag
from atoll.program import stage_programs
from coordinator.client.fleet_file import parse_fleet
from coordinator.planning.costs.fleet import Device, Fleet, Mesh
from coordinator.planning.costs.memory import MemoryModel
from coordinator.planning.costs.traffic import Traffic
from coordinator.planning.inside.costs import InsideCosts, inside_costs, joint_s
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.problem import Problem
from tests.worker.mesh.site import plain
from tests.worker.stage.steps.crew import case

TRAINING = TrainingSpec(steps=4, n_micro=4, seed=1, optimizer=Optimizer(lr=1e-3))
FAST = Mesh(2, 1e-6, 1e12)
MIDDLING = Mesh(2, 1e-5, 1e8)
SLOW = Mesh(2, 5e-3, 1e6)


@cache
def dag() -> OpDag:
    return case("gpt2").dag


def fleet(*devices: Device) -> Fleet:
    n = len(devices)
    apart = ~np.eye(n, dtype=bool)
    return Fleet(devices, np.where(apart, 1e9, np.inf), np.where(apart, 1e-3, 0.0))


def need() -> float:
    """Bytes of the whole model on one device."""
    return MemoryModel(dag(), TRAINING, Traffic(dag(), TRAINING.optimizer)).bytes(0, len(dag().ops), 1)


def device(name: str, mesh: Mesh | None = None, share: float = 2.0) -> Device:
    each = int(share * need())
    return Device(name, each * (mesh.size if mesh else 1), gflops={"": 0.05}, op_overhead_s=1e-7, mesh=mesh)


def request(*devices: Device, training: TrainingSpec = TRAINING) -> PlanRequest:
    return PlanRequest("job", 1, dag(), None, training, fleet(*devices))


def test_a_site_whose_devices_are_joined_fast_takes_half_the_time_and_says_how() -> None:
    alone = make_plan(request(device("one")))
    joint = make_plan(request(device("site", FAST)))
    assert alone.prediction is not None
    assert joint.prediction is not None
    assert joint.stages[0].inside in list(Inside)
    assert alone.stages[0].inside == ""
    ratio = joint.prediction.stages[0].compute_s / alone.prediction.stages[0].compute_s
    assert 0.5 < ratio < 0.75
    (note,) = (note for note in joint.prediction.notes if note.startswith("inside site: "))
    assert "on 2 devices" in note
    there = {kind for kind in Inside if f"{kind} " in note or f"{kind}:" in note}
    assert there == {*Inside} - {Inside.EXPERTS, Inside.RING}  # it has none, and attention draws dropout


def test_of_two_equal_speeds_the_site_gets_the_larger_stage() -> None:
    plan = make_plan(request(device("one", share=0.7), device("site", FAST, share=0.7)))
    assert plan.prediction is not None
    bytes_of = {stage.worker: stage.memory_bytes for stage in plan.prediction.stages}
    assert bytes_of.get("site", 0) > bytes_of.get("one", 0)


def test_a_model_of_one_and_a_half_devices_fits_two_joined_ones() -> None:
    site = device("site", FAST, share=0.8)
    plan = make_plan(request(site))
    assert plan.prediction is not None
    (stage,) = plan.prediction.stages
    assert need() > site.memory_limit_bytes / 2
    assert 0.9 * need() < stage.memory_bytes <= stage.memory_limit_bytes
    assert plan.stages[0].inside == Inside.SHARDS


def extra_s(found: InsideCosts, mesh: Mesh) -> float:
    """Seconds of collectives for a micro-batch, its part of those that come once a step included."""
    once = sum(joint_s(sent, mesh) for sent in found.divided.sent_once.values())
    return once / TRAINING.n_micro + sum(
        joint_s(sent, mesh) for both in found.divided.sent.values() for sent in both
    )


def test_whole_models_are_chosen_where_there_is_room_and_sum_their_gradients_once_a_step() -> None:
    plan = make_plan(request(device("site", MIDDLING)))
    assert plan.stages[0].inside == Inside.DATA
    (one, many) = (
        inside_costs(dag(), replace(TRAINING, n_micro=micros), EXACTLY, Inside.DATA, 2) for micros in (1, 16)
    )
    sums = sum(sent.n_bytes for sent in one.divided.sent_once.values())
    whole = sum(state.meta.nbytes for state in dag().parameters.values())
    assert 0.9 * whole < sums <= whole  # 2 (D - 1) / D of it; what ops use whole is not summed
    assert one.sent_bytes - many.sent_bytes == sums - sums // 16
    assert one.stored == 1.0


@pytest.mark.parametrize("kind", list(Inside))
def test_collectives_cost_alpha_each_and_beta_a_byte(kind: Inside) -> None:
    found = inside_costs(dag(), TRAINING, EXACTLY, kind, 2)
    problem = Problem(dag(), TRAINING, fleet(device("one")))
    alone = problem.table.costs(problem.fleet.devices[0])
    fast, slow = found.costs(alone, FAST), found.costs(alone, SLOW)
    more = extra_s(found, SLOW) - extra_s(found, FAST)
    total = [float((costs.forward_s + costs.backward_s).sum()) for costs in (slow, fast)]
    assert total[0] - total[1] == pytest.approx(more)
    assert found.stored < 0.7 or kind is Inside.DATA


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gpt2", "llama"])  # tied, and not
def test_what_a_cut_keeps_from_being_divided_is_priced_whole(name: str, every: int) -> None:
    """Of every stage that a cut makes, against the stage's own inside plan, as the worker derives it."""
    whole = plain(name).dag
    parameters = {name: state.meta for name, state in whole.parameters.items()}
    metas = {**parameters, **{n: s.meta for n, s in whole.buffers.items()}, **whole.constants, **whole.inputs}
    terms = Terms(Inside.TENSOR, 2, metas, trained_names(whole.parameters, TRAINING))
    (program,) = stage_programs(whole, (0,))
    divided = share(program, terms).divided
    regions = inside_costs(whole, TRAINING, EXACTLY, Inside.TENSOR, 2).regions
    assert regions.whole_ops(0, len(whole.ops)) == []
    assert regions.more_bytes(0, len(whole.ops)) == 0.0
    broken = 0
    for cut in whole.cuttable()[::every]:
        for at, stage in enumerate(stage_programs(whole, (0, cut))):
            a, b = ((0, cut), (cut, len(whole.ops)))[at]
            own = share(stage, terms).divided
            less = {op for op in divided if a <= op < b} - own
            assert less <= set(regions.whole_ops(a, b)), (cut, at)
            broken += bool(less)
    assert broken


def test_where_links_inside_are_slow_the_kind_that_sends_less_is_chosen() -> None:
    insides = {kind: inside_costs(dag(), TRAINING, EXACTLY, kind, 2) for kind in Inside}
    least = min(insides.values(), key=lambda found: extra_s(found, SLOW))
    problem = Problem(dag(), TRAINING, fleet(device("site", SLOW)))
    (chosen,) = problem.inside
    assert chosen is not None
    assert chosen.kind is least.kind


def test_peers_with_steps_of_their_own_use_the_first_device_alone() -> None:
    training = replace(TRAINING, replicas="auto", exchange="diloco", local_steps=4)
    problem = Problem(dag(), training, fleet(device("site", FAST), device("one")))
    assert problem.inside == [None, None]
    assert problem.limits[0] == pytest.approx(problem.limits[1])


def test_a_fleet_file_names_sites_of_several_devices() -> None:
    found = parse_fleet(
        {
            "device": [
                {"name": "rack", "devices": 8, "memory_mib": 100, "inside_gbps": 200, "inside_us": 5},
                {"name": "home"},
            ]
        }
    )
    rack, home = found.devices
    assert rack.mesh is not None
    assert (rack.mesh.size, rack.mesh.bytes_per_s) == (8, 2e11)
    assert rack.mesh.latency_s == pytest.approx(5e-6)
    assert rack.memory_limit_bytes == 8 * 100 * 2**20
    assert rack.model_limit_bytes == 100 * 2**20
    assert (home.mesh, home.processes) == (None, 1)
