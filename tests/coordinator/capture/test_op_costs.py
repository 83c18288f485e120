"""Costs of captured ops: FLOPs, bytes and losses that are sums, from shapes alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import CaptureError
from atoll.job import Precision, TrainingSpec
from atoll.opdag import OpDag
from coordinator.capture import outcome
from coordinator.capture.capture import capture
from tests.coordinator.capture.test_capture import Model, Recurrent, X, _arguments, captured, positions
from tests.models import MODELS


def test_costs_of_a_linear_layer() -> None:
    found = captured(lambda m, x: m.last(torch.relu(m.first(x)))).train
    first, last = (found.ops[at] for at in positions(found, "aten.linear"))
    assert first.flops_forward == 2 * 4 * 6 * 6
    assert first.flops_backward == first.flops_forward  # the input needs no gradient
    assert last.flops_backward == 2 * last.flops_forward
    assert first.bytes_moved == 4 * (4 * 6 + 6 * 6 + 6 + 4 * 6)
    (relu,) = positions(found, "aten.relu")
    # relu's result is what the second layer's weight gradient needs: counted once, for both.
    assert [found.ops[at].bytes_saved for at in (positions(found, "aten.linear")[0], relu)] == [96, 96]
    assert last.bytes_saved == 0


def test_views_cost_nothing_and_parameters_are_not_counted_as_saved() -> None:
    found = captured(lambda m, x: m.first(x).view(2, 12).t()).train
    view = found.ops[positions(found, "aten.view")[0]]
    assert (view.flops_forward, view.bytes_moved, view.bytes_saved) == (0, 0, 0)
    example = MODELS["gpt2"]()
    saved = sum(node.bytes_saved for node in capture(*_arguments(example), tail=False).train.ops)
    weights = sum(p.numel() * 4 for p in example.module.parameters())
    assert saved > 0
    assert saved != weights


class Classes(nn.Module):
    """Labels against logits of tokens: what only a kernel refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(x)), labels.roll(1))


@pytest.mark.parametrize(
    ("x", "labels", "says"),
    [
        (
            torch.zeros(4, dtype=torch.long),
            torch.full((4,), 5),
            r"cross_entropy_loss.*Target 5 is out of bounds",
        ),
        (torch.full((4,), 7), torch.zeros(4, dtype=torch.long), r"embedding.*index out of range"),
        (torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.int32), r"cross_entropy_loss.*Long"),
    ],
)
def test_numbers_that_a_kernel_refuses_are_found_though_costs_are_of_shapes(
    x: Tensor, labels: Tensor, says: str
) -> None:
    capture(Classes(), {"x": torch.zeros(4, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)})
    with pytest.raises(CaptureError, match=says):
        capture(Classes(), {"x": x, "labels": labels})


def test_costs_read_no_weight() -> None:
    def graph(fill: float) -> OpDag:
        module = Classes()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(fill)
        tokens = torch.zeros(4, dtype=torch.long)
        return capture(module, {"x": tokens, "labels": tokens}, tail=False).train

    assert graph(float("nan")) == graph(1.0)


def test_the_work_space_of_an_lstm_is_counted() -> None:
    """Its kernel keeps more than the op's results, which shapes alone do not say."""
    found = capture(Recurrent(nn.LSTM), X, tail=False).train
    (lstm,) = positions(found, "aten.lstm")
    results = sum(meta.nbytes for meta in found.ops[lstm].outputs)
    assert found.ops[lstm].bytes_saved > 3 * results


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "resnet"])
def test_whether_a_loss_is_a_sum_is_found_from_shapes_as_from_the_inputs(name: str) -> None:
    example = MODELS[name]()
    module, inputs = _arguments(example)[:2]
    trials = [trial(module, inputs) for trial in (outcome._on_shapes, outcome._on_inputs)]
    assert trials[0] == trials[1] == (name in ("gpt2", "llama"))


def test_metas_follow_the_precision() -> None:
    example = MODELS["gpt2"]()
    spec = TrainingSpec(steps=1, n_micro=1, precision=Precision.BF16)
    found = capture(*_arguments(example), spec, tail=False).train
    assert {found.ops[at].outputs[0].dtype for at in positions(found, "aten.addmm")} == {"bfloat16"}


@pytest.mark.slow
def test_work_grows_linearly_with_the_number_of_ops() -> None:
    def compute(n: int) -> Callable[[Model, Tensor], Tensor]:
        def many(m: Model, x: Tensor) -> Tensor:
            y = m.first(x)
            for _ in range(n // 4):
                y = y + m.table
                y.mul_(0.99)
                z = y.view(2, 12)
                z[0] = 1.0
            return y

        return many

    def lines_run(n: int) -> int:
        count = 0

        def line(frame: FrameType, event: str, _: object) -> object:
            nonlocal count
            count += event == "line"
            return line

        def call(frame: FrameType, event: str, _: object) -> object:
            ours = frame.f_code.co_filename.endswith(("regions.py", "costs.py", "capture.py", "exported.py"))
            return line if ours and "coordinator" in frame.f_code.co_filename else None

        module = Model(compute(n))
        sys.settrace(call)
        try:
            capture(module, X)
        finally:
            sys.settrace(None)
        return count

    assert lines_run(160) / lines_run(40) < 6  # quadratic work would give 16
