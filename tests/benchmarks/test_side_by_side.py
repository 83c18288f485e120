"""What the benchmark of jobs side by side makes of plans, runs and bits."""

from __future__ import annotations

import pytest
import torch

from benchmarks import side_by_side
from benchmarks.side_by_side import JOBS, Ran, crossing_bytes, differing, evenly, expected
from lab.reader import read_scenario

SITES: dict[str, str | None] = {"a": "north", "b": "north", "c": "middle", "d": "south"}


def test_the_bytes_over_a_line_are_those_of_links_that_leave_or_enter_its_home() -> None:
    links = [("a", "b", 100), ("b", "c", 7), ("c", "b", 5), ("c", "d", 4)]
    found = [{"source": s, "target": t, "bytes_per_step": size} for s, t, size in links]
    assert crossing_bytes({"prediction": {"links": found}}, SITES) == 5 + 4
    assert crossing_bytes({"prediction": {"links": found[:1]}}, SITES) == 0


def test_cuts_are_even() -> None:
    assert evenly(list(range(0, 40, 2)), 4) == "cut:10,20,30"
    assert evenly(list(range(40)), 1) == "cut:"


def test_tensors_that_are_missing_or_other_bits_are_named() -> None:
    one = {"w": torch.zeros(2), "b": torch.ones(2)}
    assert differing(one, {name: tensor.clone() for name, tensor in one.items()}) == []
    assert differing({"w": torch.full((2,), 1e-7), "x": torch.ones(2)}, one) == ["b", "w", "x"]


def test_the_simulator_lets_short_jobs_go_first_and_fifo_does_not() -> None:
    alone = {"long": 60.0, "large": 40.0, "three": 15.0, "one": 10.0, "two": 9.0}
    ran = Ran(submitted_s={job.name: 100.0 + at for at, job in enumerate(JOBS)}, crossing={"long": 1000})
    scenario = read_scenario("six_shared")
    short, first = (expected(scenario, policy, JOBS, alone, ran) for policy in ("srsf", "fifo"))
    assert short["long"] == pytest.approx(60.0, rel=0.01)
    assert short["three"] == pytest.approx(15.0, rel=0.01)
    assert first["three"] > first["large"] - 2.0 > 60.0
    assert sum(first.values()) > 1.25 * sum(short.values())
    assert side_by_side.CANCELLED.workers == 4
