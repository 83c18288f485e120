"""Where docs/flower.md says that Flower's own class computes the same as our rule, it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.serverapp import strategy as stock

from strategies import flower
from tests.compressors.test_flower import grid, run

FIVE = {"min_train_nodes": 5, "min_available_nodes": 5, "fraction_evaluate": 0.0}
SAME: dict[str, tuple[Any, Any]] = {
    "FedAvg": (stock.FedAvg(**FIVE), flower.FedAvg(**FIVE)),
    "FedAvgM": (stock.FedAvgM(server_momentum=0.9, **FIVE), flower.FedAvgM(beta=0.9, **FIVE)),
    "FedMedian": (stock.FedMedian(**FIVE), flower.CoordinateMedian(**FIVE)),
    "FedTrimmedAvg": (stock.FedTrimmedAvg(beta=0.2, **FIVE), flower.TrimmedMean(beta=0.2, **FIVE)),
    "Krum": (stock.Krum(num_malicious_nodes=1, **FIVE), flower.Krum(faulty=1, **FIVE)),
}
OTHER: dict[str, tuple[Any, Any]] = {
    "FedAdam": (stock.FedAdam(**FIVE), flower.FedAdam(**FIVE)),
    "FedYogi": (stock.FedYogi(**FIVE), flower.FedYogi(**FIVE)),
    "FedAdagrad": (stock.FedAdagrad(**FIVE), flower.FedAdagrad(**FIVE)),
}


@pytest.mark.parametrize("name", SAME)
def test_flowers_class_and_our_rule_end_with_the_same_weights(name: str) -> None:
    theirs, ours = (run(strategy, grid(None, 5), 3) for strategy in SAME[name])
    for tensor in ("weight", "bias"):
        assert np.allclose(theirs[tensor], ours[tensor], rtol=0.0, atol=5e-6)
    # An integer counter comes out of Flower's mean as a float, out of ours as it was.
    assert theirs["steps"].dtype == np.float64
    assert ours["steps"].dtype == np.int64


@pytest.mark.parametrize("name", OTHER)
def test_adaptive_rules_differ_as_the_docs_say(name: str) -> None:
    theirs, ours = (run(strategy, grid(None, 5), 3) for strategy in OTHER[name])
    off = np.abs(theirs["weight"] - ours["weight"]).max()
    assert 1e-3 < off < 1.0
