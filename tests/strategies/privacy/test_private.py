"""The mechanism: what one client can move, what is added, and how the clip adapts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.federated import Federated
from atoll.privacy import Privacy
from strategies import STRATEGIES, make_strategy
from strategies.fixed import Accumulator, FixedSums, real
from strategies.layout import Layout
from strategies.linear import Linear
from strategies.privacy.discrete_gaussian import discrete_gaussian
from strategies.privacy.private import COVERED, UNIT, Private, clipped, strategy_of
from strategies.privacy.sampling import cohort, drawn, poisson
from strategies.values import ClientUpdate, ServerState

SECRET = "5" * 64
SHAPES = {"a": (7, 5), "b": (11,)}


def silent(sigma: int, size: int) -> np.ndarray[Any, Any]:
    return np.zeros(size, np.int64)


def model(dtype: str = "float32") -> tuple[Layout, dict[str, np.ndarray[Any, Any]]]:
    arrays = {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}
    return Layout.of(arrays, set(arrays)), arrays


def private(cohort: int = 4, **options: Any) -> Private:
    found = strategy_of(
        Federated(clients=cohort, evaluate_every=0, privacy=Privacy(**{"noise": 1.0, **options}))
    )
    assert isinstance(found, Private)
    return found


def update(client: str, norm: float, seed: int = 0, n_samples: int = 9, at_round: int = 0) -> ClientUpdate:
    draws = np.random.default_rng([seed, *client.encode()])
    delta = {name: draws.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    whole = math.sqrt(sum(float(np.sum(a.astype(float) ** 2)) for a in delta.values()))
    scaled = {name: (a * (norm / whole)).astype(np.float32) for name, a in delta.items()}
    return ClientUpdate(at_round, n_samples, 3, scaled, metrics={}, client=client)


def summed(rule: Private, layout: Layout, *updates: ClientUpdate) -> FixedSums:
    held = Accumulator(rule.round_grid(0, 0))
    for each in updates:
        held.add(rule.contribute(layout, each))
    return held.sums()


def whole_norm(arrays: Any) -> float:
    return math.sqrt(sum(int(v) ** 2 for array in arrays.values() for v in array.reshape(-1).tolist()))


# ---------------------------------------------------------------- what one client can move


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1e-12, 1e18, allow_subnormal=False),
    st.floats(1e-6, 1e6),
    st.integers(0, 2**32),
    st.booleans(),
    st.integers(1, 400),
)
def test_an_updates_norm_is_within_the_clip_after_rounding(
    norm: float, clip: float, seed: int, per_layer: bool, size: int
) -> None:
    draws = np.random.default_rng(seed)
    delta = {"a": draws.normal(size=size), "b": draws.standard_cauchy(size=3)}
    scale = norm / math.sqrt(sum(float(np.sum(a**2)) for a in delta.values()))
    delta = {name: (array * scale).astype(np.float64) for name, array in delta.items()}
    found, within = clipped(delta, clip, 1.0, per_layer=per_layer)
    assert sum(int(v) ** 2 for a in found.values() for v in a.tolist()) <= UNIT**2
    assert within == (math.sqrt(sum(float(np.dot(a, a)) for a in delta.values())) <= clip)
    if per_layer:
        assert all(sum(int(v) ** 2 for v in a.tolist()) <= UNIT**2 // 2 + UNIT for a in found.values())


@pytest.mark.parametrize("per_layer", [False, True])
def test_neighbouring_populations_sums_differ_by_at_most_the_whole_clip(per_layer: bool) -> None:
    layout, _ = model()
    rule = private(per_layer=per_layer, clip=0.7)
    for seed, norm in enumerate((0.0, 1e-9, 0.3, 0.7, 0.700001, 5.0, 1e6, 1e15)):
        others = [update(f"c{at}", 10.0**at, seed) for at in range(3)]
        with_it, without = (
            summed(rule, layout, *others, update("x", norm, seed)),
            summed(rule, layout, *others),
        )
        moved = {n: with_it.arrays["trained"][n] - without.arrays["trained"][n] for n in SHAPES}
        assert whole_norm(moved) <= UNIT
        if not per_layer and norm >= 0.7:  # nothing is given away either
            assert whole_norm(moved) > UNIT * (1 - 1e-5)


def test_weights_are_capped_and_never_above_one() -> None:
    layout, _ = model()
    rule = private(samples=10)
    for n_samples, share in ((5, 0.5), (10, 1.0), (10**6, 1.0)):
        found = summed(rule, layout, update("x", 3.0, n_samples=n_samples))
        assert whole_norm(found.arrays["trained"]) == pytest.approx(share * UNIT, rel=1e-5)


def test_the_sum_of_a_round_is_the_clipped_mean_over_the_number_declared() -> None:
    layout, weights = model("float64")
    rule = replace(private(cohort=8, clip=2.0), noise=silent)
    state = rule.init(layout, weights, 8)
    updates = [
        replace(u, delta={n: a.astype(np.float64) for n, a in u.delta.items()})
        for u in (update(f"c{at}", 0.5 * (at + 1)) for at in range(6))
    ]
    after = rule.aggregate(state, updates)
    expected = sum(u.delta["a"] * min(1.0, 2.0 / (0.5 * (at + 1))) for at, u in enumerate(updates)) / 8
    assert after.weights["a"] == pytest.approx(expected, abs=6 * 2.0 / UNIT)
    assert after.round == 1


def test_a_round_of_nobody_releases_noise() -> None:
    layout, weights = model()
    rule = private(clip=0.5)
    after = rule.aggregate(rule.init(layout, weights, 4), [])
    flat = np.concatenate([array.reshape(-1) for array in after.weights.values()])
    assert np.all(flat != 0.0)
    assert np.std(flat) == pytest.approx(0.5 / 4, rel=0.5)


def test_noise_on_1e5_words_is_z_times_the_clip_within_three_percent() -> None:
    arrays = {"w": np.zeros(100_000, np.float32)}
    layout = Layout.of(arrays, {"w"})
    for adaptive in (None, 0.5):
        rule = private(cohort=40, noise=1.3, clip=0.2, adaptive=adaptive)
        after = rule.aggregate(rule.init(layout, arrays, 40), [])
        z = rule.sigmas[0] / UNIT
        assert np.std(after.weights["w"]) == pytest.approx(z * 0.2 / 40, rel=0.03)
        assert z == pytest.approx(1.3, rel=1e-6) if adaptive is None else 1.3 < z < 1.45


def test_both_noises_of_an_adaptive_round_are_one_noise_z() -> None:
    rule = private(cohort=60, noise=1.1, adaptive=0.5)
    sigma, count = rule.sigmas
    assert (UNIT / sigma) ** 2 + (1.0 / count) ** 2 <= 1.1**-2
    assert (UNIT / sigma) ** 2 + (1.0 / count) ** 2 == pytest.approx(1.1**-2)


def test_the_grid_tells_nothing_of_who_was_drawn() -> None:
    rule = private(cohort=50)
    assert rule.round_grid(1, 10) == rule.round_grid(90, 10**6)


# ---------------------------------------------------------------- hosts


def test_sums_of_hosts_have_the_bits_of_single_updates() -> None:
    layout, _ = model()
    rule = private(adaptive=0.5, cohort=40).during({"privacy": {"clip": np.array([0.8])}})
    each = [update(f"c{at}", 0.2 * at, n_samples=at + 1) for at in range(9)]
    alone = summed(rule, layout, *each)
    both = Accumulator(rule.round_grid(0, 0))
    both.add(summed(rule, layout, *each[5:]))
    both.add(summed(rule, layout, *each[:5]))
    found = both.sums()
    assert found.scalars == alone.scalars
    assert all(np.array_equal(found.arrays["trained"][n], alone.arrays["trained"][n]) for n in SHAPES)
    assert found.scalars["unclipped"] * found.grid.scalar_unit("unclipped") == 5.0


# ---------------------------------------------------------------- the clip


def run(rule: Private, norms: Any, rounds: int, clients: int) -> ServerState:
    layout, weights = model()
    state = rule.init(layout, weights, clients)
    for at in range(rounds):
        updates = [update(f"c{k}", norms(at, k), at, at_round=at) for k in range(clients)]
        state = rule.aggregate(state, updates)
    return state


@pytest.mark.parametrize("first", [0.1, 10.0])
@pytest.mark.parametrize("gamma", [0.5, 0.8])
def test_the_clip_comes_to_the_quantile_from_far_below_and_above(first: float, gamma: float) -> None:
    norms = np.linspace(1.0, 1.18, 60)
    rule = private(cohort=60, adaptive=gamma, clip=first, noise=1.0)
    state = run(rule, lambda at, k: float(norms[k]), 60, 60)
    clip = float(state.slots["privacy"]["clip"][0])
    assert clip == pytest.approx(float(np.quantile(norms, gamma)), rel=0.25)


def test_counting_the_clipped_instead_runs_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's rule up to 1.42, as a control: the same machinery with the other count."""
    contribute = Private.contribute

    def wrong(self: Private, layout: Layout, update: ClientUpdate) -> Any:
        found = contribute(self, layout, update)
        return replace(found, scalars={**found.scalars, "unclipped": 1.0 - found.scalars["unclipped"]})

    monkeypatch.setattr(Private, "contribute", wrong)
    state = run(private(cohort=60, adaptive=0.5, clip=0.1), lambda at, k: 1.0 + k / 333, 60, 60)
    assert float(state.slots["privacy"]["clip"][0]) < 0.01


def test_updates_of_norm_zero_are_within_any_clip() -> None:
    rule = private(cohort=40, adaptive=0.5, clip=1.0)
    state = run(rule, lambda at, k: 0.0, 5, 40)
    assert float(state.slots["privacy"]["clip"][0]) < 1.0
    assert all(np.all(np.isfinite(array)) for array in state.weights.values())


def test_a_rounds_clip_and_noise_are_of_one_clip() -> None:
    """Flower moved C before it scaled the noise."""
    layout, weights = model()
    rule = replace(private(cohort=40, adaptive=0.5, clip=1.0), noise=silent)
    state = rule.init(layout, weights, 40)
    broadcast = rule.configure(state)
    assert float(broadcast.extra["privacy"]["clip"][0]) == 1.0
    after = rule.aggregate(state, [update("x", 100.0)])
    moved = math.sqrt(sum(float(np.sum(a.astype(float) ** 2)) for a in after.weights.values()))
    assert moved == pytest.approx(1.0 / 40, rel=1e-4)  # by the old C, though the new one is lower or higher
    assert float(after.slots["privacy"]["clip"][0]) != 1.0


# ---------------------------------------------------------------- what is refused


def test_every_strategy_is_covered_or_refused() -> None:
    for name in STRATEGIES:
        options = {"clients": 8, "evaluate_every": 0, "local": ("a",) if name == "fedrep" else ()}
        rule = Federated(name, privacy=Privacy(noise=1.0), **options)
        if name in COVERED:
            assert strategy_of(rule).core.name == "private"
        else:
            with pytest.raises(UsageError, match="not proven"):
                strategy_of(rule)


@pytest.mark.parametrize("name", [name for name in COVERED if name not in ("fedbn", "fedrep")])
def test_a_covered_strategys_server_does_with_the_noised_sum_what_it_does_with_a_sum(name: str) -> None:
    layout, weights = model("float64")
    inner = make_strategy(name)
    assert isinstance(inner, Linear)
    rule = Private(inner, Privacy(noise=1.0, clip=4.0), 2, noise=silent)
    updates = [
        replace(u, delta={n: a.astype(np.float64) for n, a in u.delta.items()}, n_samples=5)
        for u in (update("a", 1.0), update("b", 2.0))
    ]
    state, plain = rule.init(layout, weights, 2), inner.init(layout, weights, 2)
    for at in range(3):
        now = [replace(u, round=at) for u in updates]
        state, plain = rule.aggregate(state, now), inner.aggregate(plain, now)
    for tensor in SHAPES:
        assert state.weights[tensor] == pytest.approx(plain.weights[tensor], abs=1e-3)
    assert set(plain.slots) == set(state.slots)


def test_buffers_that_travel_are_refused() -> None:
    arrays = {"w": np.zeros(3, np.float32), "bn.running_var": np.ones(3, np.float32)}
    layout = Layout.of(arrays, {"w"}, {"bn.running_var"})
    with pytest.raises(UsageError, match="noise would make a variance"):
        private().adapt(layout)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients": 0}, "divides every sum"),
        ({"selector": "oort"}, "looks at what clients measured"),
        ({"selector": "power_of_choice"}, "looks at what clients measured"),
        ({"evaluate_every": 1}, "clients' own evaluations"),
        ({"privacy": Privacy(noise=1.0, sampling=0.1, delta=1e-3)}, "well below one over"),
        ({"privacy": Privacy(noise=6.0, adaptive=0.5)}, "count of unclipped"),
    ],
)
def test_settings_that_the_proof_does_not_cover_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Federated(**{"clients": 100, "evaluate_every": 0, "privacy": Privacy(noise=1.0), **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"noise": 0.01},
        {"noise": math.nan},
        {"noise": 1.0, "delta": 0.0},
        {"noise": 1.0, "delta": 0.5},
        {"noise": 1.0, "clip": 0.0},
        {"noise": 1.0, "sampling": 1.5},
        {"noise": 1.0, "sampling": 1e-9},
        {"noise": 1.0, "adaptive": 1.0},
        {"noise": 1.0, "adaptive": 0.5, "per_layer": True},
        {"noise": 1.0, "samples": 0},
        {"epsilon": -1.0},
        {"epsilon": math.inf},
    ],
)
def test_figures_out_of_their_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Privacy(**options)


# ---------------------------------------------------------------- draws


def test_poisson_draws_each_client_by_itself_with_its_chance() -> None:
    names = [f"c{at}" for at in range(500)]
    sizes = [len(poisson(names, 0.1, f"{SECRET}/{at}")) for at in range(200)]
    assert np.mean(sizes) == pytest.approx(50.0, abs=2.5)
    assert np.var(sizes) == pytest.approx(45.0, rel=0.35)
    assert poisson(names, 1.0, SECRET) == tuple(sorted(names))
    assert any(not poisson(names[:5], 0.1, f"{SECRET}/{at}") for at in range(20))  # nobody, at times


def test_who_is_away_changes_no_other_clients_draw() -> None:
    names = [f"c{at}" for at in range(60)]
    for at in range(20):
        secret = f"{SECRET}/{at}"
        for gone in names[::7]:
            left = [name for name in names if name != gone]
            assert set(poisson(left, 0.3, secret)) == set(poisson(names, 0.3, secret)) - {gone}
            assert len(set(cohort(left, 20, secret)) - set(cohort(names, 20, secret))) <= 1
    assert len(cohort(names, 20, SECRET)) == 20
    assert cohort(names[:3], 20, SECRET) == tuple(names[:3])


def test_draws_need_a_secret() -> None:
    with pytest.raises(UsageError, match="fewer than 128 bits"):
        drawn(["a"], 0.5, 1, "7/3")


def test_noise_is_the_systems_and_never_a_seeds() -> None:
    assert Private(make_strategy("fedavg"), Privacy(noise=1.0), 3).noise is discrete_gaussian  # type: ignore[arg-type]
    layout, weights = model()
    rule = private()
    state = rule.init(layout, weights, 4)
    one, two = (rule.aggregate(state, [update("x", 1.0)]) for _ in range(2))
    assert not np.array_equal(one.weights["a"], two.weights["a"])
    assert real(summed(rule, layout), layout).clients == 0
