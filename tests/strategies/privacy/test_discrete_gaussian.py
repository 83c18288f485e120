"""The sampler: the distribution itself, also where every coin is decided in decimals."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from strategies.privacy.discrete_gaussian import DOUBT, MAX_SIGMA, discrete_gaussian


def seeded(seed: int) -> Callable[[int], bytes]:
    source = np.random.default_rng(seed)
    return source.bytes


def chi_square(found: np.ndarray, sigma: int) -> tuple[float, int]:
    """Statistic against the exact probabilities, and its degrees of freedom."""
    reach = 4 * sigma
    values = np.arange(-reach, reach + 1)
    chances = np.exp(-(values.astype(float) ** 2) / (2.0 * sigma**2))
    whole = np.exp(-(np.arange(-40 * sigma, 40 * sigma + 1.0) ** 2) / (2.0 * sigma**2)).sum()
    expected = np.append(chances / whole, 1.0 - chances.sum() / whole) * len(found)
    counts = np.array([np.sum(found == value) for value in values], float)
    counts = np.append(counts, len(found) - counts.sum())
    wanted = expected >= 5.0
    rest = ~wanted
    squares = np.sum((counts[wanted] - expected[wanted]) ** 2 / expected[wanted])
    if expected[rest].sum() > 1.0:
        squares += (counts[rest].sum() - expected[rest].sum()) ** 2 / expected[rest].sum()
    return float(squares), int(wanted.sum())


@pytest.mark.parametrize("sigma", [1, 2, 3, 5])
@pytest.mark.parametrize("doubt", [DOUBT, 2.0])
def test_every_number_comes_as_often_as_it_should(sigma: int, doubt: float) -> None:
    size = 200_000 if doubt == DOUBT else 1_500  # 2.0: all coins in decimals
    squares, freedom = chi_square(discrete_gaussian(sigma, size, seeded(sigma), doubt), sigma)
    assert squares < freedom + 5.0 * math.sqrt(2.0 * freedom)


def test_another_sigma_would_be_noticed() -> None:
    squares, freedom = chi_square(discrete_gaussian(3, 200_000, seeded(1)), 2)
    assert squares > 10.0 * freedom


@pytest.mark.parametrize("sigma", [7, 2**24, 3 * 2**23 + 1, 10**10])
def test_the_standard_deviation_is_within_three_percent(sigma: int) -> None:
    found = discrete_gaussian(sigma, 100_000, seeded(3))
    assert found.dtype == np.int64
    assert np.std(found) == pytest.approx(sigma, rel=0.03)
    assert abs(np.mean(found)) < 5.0 * sigma / math.sqrt(len(found))
    assert np.mean(np.abs(found) < sigma) == pytest.approx(0.6827, abs=0.01 if sigma > 100 else 0.05)
    assert np.mean(np.abs(found) > 2 * sigma) == pytest.approx(0.0455, abs=0.01)


def test_pieces_are_joined_and_samples_are_of_the_system_by_default() -> None:
    big = discrete_gaussian(2**20, (1 << 20) + 17)
    assert len(big) == (1 << 20) + 17
    assert not np.array_equal(discrete_gaussian(1000, 64), discrete_gaussian(1000, 64))
    assert len(discrete_gaussian(5, 0)) == 0


@pytest.mark.parametrize("sigma", [0, -1, MAX_SIGMA + 1, 1.5])
def test_another_sigma_is_refused(sigma: int) -> None:
    with pytest.raises(ValueError, match="sigma"):
        discrete_gaussian(sigma, 1)
