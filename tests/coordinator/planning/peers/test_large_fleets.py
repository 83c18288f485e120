"""Plans of a large fleet of unlike machines: counts bound the search, and what it is at can be heard."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atoll.job import TrainingSpec
from coordinator.client.fleet_file import parse_fleet
from coordinator.planning import TUNED, planner
from coordinator.planning.costs.fleet import Fleet
from coordinator.planning.peers.likely import likely_counts, likely_ways
from coordinator.planning.peers.partitions import Parts, partitions
from coordinator.planning.peers.sketches import Sharing, Sketches
from coordinator.planning.planner import PlanRequest, make_plan, remembering
from coordinator.planning.search.op_fence import Effort
from coordinator.planning.ways import LOCAL_STEPS, WayKind, compare_ways
from tests.coordinator.planning.dags import gpt_like

if TYPE_CHECKING:
    import pytest

DAG = gpt_like(layers=4)
TRAINING = TrainingSpec(steps=100, n_micro=8)


def unlike(sites: int, each: int, memory_mib: tuple[float, float] = (60, 200)) -> Fleet:
    """Sites of machines of other speed and memory, 1 Gbit/s inside, 8 to 20 Mbit/s to all others."""
    draw = random.Random(4711)
    groups: list[dict[str, Any]] = [
        {
            "name": f"g{n}",
            "mbit": 1000,
            "ms": 0.3,
            "up_mbit": (rate := draw.uniform(8, 20)),
            "down_mbit": rate,
        }
        for n in range(sites)
    ]
    devices = [
        {"name": f"g{n}m{m}", "group": f"g{n}", "gflops": draw.uniform(5, 40),
         "memory_mib": draw.uniform(*memory_mib)}
        for m in range(each)
        for n in range(sites)
    ]  # fmt: skip
    return parse_fleet({"default": {"mbit": 50, "ms": 15}, "group": groups, "device": devices})


def asked(fleet: Fleet) -> PlanRequest:
    return PlanRequest("j", 1, DAG, None, TRAINING, fleet)


def test_a_large_fleets_ways_take_a_bounded_number_of_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of machines that are all different, where no two searches could be of twins."""
    searched, sketched, told = list[tuple[str, ...]](), list[Parts](), list[str]()
    honest, of = planner._searched, Sketches.of

    def counted(request: PlanRequest, effort: Effort) -> object:
        searched.append(tuple(device.worker for device in request.fleet.devices))
        return honest(request, effort)

    def drawn(self: Sketches, parts: Parts) -> Sharing:
        sketched.append(parts)
        return of(self, parts)

    monkeypatch.setattr(planner, "_searched", counted)
    monkeypatch.setattr(Sketches, "of", drawn)
    fleet = unlike(6, 3)
    request = remembering(asked(fleet), told.append)
    ways = compare_ways(request, inexact="diloco")
    assert all(way.plan is not None for way in ways if way.kind is not WayKind.DATA_PARALLEL)
    whole = sum(len(part) == len(fleet.devices) for part in searched)
    again = Counter(part for part in searched if len(part) < len(fleet.devices))
    assert whole == 1
    assert len(again) <= 2 * len(fleet.devices)  # of six ways that are planned, in parts of two or three
    assert max(again.values()) <= 3  # a rule's copies leave another room; not once for each share
    settings = [one for one in LOCAL_STEPS if one.exchange.rule == "diloco"]
    assert len(sketched) <= len(settings) * (TUNED.group_sketches + 100)
    assert {"planning one pipeline of 18 machines", "planning peers with diloco every 10 steps"} <= set(told)
    assert any("planning peers with diloco every 10 steps: pipeline" in words for words in told)
    searched.clear()
    sketched.clear()
    assert compare_ways(request, inexact="diloco") == ways
    assert all(len(part) == len(fleet.devices) for part in searched), "a part is not sought again"
    assert len(sketched) < 50


def test_of_a_large_fleet_the_likeliest_ways_of_replicas_are_planned() -> None:
    request = replace(asked(unlike(5, 4)), training=replace(TRAINING, replicas="auto", blocks=8))
    assert len(likely_ways(request, range(2, 9))) == TUNED.likely_ways
    assert likely_ways(request, range(2, 9), within_s=1e-6) == []  # one pipeline takes far less
    assert len(likely_counts(request, 8)) == 1
    small = replace(request, fleet=unlike(4, 4))
    assert list(likely_counts(small, 8)) == list(range(2, 9))
    every = [parts for count in (2, 3) for parts in partitions(small.fleet, count)]
    assert likely_ways(small, (2, 3), within_s=1e-6) == every


def test_a_cut_is_taken_again_for_another_share_and_not_where_memory_is_short() -> None:
    fleet = unlike(5, 4)
    request = remembering(replace(asked(fleet), training=replace(TRAINING, replicas="2")))
    assert request.twins is not None
    site = [device.worker for device in fleet.devices if device.site == "g0"]
    part = replace(request, fleet=fleet.subset(site))
    make_plan(part, part=True)
    other = replace(part, training=replace(part.training, n_micro=5))
    again = make_plan(other, part=True)
    assert request.twins.searches == 1
    anew = make_plan(replace(other, twins=None), part=True)
    assert again.prediction is not None
    assert anew.prediction is not None
    assert again.prediction.step_s <= 1.05 * anew.prediction.step_s
    make_plan(replace(part, training=replace(TRAINING, n_micro=5, exchange="diloco")), part=True)
    assert request.twins.searches == 2
    alone = remembering(replace(request, twins=None, fleet=fleet.subset(site)))
    assert alone.twins is not None
    assert not alone.twins.brief
