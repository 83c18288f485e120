"""Sites beside other machines: their inside plan follows what a cut gives them, and the plan says why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.mesh.layout import Inside
from coordinator.planning.costs.fleet import Device, Fleet
from coordinator.planning.peers.replicas import best_plan, with_blocks
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.problem import Candidate, Problem, divided_as
from coordinator.planning.replay import timelines
from coordinator.planning.search.sites import divided, settled_kinds, suited
from tests.coordinator.planning.inside.test_costs import MIDDLING, TRAINING, dag, device

FAR = 1e6  # bits a second
DIVIDED = Inside.SEQUENCE  # the fastest for the tests' GPT-2 of those that divide matrices


def joined(*devices: Device, bps: float = 1e9) -> Fleet:
    n = len(devices)
    apart = ~np.eye(n, dtype=bool)
    return Fleet(devices, np.where(apart, bps, np.inf), np.where(apart, 1e-3, 0.0))


def request(*devices: Device, bps: float = 1e9) -> PlanRequest:
    return PlanRequest("job", 1, dag(), None, TRAINING, joined(*devices, bps=bps), standbys=0)


def notes(asked: PlanRequest, start: str) -> list[str]:
    plan = make_plan(asked)
    assert plan.prediction is not None
    return [note for note in plan.prediction.notes if note.startswith(start)]


def test_a_site_beside_a_machine_without_memory_divides_all_of_the_model() -> None:
    """`data` suits half of the model on each of two members, but one of them has no room for it."""
    site, home = device("site", MIDDLING, share=0.8), device("home", share=0.02)
    first, second = divided(Problem(dag(), TRAINING, joined(site, home)))
    assert [inside.kind for inside in (first.inside[0], second.inside[0]) if inside] == [Inside.DATA, DIVIDED]
    plan = make_plan(request(site, home))
    assert {stage.worker: stage.inside for stage in plan.stages}["site"] == DIVIDED


def test_one_site_alone_is_chosen_over_a_slow_link_though_half_of_the_model_would_fit_each_undivided() -> (
    None
):
    sites = [device(name, MIDDLING, share=0.8) for name in ("east", "west")]
    near, far = (make_plan(request(*sites, bps=bps)) for bps in (1e10, FAR))
    assert [stage.inside for stage in near.stages] == [Inside.DATA] * 2
    assert [stage.inside for stage in far.stages] == [DIVIDED]
    assert far.prediction is not None
    assert near.prediction is not None
    assert near.prediction.step_s < far.prediction.step_s


def test_a_stage_in_which_a_faster_kind_fits_takes_it() -> None:
    sites = [device(name, MIDDLING, share=0.8) for name in ("east", "west")]
    problem = Problem(dag(), TRAINING, joined(*sites))
    roomy = divided_as(problem, {"east": Inside.SHARDS, "west": Inside.SHARDS})
    half = Candidate((0, 1), (0, dag().cuttable()[len(dag().cuttable()) // 2]))
    scored = roomy.score(half)
    assert scored is not None
    found, better = suited(roomy, scored)
    assert better.step_s < scored.step_s
    assert "data" in [inside.kind for inside in found.inside if inside is not None]
    assert better.candidate == half
    same, unchanged = suited(found, better)
    assert (same, unchanged) == (found, better)


def test_kinds_that_are_settled_stay_on_another_fleet() -> None:
    fleet = joined(*(device(name, MIDDLING, share=0.8) for name in ("east", "west")))
    problem = Problem(dag(), TRAINING, fleet)
    one = fleet.subset(["east"])
    kinds = [p.on(one).inside[0] for p in (problem, settled_kinds(problem))]
    assert [inside.kind for inside in kinds if inside is not None] == [DIVIDED, Inside.DATA]


def test_a_plan_is_replayed_with_the_kinds_that_it_has() -> None:
    asked = request(device("site", MIDDLING, share=0.8), device("home", share=0.02))
    plan = make_plan(asked)
    assert plan.prediction is not None
    (timeline,) = timelines(asked, plan)
    assert timeline.step_s == pytest.approx(plan.prediction.step_s, rel=0.02)


def test_the_plan_names_its_inside_with_seconds_and_room_and_its_outside_with_one_site_alone() -> None:
    sites = [device(name, MIDDLING, share=0.8) for name in ("east", "west")]
    east, west = notes(request(*sites, bps=1e10), "inside ")
    assert east.startswith("inside east: data on 2 devices (")
    assert "), the fastest; for a micro-batch of the whole model " in east
    assert " s, each sends " in east
    assert west.startswith("inside west: ")
    (outside,) = notes(request(*sites, bps=1e10), "outside: ")
    assert outside.startswith("outside: a pipeline of 2 stages, east > west; its links carry 1.25 GB/s")
    assert "where devices inside send 0.1 GB/s" in outside
    assert " alone would compute " in outside
    assert outside.endswith(f"by {DIVIDED}")
    (inside,) = notes(request(*sites, bps=FAR), "inside ")
    assert f": {DIVIDED} on 2 devices" in inside
    assert "the fastest that has room" in inside
    assert "; data: " in inside
    assert ", but its stage needs " in inside
    (outside,) = notes(request(*sites, bps=FAR), "outside: ")
    assert " has the whole model" in outside


def test_replicas_that_are_sites_name_the_outside_too() -> None:
    sites = [device(name, MIDDLING, share=2.0) for name in ("east", "west")]
    asked = request(*sites)
    asked = replace(asked, training=with_blocks(replace(TRAINING, replicas="2")))
    plan = best_plan(asked)
    assert plan.prediction is not None
    starts = [note.partition(":")[0] for note in plan.prediction.notes]
    assert starts.count("outside") == 1
    assert {"inside east", "inside west"} <= set(starts)


def test_fleets_without_sites_have_neither() -> None:
    assert not notes(request(device("one"), device("two")), "outside")
