"""Figures of how evenly clients are served."""

from __future__ import annotations

import pytest

from strategies.fairness import fairness


def test_figures_of_unlike_clients() -> None:
    found = fairness([0.9] * 18 + [0.5, 0.1])
    assert found["mean"] == pytest.approx(0.84)
    assert found["worst_decile"] == pytest.approx(0.3)
    assert found["jain"] == pytest.approx(16.8**2 / (20 * (18 * 0.81 + 0.26)))


def test_clients_that_are_served_alike_have_an_index_of_one_and_one_alone_the_least() -> None:
    assert fairness([0.7] * 7)["jain"] == pytest.approx(1.0)
    assert fairness([0.0] * 7)["jain"] == 1.0
    assert fairness([1.0] + [0.0] * 9)["jain"] == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no client"):
        fairness([])
