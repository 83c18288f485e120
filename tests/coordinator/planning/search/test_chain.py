import itertools
import random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from coordinator.planning.search.chain import Chain, min_max, min_sum, threshold


def random_chain(seed: int, devices: int, n: int, limits: bool = True) -> Chain:
    draw = np.random.default_rng(seed)
    work = draw.uniform(0.1, 1.0, n)
    speed = draw.uniform(0.5, 3.0, devices)
    compute = np.concatenate(([0.0], np.cumsum(work)))[None, :] / speed[:, None]
    link = draw.uniform(0.0, 2.0, (devices, n + 1))
    toll = draw.uniform(0.0, 1.0, (devices, n + 1))
    fits = []
    for _ in range(devices):
        size = np.concatenate(([0.0], np.cumsum(draw.uniform(0.1, 1.0, n))))
        held = size[None, :] - size[:, None]
        fits.append(held <= draw.uniform(0.25, 1.0) * size[-1] if limits else None)
    return Chain(compute, link, toll, fits)


def brute_force(chain: Chain, ceiling: float | None = None) -> float | None:
    devices, n = chain.shape
    values = []
    for inner in itertools.combinations(range(1, n - 1), devices - 1):
        bounds = (0, *inner, n - 1)
        terms, tolls, ok = [], 0.0, True
        for j in range(devices):
            a, b = bounds[j], bounds[j + 1]
            mask = chain.fits[j]
            ok = ok and (mask is None or bool(mask[a, b]))
            terms.append(chain.compute[j, b] - chain.compute[j, a])
            if j:
                terms.append(chain.link[j, a])
                tolls += chain.toll[j, a]
        if not ok:
            continue
        if ceiling is None:
            values.append(max(terms))
        elif max(terms) <= ceiling:
            values.append(
                sum(chain.compute[j, bounds[j + 1]] - chain.compute[j, bounds[j]] for j in range(devices))
                + tolls
            )
    return min(values, default=None)


@pytest.mark.parametrize("block", range(4))
def test_the_min_max_cut_equals_brute_force_on_200_random_cases(block):
    infeasible = 0
    for seed in range(50 * block, 50 * block + 50):
        draw = random.Random(seed)
        chain = random_chain(seed, draw.randrange(1, 5), draw.randrange(4, 11))
        best, found = brute_force(chain), min_max(chain)
        if best is None:
            infeasible += 1
            assert found is None, f"seed {seed}"
        else:
            assert found is not None
            assert found.value == pytest.approx(best, rel=1e-12), f"seed {seed}"
    assert infeasible < 25


def test_the_min_sum_cut_under_a_ceiling_equals_brute_force():
    for seed in range(100):
        chain = random_chain(seed, 3, 8)
        largest = min_max(chain)
        if largest is None:
            continue
        ceiling = largest.value * random.Random(seed).uniform(1.0, 2.0) * (1 + 1e-9)
        found = min_sum(chain, ceiling)
        assert found is not None
        assert found.value == pytest.approx(brute_force(chain, ceiling), rel=1e-12), f"seed {seed}"


def highs(chain: Chain) -> float | None:
    """min q with x[j, l, i] = 1 when device j runs (l, i): flow from position 0 to the end."""
    devices, n = chain.shape
    arcs = [
        (j, a, b)
        for j in range(devices)
        for a in range(n)
        for b in range(a + 1, n)
        if chain.fits[j] is None or chain.fits[j][a, b]
    ]
    rows, low, high = [], [], []
    for j in range(devices):
        for p in range(n):
            row = np.zeros(len(arcs) + 1)
            for k, (d, a, b) in enumerate(arcs):
                row[k] = float(d == j and a == p) - float(d == j - 1 and b == p)
            rows.append(row)
            low.append(float(j == 0 and p == 0))
            high.append(float(j == 0 and p == 0))
    end = np.zeros(len(arcs) + 1)
    for k, (d, _, b) in enumerate(arcs):
        end[k] = float(d == devices - 1 and b == n - 1)
    rows.append(end)
    low.append(1.0)
    high.append(1.0)
    for j in range(devices):
        for cost in (
            lambda d, a, b: chain.compute[d, b] - chain.compute[d, a],
            lambda d, a, b: chain.link[d, a] if d else 0.0,
        ):
            row = np.zeros(len(arcs) + 1)
            row[-1] = 1.0
            for k, (d, a, b) in enumerate(arcs):
                if d == j:
                    row[k] = -cost(d, a, b)
            rows.append(row)
            low.append(0.0)
            high.append(np.inf)
    goal = np.zeros(len(arcs) + 1)
    goal[-1] = 1.0
    integral = np.ones(len(arcs) + 1)
    integral[-1] = 0
    upper = np.ones(len(arcs) + 1)
    upper[-1] = np.inf
    result = milp(
        goal,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=integral,
        bounds=Bounds(0, upper),
        options={"mip_rel_gap": 0.0},
    )
    return None if result.x is None else float(result.fun)


def test_the_min_max_cut_equals_the_highs_milp_on_20_random_cases():
    for seed in range(20):
        chain = random_chain(1000 + seed, 3, 9)
        exact, found = highs(chain), min_max(chain)
        if exact is None:
            assert found is None
        else:
            assert found is not None
            assert found.value == pytest.approx(exact, rel=1e-6), f"seed {seed}"


def test_the_threshold_search_is_within_its_tolerance_of_the_exact_cut_or_uses_fewer_devices():
    for seed in range(60):
        chain = random_chain(seed, 4, 30, limits=False)
        exact = min(
            value.value
            for k in range(1, 5)
            if (value := min_max(Chain(chain.compute[:k], chain.link[:k], chain.toll[:k], chain.fits[:k])))
        )
        everything = np.full(chain.shape[1], chain.shape[1] - 1)
        found = threshold(chain.compute, chain.link, lambda j, all_=everything: all_)
        assert found is not None
        assert exact * (1 - 1e-9) <= found.value <= exact * (1 + 2e-3), f"seed {seed}"


def test_more_devices_than_positions_have_no_cut():
    assert min_max(random_chain(1, 5, 3, limits=False)) is None
