"""Sums in whole numbers: equal bits in every grouping, a bounded error, and nothing ever wraps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from math import frexp, ldexp
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.errors import BadUpdate, UsageError
from strategies import STRATEGIES, make_strategy
from strategies.fixed import BITS, FULL_BITS, LIMIT, Accumulator, FixedSums, Grid, check_sums, real
from strategies.layout import Layout
from strategies.linear import Linear
from strategies.sums import Contribution, Sums, Term
from strategies.values import ClientUpdate
from tests.strategies.test_conformance import N, one_round, start

Array = NDArray[Any]
SIZE = 7


def contribution(weight: float, array: Any, scalar: float = 0.0) -> Contribution:
    return Contribution({"t": Term(weight, {"x": np.asarray(array)})}, {"s": scalar})


def summed(grid: Grid, *parts: Contribution | FixedSums) -> FixedSums:
    held = Accumulator(grid)
    for part in parts:
        held.add(part)
    return held.sums()


def layout(dtype: str = "float64") -> Layout:
    return Layout.of({"x": np.zeros(SIZE, dtype)}, {"x"})


def same(one: FixedSums, two: FixedSums) -> bool:
    return (one.loads, one.scalars, one.clients) == (two.loads, two.scalars, two.clients) and all(
        np.array_equal(one.arrays[term][name], array)
        for term, arrays in two.arrays.items()
        for name, array in arrays.items()
    )


elements = st.floats(-1e3, 1e3, width=32)
weights = st.one_of(st.integers(1, 1000).map(float), st.floats(1e-3, 1e3))
clients = st.lists(
    st.tuples(weights, st.lists(elements, min_size=SIZE, max_size=SIZE), st.floats(0, 100)),
    min_size=1,
    max_size=12,
)


def grid_of(drawn: list[Any], bits: int = BITS) -> Grid:
    return Grid({"t": sum(weight for weight, _, _ in drawn) * (1 + 1e-9)}, {"s": 100.0 * len(drawn)}, bits)


@settings(max_examples=150, deadline=None)
@given(clients, st.randoms(use_true_random=False))
def test_any_order_and_grouping_gives_equal_bits(drawn: list[Any], chance: Any) -> None:
    grid = grid_of(drawn)
    parts: list[Any] = [contribution(w, np.float32(x), s) for w, x, s in drawn]
    expected = summed(grid, *parts)
    chance.shuffle(parts)
    while len(parts) > 1:  # hosts of any size, sums of sums of any depth
        taken = [parts.pop() for _ in range(chance.randint(2, len(parts)))]
        parts.insert(chance.randint(0, len(parts)), summed(grid, *taken))
    found = summed(grid, *parts)
    assert same(found, expected)
    one, two = real(found, layout()), real(expected, layout())
    assert np.array_equal(one.arrays["t"]["x"], two.arrays["t"]["x"])
    assert one.scalars == two.scalars


@settings(max_examples=150, deadline=None)
@given(clients, st.integers(8, 48))
def test_the_error_stays_within_its_bound(drawn: list[Any], bits: int) -> None:
    grid = grid_of(drawn, bits)
    if max(abs(x) for _, row, _ in drawn for x in row) > grid.reach:
        return
    sums = summed(grid, *(contribution(w, np.float32(x), s) for w, x, s in drawn))
    for at in range(SIZE):
        products = [Fraction(w) * Fraction(x[at]) for w, x, _ in drawn]
        exact = int(sums.arrays["t"]["x"][at]) * Fraction(grid.unit("t"))
        bound = len(drawn) * Fraction(grid.unit("t")) / 2 + sum(map(abs, products)) / 2**53
        assert abs(exact - sum(products)) <= bound
    scalar = sum(Fraction(s) for _, _, s in drawn)
    most = len(drawn) * Fraction(grid.scalar_unit("s")) / 2
    assert abs(sums.scalars["s"] * Fraction(grid.scalar_unit("s")) - scalar) <= most


def test_a_mean_of_a_hundred_is_off_by_less_than_a_billionth_on_average_and_never_by_more_than_stated() -> (
    None
):
    draw = np.random.default_rng(0)
    n = draw.integers(20, 200, 100)
    deltas = (0.01 * draw.normal(size=(100, 4000))).astype(np.float32)
    grid = Grid({"t": float(n.sum())}, {"s": 1.0})
    sums = summed(grid, *(contribution(float(k), delta) for k, delta in zip(n, deltas, strict=True)))
    found = sums.arrays["t"]["x"] * grid.unit("t") / n.sum()
    exact = np.average(deltas.astype(np.float64), axis=0, weights=n)
    error = np.abs(found - exact)
    assert 0 < np.sqrt(np.mean(error**2)) < 3e-10
    assert error.max() <= 100 * grid.unit("t") / 2 / n.sum() <= 100 * 2.0**-BITS
    floats = np.zeros(4000, np.float32)
    for k, delta in zip(n, deltas, strict=True):
        floats += np.float32(k) * delta
    assert error.max() < np.abs(floats / n.sum() - exact).max() * 1.2


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-6, 1e9), st.floats(-1.0, 1.0))
def test_no_element_exceeds_its_load(weight: float, share: float) -> None:
    grid = Grid({"t": weight * 3}, {"s": 1.0})
    sums = summed(grid, contribution(weight, [share * grid.reach, grid.reach, -grid.reach]))
    assert np.abs(sums.arrays["t"]["x"]).max() <= sums.loads["t"] <= 2**FULL_BITS
    if frexp(weight)[0] == 0.5:
        assert np.abs(sums.arrays["t"]["x"]).max() == sums.loads["t"]


def test_what_would_exceed_the_sum_is_refused_in_every_grouping_and_changes_nothing() -> None:
    grid = Grid({"t": 1.0}, {"s": 1.0})
    whole = contribution(1.0, np.full(SIZE, grid.reach))
    held = Accumulator(grid)
    held.add(whole)
    before = held.sums().arrays["t"]["x"].copy()
    assert before.max() == 2**FULL_BITS
    for part in (whole, summed(grid, whole)):  # 2^61: one more than the limit
        with pytest.raises(BadUpdate, match="t would add up to 1 of what a sum may hold"):
            held.add(part)
    assert np.array_equal(held.sums().arrays["t"]["x"], before)
    assert (held.sums().clients, held.sums().loads["t"]) == (1, 2**FULL_BITS)
    held.add(contribution(0.999, np.full(SIZE, grid.reach)))
    assert 2**FULL_BITS < held.sums().arrays["t"]["x"].max() <= LIMIT


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (contribution(0.0, np.ones(3)), "a weight of 0 in t"),
        (contribution(-1.0, np.ones(3)), "a weight of -1"),
        (contribution(float("nan"), np.ones(3)), "a weight of nan"),
        (contribution(float("inf"), np.ones(3)), "a weight of inf"),
        (contribution(8.5, np.ones(3)), "a weight of 8.5 in t; above 0, at most 8"),
        (contribution(1.0, [1.0, np.nan, 0.0]), "not finite or beyond"),
        (contribution(1.0, np.float32([1.0, 0.0, np.inf])), "not finite or beyond"),
        (contribution(1.0, [1.0, 0.0, -np.inf]), "not finite or beyond"),
        (contribution(1.0, [0.0, 0.0, 2.0**26 * 1.001]), "beyond 6.71089e.07, the reach of sums of 34 bits"),
        (contribution(1.0, np.ones(3), float("nan")), "s = nan"),
        (contribution(1.0, np.ones(3), -0.5), "s = -0.5"),
        (contribution(1.0, np.ones(3), 5.0), "s = 5; from 0 to 4"),
    ],
)
def test_zero_weights_and_what_is_not_finite_are_refused_and_nothing_is_added(
    part: Contribution, why: str
) -> None:
    held = Accumulator(Grid({"t": 8.0}, {"s": 4.0}))
    held.add(contribution(1.0, np.ones(3), 1.0))
    before = held.sums().arrays["t"]["x"].copy()
    with pytest.raises(BadUpdate, match=why):
        held.add(part)
    assert np.array_equal(held.sums().arrays["t"]["x"], before)
    assert (held.sums().clients, held.sums().scalars["s"]) == (1, 2**58)


def test_sums_of_other_terms_names_or_grids_are_refused() -> None:
    grid = Grid({"t": 8.0}, {"s": 4.0})
    held = Accumulator(grid)
    held.add(contribution(1.0, np.ones(3)))
    with pytest.raises(BadUpdate, match="another grid"):
        held.add(summed(replace(grid, bits=30), contribution(1.0, np.ones(3))))
    with pytest.raises(ValueError, match="expected"):
        held.add(Contribution({"u": Term(1.0, {"x": np.ones(3)})}, {"s": 0.0}))
    with pytest.raises(ValueError, match="expected"):
        held.add(Contribution({"t": Term(1.0, {"y": np.ones(3)})}, {"s": 0.0}))
    for bits in (7, 49, 32.0):
        with pytest.raises(UsageError, match="bits"):
            Grid({"t": 1.0}, {}, bits)  # type: ignore[arg-type]
    for most in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="above 0"):
            Grid({"t": most}, {})


def received(sums: FixedSums, **changes: Any) -> FixedSums:
    return replace(sums, **changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"loads": {"t": 2**60}}, "t of 2 clients is 1152921504606846976; from 0 to 432345564227567618"),
        ({"loads": {"t": 1.5}}, "t of 2 clients is 1.5"),
        ({"loads": {"t": -1}}, "t of 2 clients is -1"),
        ({"loads": {"t": True}}, "t of 2 clients is True"),
        ({"loads": {}}, "expected ..t"),
        ({"loads": {"t": 1000}}, "'x' holds more than its load of 1000"),
        ({"scalars": {"s": 2**60}}, "s of 2 clients is"),
        ({"scalars": {"s": 1, "u": 1}}, "sums of"),
        ({"arrays": {"t": {"x": np.array([0, 2**62, 0])}}}, "more than its load"),
        ({"arrays": {"t": {"x": np.array([0, -(2**62), 0])}}}, "more than its load"),
    ],
)
def test_received_sums_may_claim_what_their_clients_may_and_no_more(changes: Any, why: str) -> None:
    grid, share = Grid({"t": 8.0}, {"s": 4.0}), Grid({"t": 3.0}, {"s": 1.5})
    sums = summed(grid, contribution(1.0, [1.0, -2.0, 0.5], 0.5), contribution(2.0, [1.0, 3.0, 0.5], 1.0))
    check_sums(sums, share)
    with pytest.raises(BadUpdate, match=why):
        check_sums(received(sums, **changes), share)


# ---------------------------------------------------------------- strategies

RULES = [make_strategy(name) for name in STRATEGIES]
WHOLE = [rule for rule in RULES if rule.facts.linear and rule.facts.bounded]


def test_which_strategies_sum_in_whole_numbers_is_declared() -> None:
    apart = {rule.name for rule in RULES if not rule.facts.linear}
    assert apart == {"coordinate_median", "trimmed_mean", "krum"}
    assert {rule.name for rule in RULES if not rule.facts.bounded} == {"qfedavg"}
    core = make_strategy("qfedavg").core
    assert isinstance(core, Linear)
    with pytest.raises(UsageError, match="qfedavg weighs clients by what they measured"):
        core.grid(10, 100)


def parts_of(rule: Linear, of: Layout, updates: list[ClientUpdate]) -> list[Contribution]:
    return [rule.contribute(of, update) for update in updates]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", WHOLE, ids=lambda rule: rule.name)
def test_every_such_strategy_gives_the_same_round_whoever_trains_whom(rule: Any, dtype: str) -> None:
    core: Linear = rule.core
    state, whole = start(rule, dtype)
    updates = one_round(rule, state, whole, {})
    contributions = parts_of(core, state.layout, updates)
    metas = core.term_metas(state.layout)
    for part in contributions:
        assert {
            term: {name: array.shape for name, array in held.arrays.items()}
            for term, held in part.terms.items()
        } == {term: {name: meta.shape for name, meta in held.items()} for term, held in metas.items()}
    grid = core.grid(N, sum(update.n_samples for update in updates))
    assert grid.weights.keys() == metas.keys()
    groups = [[range(N)], [range(3), range(3, 4), range(4, N)], [[at] for at in reversed(range(N))]]
    found = []
    for hosts in groups:
        partial = [summed(grid, *(contributions[at] for at in mine)) for mine in hosts]
        for sums, mine in zip(partial, hosts, strict=True):
            share = core.grid(sums.clients, sum(updates[at].n_samples for at in mine))
            check_sums(sums, share)
        found.append(core.finish(state, real(summed(grid, *partial), state.layout)))
    plain = rule.aggregate(state, updates)
    for other in found[1:]:
        assert bits(other.weights) == bits(found[0].weights)
        assert {n: bits(s) for n, s in other.slots.items()} == {n: bits(s) for n, s in found[0].slots.items()}
    # FedNova divides weights by local steps and multiplies the mean by them again, and the errors with it.
    # Singular vectors turn by an error over the gap between two singular values.
    error = N * ldexp(1.0, -BITS) * (20 if rule.name in ("fednova", "fedsvd") else 1)
    rough = 1e-6 if dtype == "float32" else 0.0
    for name, array in plain.weights.items():
        assert found[0].weights[name].dtype == array.dtype
        if rule.name not in ("fedadam", "fedyogi", "fedadagrad"):  # whose steps divide by small moments
            assert np.abs(found[0].weights[name] - array).max(initial=0.0) <= error + rough


def bits(arrays: Mapping[str, Array]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def test_halves_are_summed_in_floats_that_do_not_lose_small_clients() -> None:
    grid = Grid({"t": 4096.0}, {"s": 1.0})
    sums = summed(grid, *(contribution(1.0, np.full(SIZE, 1.0, np.float16)) for _ in range(4096)))
    found: Sums = real(sums, layout("float16"))
    assert found.arrays["t"]["x"].dtype == np.float32
    assert np.array_equal(found.arrays["t"]["x"], np.full(SIZE, 4096.0, np.float32))
