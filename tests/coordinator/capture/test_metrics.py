"""Metrics: named scalars of what a module returns in evaluation mode become outputs of its graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import BadFrame, CaptureError
from atoll.execute import Executor
from atoll.program import stage_programs
from coordinator.capture.capture import capture
from coordinator.capture.self_check import self_check
from protos.convert import dag_bytes, dag_from_bytes, from_proto, to_proto


class Scored(nn.Module):
    """Tells its accuracy in evaluation mode, in the form that ``told`` names."""

    def __init__(self, told: str = "object") -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.told = told

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.layer(x)
        loss = nn.functional.cross_entropy(logits, y)
        if self.training or self.told == "tensor":
            return loss
        accuracy = (logits.argmax(-1) == y).float().mean()
        if self.told == "vector":
            accuracy = accuracy.expand(2)
        values = {"loss": loss, "accuracy": accuracy}
        return values if self.told == "dict" else SimpleNamespace(**values)


SCORED = {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), "y": torch.arange(6) % 3}


@pytest.mark.parametrize("told", ["object", "dict"])
def test_named_scalars_of_the_evaluation_are_outputs_of_its_graph(told: str) -> None:
    module = Scored(told)
    found = capture(module, SCORED, metrics=("accuracy",))
    self_check(module, found, SCORED)
    assert found.train.metrics == {}
    (program,) = stage_programs(found.evaluation, [0])
    executor = Executor(program, differentiate=False)
    executor.load(found.state)
    out = executor.forward(0, 0, SCORED, {})
    expected = (module.layer(SCORED["x"]).argmax(-1) == SCORED["y"]).float().mean()
    assert float(out[found.evaluation.metrics["accuracy"]]) == float(expected)


def test_a_graph_without_metrics_has_the_hash_it_always_had() -> None:
    found = capture(Scored("tensor"), SCORED)
    assert not to_proto(found.evaluation).metrics
    assert dag_from_bytes(dag_bytes(found.evaluation)).metrics == {}


def test_metrics_survive_the_wire() -> None:
    dag = capture(Scored(), SCORED, metrics=("accuracy",)).evaluation
    assert dag_from_bytes(dag_bytes(dag)).metrics == dag.metrics
    message = to_proto(dag)
    message.metrics[0].op = 0  # a tensor of many elements
    with pytest.raises(BadFrame, match="not a scalar"):
        from_proto(message)


@pytest.mark.parametrize(("told", "why"), [("tensor", "without a tensor"), ("vector", "return one number")])
def test_a_metric_that_is_no_scalar_of_the_output_is_refused(told: str, why: str) -> None:
    with pytest.raises(CaptureError, match=why):
        capture(Scored(told), SCORED, metrics=("accuracy",))
