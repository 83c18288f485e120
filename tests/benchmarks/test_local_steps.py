"""The comparison of exchanges: figures from curves, the methods, and a short run of a few."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from atoll.errors import UsageError
from benchmarks import local_steps
from benchmarks.local_steps import METHODS, Point, Size, Text, efficiency, key_of, reached, row, train
from experiments.exchanges import EXCHANGES
from strategies.exchanges import exchange_facts


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def curve(*losses: float, tokens: int = 100) -> list[Point]:
    return [Point(at, tokens * at, loss, 8 * at, 0.5 * at) for at, loss in enumerate(losses)]


def test_tokens_to_a_loss_count_up_to_where_the_curve_stays_there() -> None:
    found = curve(4.0, 3.0, 3.5, 2.0)
    assert reached(found, 3.5, lambda point: point.tokens) == 50.0
    assert reached(found, 3.25, lambda point: point.tokens) == pytest.approx(200 + 100 * 0.25 / 1.5)
    assert reached(found, 2.75, lambda point: point.tokens) == 250.0
    assert reached(found, 1.9, lambda point: point.tokens) is None


def test_a_method_of_twice_the_tokens_has_half_the_efficiency() -> None:
    exact = curve(5.0, 4.0, 3.5, 3.25, 3.0)
    assert efficiency(exact, exact) == pytest.approx(1.0)
    assert efficiency(exact, curve(5.0, 4.0, 3.5, 3.25, 3.0, tokens=200)) == pytest.approx(0.5)


def test_a_method_that_stays_above_is_compared_at_its_end() -> None:
    exact = curve(5.0, 3.0, 2.5, 2.25, 2.0)
    assert efficiency(exact, curve(5.0, 4.9, 4.8, 4.7, 4.0)) == pytest.approx(50 / 400)
    assert efficiency(exact, curve(5.0, 5.1, 5.2, 5.3, 5.4)) == 0.0


def test_a_row_has_means_and_extremes_over_seeds() -> None:
    exact = curve(5.0, 4.0, 3.0, 2.5, 2.0)
    found = row({0: exact, 1: exact}, {0: exact, 1: curve(5.0, 4.5, 4.0, 3.5, 2.2)})
    assert found["over_exact"] == pytest.approx(0.05)
    assert (found["over_exact_low"], found["over_exact_high"]) == pytest.approx((0.0, 0.1))
    assert found["bytes_a_step"] == 8
    assert found["time_to_quarter_s"] == pytest.approx((0.5 + 1.0) / 2)
    assert row({0: exact}, {0: curve(5.0, 4.9, 4.8, 4.7, 4.6)})["time_to_quarter_s"] is None


def test_every_rule_of_the_catalogue_is_compared_or_equals_one_that_is() -> None:
    rules = {method.exchange.rule for method in METHODS.values() if method.exchange is not None}
    assert EXCHANGES.keys() - rules == {"sum", "eager"}
    for method in METHODS.values():
        if method.exchange is not None:
            exchange_facts(method.exchange.rule).check(method.exchange)
    size = Size()
    assert len({key_of(method, size, 0) for method in METHODS.values()}) == len(METHODS)


def test_ranks_see_their_own_text_and_held_out_text_is_nobodys() -> None:
    text = Text.of(0)
    assert not torch.equal(text.batch(0, 3)["tokens"], text.batch(1, 3)["tokens"])
    assert torch.equal(text.batch(2, 3)["tokens"], Text.of(0).batch(2, 3)["tokens"])
    whole = sum(len(share) for share in text.shares)
    assert len(text.held_out) == pytest.approx(0.05 / 0.95 * whole, rel=0.01)


def test_the_mean_is_one_machines_training_and_local_steps_send_a_tenth() -> None:
    size = Size(steps=10, evaluations=2, eval_batches=1)
    one, mean, local = (train(METHODS[name], size, 0) for name in ("one_machine", "mean", "diloco_10"))
    assert [point.loss for point in mean] == pytest.approx([point.loss for point in one], rel=1e-4)
    assert mean[-1].loss < mean[0].loss
    assert one[-1].sent_bytes == 0
    assert local[-1].sent_bytes == pytest.approx(mean[-1].sent_bytes / 10, rel=0.01)
    # Four times the steps alone; ten rounds of the links, or one.
    assert one[-1].time_s == pytest.approx(4 * 10 * local_steps.STEP_S)
    assert mean[-1].time_s - 0.5 == pytest.approx(10 * (local[-1].time_s - 0.5), rel=0.05)


def test_a_state_file_saves_runs_and_the_figures_are_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local_steps, "SMALL", {"steps": 2, "evaluations": 2, "eval_batches": 1})
    words = ["local_steps", "--small", "--methods", "diloco_50_warm,saps_100", "--json"]
    words += ["--state", str(tmp_path / "runs.jsonl"), "--plot", str(tmp_path / "img" / "curves.png")]
    found = []
    for more in ([], ["--seeds", "2", "--only-stored"]):
        monkeypatch.setattr(sys, "argv", words + more)
        assert local_steps.main() == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1])["methods"])
        monkeypatch.setattr(local_steps, "train", None)  # the second time nothing is trained
    assert found[0] == found[1]
    assert {one["seeds"] for one in found[1].values()} == {1}
    assert list(found[0]) == ["mean", "diloco_50_warm", "saps_100"]
    assert (tmp_path / "img" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_methods_and_no_steps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["local_steps", "--methods", "mean,gossip"])
    with pytest.raises(UsageError, match="'gossip' is none of one_machine,mean"):
        local_steps.main()
    monkeypatch.setattr(sys, "argv", ["local_steps", "--only-stored"])
    with pytest.raises(UsageError, match="holds no run"):
        local_steps.main()
    monkeypatch.setattr(sys, "argv", ["local_steps", "--steps", "0"])
    with pytest.raises(UsageError, match="at least 1"):
        local_steps.main()
