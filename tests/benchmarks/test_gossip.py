"""Acceptance figures of the exchanges that gossip or do not wait, over one seed."""

from __future__ import annotations

import sys

import pytest
import torch

from atoll.errors import UsageError
from atoll.exchange import Exchange
from benchmarks import gossip
from benchmarks.gossip import ELEMENTS, digits, full_average


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_net_learns_and_bytes_are_those_of_its_packets() -> None:
    problem = digits(4, seed=0, alpha=0.5)
    whole = full_average(problem, 60)
    assert whole.accuracy > 0.7
    assert whole.sent_bytes == pytest.approx(60 * 4 * ELEMENTS * 2 * 3 / 4, rel=0.05)
    found, dense = gossip.gossip(problem, Exchange("saps", ratio=4.0), 60)
    assert found.accuracy > 0.7
    assert found.local < found.accuracy
    assert found.sent_bytes == pytest.approx(60 * ELEMENTS, rel=0.1)
    assert dense == 0


def test_one_ranks_gradient_is_its_row_of_all() -> None:
    problem = digits(3, seed=1)
    models = problem.begin().repeat(3, 1)
    alone = torch.stack([problem.gradient(rank, 5, models[rank]) for rank in range(3)])
    assert torch.allclose(problem.gradients(5, models), alone, atol=1e-6)


def test_unknown_methods_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gossip", "--only", "eager,gossip"])
    with pytest.raises(UsageError, match="'gossip' is none of saps,swarm"):
        gossip.main()


@pytest.mark.slow
def test_saps_is_as_accurate_as_full_averaging_with_a_fiftieth_of_its_bytes() -> None:
    figures = gossip.saps(0)["alike"]
    for name in ("c=32", "c=100"):
        assert figures[name]["below_full"] <= 0.02
        assert figures[name]["share_of_bytes"] <= 1 / 50


@pytest.mark.slow
def test_swarm_learns_from_copies_of_eight_bits() -> None:
    figures = gossip.swarm(0)["H=5"]
    assert figures["below_full"] <= 0.02
    assert figures["share_of_bytes"] <= 1 / 40
    assert figures["dense_copies"] <= figures["copies"] / 100


@pytest.mark.slow
def test_eager_is_faster_with_a_straggler_and_as_accurate() -> None:
    figures = gossip.eager(0)
    for name in ("solo", "majority"):
        assert figures[name]["speedup"] >= 1.25
        assert figures[name]["below_waiting"] <= 0.02


@pytest.mark.slow
def test_wagma_is_faster_under_skew_and_equal_without() -> None:
    figures = gossip.wagma(0)
    assert figures["spread"] == 0.0
    assert figures["delays"]["speedup"] >= 1.5
    assert figures["heavy_tailed"]["speedup"] >= 1.5
    assert figures["16_ranks"]["below_waiting"] <= 0.02
