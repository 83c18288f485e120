"""The comparison of gradient exchanges: what it covers and counts, and accuracy beside the exact sum."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from atoll.errors import UsageError
from atoll.exchange import Content
from benchmarks import exchanges
from benchmarks.exchanges import MARGIN, SHAPES, Figures, compare, settings, train
from benchmarks.gossip import ELEMENTS, digits
from experiments.exchanges import EXCHANGES


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_every_rule_of_gradients_is_compared_and_top_k_through_the_mean() -> None:
    gradient = {name for name, facts in EXCHANGES.items() if facts.content is Content.GRADIENT}
    assert gradient | {"mean:topk", "mean:int8_block"} == set(settings())
    assert sum(torch.Size(shape).numel() for shape in SHAPES) == ELEMENTS


def test_bytes_are_those_of_the_busiest_rank() -> None:
    dense = train(digits(4, 0), settings()["sum"], 2)
    assert dense.bytes_per_step == pytest.approx(4 * ELEMENTS * 2 * 3 / 4, rel=0.03)
    assert dense.regions == pytest.approx(1.0, abs=0.01)
    assert train(digits(4, 0), settings()["gtopk"], 2).regions is None


def test_the_mean_takes_the_steps_of_the_sum() -> None:
    problem = digits(4, 1)
    accuracies = [train(problem, settings()[name], 40).accuracy for name in ("sum", "mean")]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.003)  # one image
    assert accuracies[0] > 0.5


@pytest.mark.parametrize(("accuracy", "code"), [(0.94, 0), (0.92, 1)])
def test_a_rule_below_the_margin_is_marked_and_fails_the_command(
    accuracy: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = [
        Figures("gtopk", accuracy, 0.95, 1000.0, 19.0, None),
        Figures("sum", 0.95, 0.95, 19e3, 1.0, 1.0),
    ]
    monkeypatch.setattr(exchanges, "compare", lambda names, seeds, steps: figures)
    monkeypatch.setattr(sys, "argv", ["exchanges", "--rule", "gtopk", "--rule", "sum", "--json"])
    assert exchanges.main() == code
    *lines, last = capsys.readouterr().out.splitlines()
    assert [row["rule"] for row in json.loads(last)["rules"]] == ["gtopk", "sum"]
    assert [line.endswith("below dense") for line in lines] == [False, bool(code), False]


def test_unknown_rules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["exchanges", "--rule", "diloco"])
    with pytest.raises(UsageError, match="diloco: not one of sum, mean"):
        exchanges.main()


@pytest.mark.slow
def test_every_rule_is_within_the_margin_of_the_exact_sum() -> None:
    for row in compare(list(settings()), [0]):
        assert row.below_dense <= MARGIN, row
