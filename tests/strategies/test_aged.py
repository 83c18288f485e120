"""Sums by model: no grouping over hosts changes a bit, and each model's total counts by its age."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.aged import VersionSums
from strategies.fixed import Accumulator, FixedSums, Grid
from strategies.layout import Layout
from strategies.linear import AVERAGED, SAMPLES, TRAINED, WEIGHT
from strategies.sums import Contribution, Sums, Term

HOLDERS = "holders"
LAYOUT = Layout.of({"w": np.zeros((3, 2), np.float32), "mean": np.zeros(2, np.float64)}, ["w"], ["mean"])


def grid(samples: float) -> Grid:
    return Grid({TRAINED: samples, AVERAGED: samples, HOLDERS: 64.0}, {SAMPLES: samples, WEIGHT: samples})


def contribution(seed: int) -> Contribution:
    draw = np.random.default_rng(seed)
    samples = float(draw.integers(1, 40))
    terms = {
        TRAINED: Term(samples, {"w": draw.normal(size=(3, 2)).astype(np.float32)}),
        AVERAGED: Term(samples, {"mean": draw.normal(size=2)}),
        HOLDERS: Term(1.0, {"w": draw.integers(0, 2, (3, 2)).astype(np.float32)}),
    }
    return Contribution(terms, {SAMPLES: samples, WEIGHT: samples})


def weight(age: int) -> float:
    return float((1.0 + age) ** -0.5)


def unchanged(sums: FixedSums) -> FixedSums:
    return sums


def summed(parts: list[tuple[int, float, list[int]]], behind: Any = None) -> Sums:
    """Sums of hosts' parts: (age, samples of the grid, seeds of the clients)."""
    found = VersionSums(grid(2000.0), LAYOUT, weight)
    for age, samples, seeds in sorted(parts, key=lambda part: (-part[0], part[1], min(part[2]))):
        held = Accumulator(grid(samples))
        for seed in seeds:
            held.add(contribution(seed))
        found.add(held.sums(), age, grid(samples), behind)
    return found.total(unchanged)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_grouping_changes_a_bit(seed: int) -> None:
    draw = random.Random(seed)
    clients = [(draw.randrange(4), draw.choice((1000.0, 4000.0)), at) for at in range(draw.randint(1, 14))]
    versions: dict[tuple[int, float], list[int]] = {}
    for age, samples, at in clients:
        versions.setdefault((age, samples), []).append(at)
    alone = summed([(age, samples, seeds) for (age, samples), seeds in versions.items()])
    parts = []
    for (age, samples), seeds in versions.items():
        draw.shuffle(seeds)
        while seeds:
            count = draw.randint(1, len(seeds))
            parts.append((age, samples, seeds[:count]))
            seeds = seeds[count:]
    found = summed(parts)
    assert found.scalars == alone.scalars
    assert found.clients == alone.clients == len(clients)
    for term, arrays in alone.arrays.items():
        for name, array in arrays.items():
            assert found.arrays[term][name].tobytes() == array.tobytes()


def test_a_models_changes_count_by_its_age_and_what_is_counted_counts_whole() -> None:
    found = summed([(3, 1000.0, [1, 2]), (0, 1000.0, [3])])
    terms = {seed: contribution(seed).terms for seed in (1, 2, 3)}
    for term, name in ((TRAINED, "w"), (AVERAGED, "mean"), (HOLDERS, "w")):
        shares = {1: 1.0, 2: 1.0, 3: 1.0} if term == HOLDERS else {1: 0.5, 2: 0.5, 3: 1.0}
        wanted = sum(
            share * terms[seed][term].weight * terms[seed][term].arrays[name].astype(np.float64)
            for seed, share in shares.items()
        )
        np.testing.assert_allclose(found.arrays[term][name], wanted, atol=1e-6)
    assert found.arrays[TRAINED]["w"].dtype == np.float32
    assert found.arrays[AVERAGED]["mean"].dtype == np.float64
    assert found.scalars[SAMPLES] == sum(t[TRAINED].weight for t in terms.values())  # FedBuff's divisor


def test_a_strategy_that_averages_models_sees_old_ones_from_the_newest() -> None:
    shift = {"w": np.full((3, 2), 0.25, np.float32), "mean": np.full(2, -1.0)}
    plain, seen = summed([(3, 1000.0, [1, 2])]), summed([(3, 1000.0, [1, 2])], lambda: shift)
    samples = plain.scalars[SAMPLES]
    np.testing.assert_allclose(
        seen.arrays[TRAINED]["w"], plain.arrays[TRAINED]["w"] + 0.5 * samples * 0.25, rtol=1e-6
    )
    np.testing.assert_allclose(seen.arrays[AVERAGED]["mean"], plain.arrays[AVERAGED]["mean"] - 0.5 * samples)
    np.testing.assert_array_equal(seen.arrays[HOLDERS]["w"], plain.arrays[HOLDERS]["w"])
