"""Our rules and codecs under stock Flower: its simulation, and a SuperLink with two SuperNodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from benchmarks.rivals.flower_stock import StockFlower
from strategies import STRATEGIES
from tests.examples.test_flower_digits import APP, LISTED, accuracies

pytestmark = pytest.mark.slow
NODES, ROUNDS = 4, 2


def shares(found: dict[str, Any]) -> list[float]:
    return [round(share, 4) for share in found["acc"][1:]]


@pytest.fixture(scope="module")
def simulation() -> Iterator[StockFlower]:
    pytest.importorskip("ray")
    with StockFlower(NODES, simulation=True) as flower:
        yield flower


def test_the_plain_app_gives_the_listed_accuracies_in_the_simulation(simulation: StockFlower) -> None:
    assert shares(simulation.run(APP, {"min-nodes": NODES})) == LISTED[NODES]


@pytest.mark.parametrize("rule", STRATEGIES)
def test_every_rule_runs_in_the_simulation_as_in_one_process(
    rule: str, simulation: StockFlower, tmp_path: Path
) -> None:
    options = {"options": '{"faulty": 0}'} if rule == "krum" else {}
    settings: dict[str, Any] = {"strategy": f"atoll.{rule}", "num-server-rounds": ROUNDS, **options}
    found = shares(simulation.run(APP, {"min-nodes": NODES, **settings}))
    # Sums go in the order of node ids, which Flower draws: the last bits differ, one image may.
    assert found == pytest.approx(accuracies(NODES, tmp_path, **settings), abs=1.5 / 360)


def test_a_codec_and_its_residuals_go_through_the_simulation(simulation: StockFlower, tmp_path: Path) -> None:
    settings = {"codec": "topk:10"}
    found = shares(simulation.run(APP, {"min-nodes": NODES, **settings}))
    assert found == pytest.approx(accuracies(NODES, tmp_path, **settings), abs=1.5 / 360)


def test_a_rule_with_state_and_a_codec_run_on_a_superlink_with_two_supernodes(tmp_path: Path) -> None:
    settings = {"strategy": "atoll.scaffold", "codec": "topk:10", "num-server-rounds": 3}
    with StockFlower(2) as flower:
        assert shares(flower.run(APP, {"min-nodes": 2})) == LISTED[2]
        found = shares(flower.run(APP, {"min-nodes": 2, **settings}))
    assert found == pytest.approx(accuracies(2, tmp_path, **settings), abs=1.5 / 360)
