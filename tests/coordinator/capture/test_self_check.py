"""The self-check refuses every capture that is not the module, and names what differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll import Precision, TrainingSpec
from atoll.errors import CaptureError, SelfCheckError
from atoll.opdag import OpDag
from coordinator.capture import self_check as self_check_module
from coordinator.capture.capture import Captured, capture
from coordinator.capture.self_check import self_check
from tests.models import MODELS

X = {"x": torch.linspace(-2, 2, 24).reshape(4, 6)}


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 6)
        self.head = nn.Linear(6, 6)
        self.calls = 0
        self.register_buffer("level", torch.zeros(()))


class ReboundBuffer(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.level = self.level + 1
        return self.head(self.fc(x)).square().mean()


class CountsInPython(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.fc(x)).square().mean() * self.calls


class Plain(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.level.add_(1)
        return self.head(self.fc(x)).square().mean()


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (ReboundBuffer, r"forward changes buffer 'level'.*buffer 'level' after a training forward"),
        (CountsInPython, r"forward changes attribute 'calls' \(from 0 to 2\).*the training loss"),
    ],
)
def test_a_module_that_export_misreads_is_refused_by_name(kind: type[Base], named: str) -> None:
    module = kind()
    found = capture(module, X)
    with pytest.raises(SelfCheckError, match=named):
        self_check(module, found, X)


def test_the_copy_that_is_checked_shares_parameters_and_has_buffers_and_gradients_of_its_own() -> None:
    module = nn.BatchNorm1d(4)
    module.weight.grad = torch.ones(4)
    copied = self_check_module._copy(module)
    assert copied.weight is not module.weight
    assert copied.weight.data_ptr() == module.weight.data_ptr()
    assert copied.weight.grad is None
    assert copied.running_mean.data_ptr() != module.running_mean.data_ptr()


def test_the_size_of_the_difference_is_told() -> None:
    module = ReboundBuffer()
    with pytest.raises(SelfCheckError, match=r"by 1\.00e\+00 \(relative 1\.0e\+00\)"):
        self_check(module, capture(module, X), X)


def test_the_evaluation_graph_is_checked_too() -> None:
    module = Plain()
    found = capture(module, X)
    at = next(at for at, node in enumerate(found.evaluation.ops) if node.target == "aten.square.default")
    broken = change(found.evaluation, at, target="aten.abs.default")
    with pytest.raises(SelfCheckError, match="the evaluation loss differs"):
        self_check(module, dataclasses.replace(found, evaluation=broken), X)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_refused_by_name(register: str) -> None:
    module = Plain()
    getattr(module.head.weight, register)(lambda grad: None)
    with pytest.raises(SelfCheckError, match=r"'head\.weight' has a gradient hook"):
        self_check(module, capture(module, X), X)


def test_an_honest_module_passes_and_stays_as_it_was() -> None:
    module = Plain()
    result = self_check(module, capture(module, X), {"x": X["x"] * 3})
    assert result.worst <= 1e-6
    assert result.compared >= 2 * (1 + 4 + 1) + 2
    assert module.level.item() == 0
    assert module.fc.weight.grad is None


def change(dag: OpDag, at: int, **fields: Any) -> OpDag:
    ops = list(dag.ops)
    ops[at] = dataclasses.replace(ops[at], **fields)
    return dataclasses.replace(dag, ops=tuple(ops))


def scale_dropout(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0], 0.2, *args[2:])


@pytest.mark.parametrize(
    ("target", "changed", "named"),
    [
        ("aten.dropout.default", scale_dropout, "the training loss|the gradient"),
        ("aten.add.Tensor", lambda args: (args[0], args[0]), "the training loss|the gradient"),
        ("aten.layer_norm.default", lambda args: (*args[:4], 1e-1), "the training loss|the gradient"),
    ],
)
def test_a_graph_with_one_op_changed_is_refused(
    target: str, changed: Callable[[tuple[Any, ...]], tuple[Any, ...]], named: str
) -> None:
    example = MODELS["branches"](dropout=0.1)
    found = capture(example.module, example.example_inputs)
    at = next(at for at, node in enumerate(found.train.ops) if node.target == target)
    broken = change(found.train, at, args=changed(found.train.ops[at].args))
    with pytest.raises(SelfCheckError, match=named):
        self_check(example.module, dataclasses.replace(found, train=broken), example.make_batch(1))


class DeepNorms(nn.Module):
    """Eight convolutions with batch norm: half of a gradient of theirs is the rounding of bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.rest = nn.Sequential(
            *(
                part
                for _ in range(8)
                for part in (nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
            )
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rest(self.first(x)).mean((2, 3))).logsumexp(1).mean()


@cache
def deep_in_bf16() -> tuple[nn.Module, dict[str, Tensor], Captured]:
    torch.manual_seed(0)
    module, batch = DeepNorms(), {"x": torch.randn(8, 3, 32, 32)}
    return module, batch, capture(module, batch, TrainingSpec(steps=1, n_micro=1, precision=Precision.BF16))


@pytest.mark.parametrize("eps", [None, 1e-1])
def test_what_bf16_rounds_is_compared_in_fp32_and_a_wrong_graph_is_refused_all_the_same(
    eps: float | None,
) -> None:
    module, batch, found = deep_in_bf16()
    if eps is None:
        assert self_check(module, found, batch).worst <= 1e-5  # of fp32
        return
    at = next(at for at, node in enumerate(found.train.ops) if node.target == "aten.batch_norm.default")
    args = found.train.ops[at].args
    broken = change(found.train, at, args=(*args[:7], eps, *args[8:]))
    with pytest.raises(SelfCheckError, match="the gradient"):
        self_check(module, dataclasses.replace(found, train=broken), batch)


def test_a_module_whose_loss_is_not_a_number_is_refused() -> None:
    class Broken(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).sum() * x.log().sum()

    module = Broken()
    with pytest.raises(SelfCheckError, match="not a number in the module itself"):
        self_check(module, capture(module, X), X)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    class Uncopyable(Plain):
        def __deepcopy__(self, memo: Mapping[int, object]) -> Uncopyable:
            raise RuntimeError("holds a lock")

    module = Uncopyable()
    with pytest.raises(CaptureError, match="cannot be copied to be checked: holds a lock"):
        self_check(module, capture(module, X), X)


def test_a_module_that_fails_in_its_own_backward_is_told_so() -> None:
    class Overwrites(Base):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.fc(x).sigmoid()
            out = self.head(hidden)
            hidden.zero_()
            return out.square().mean()

    module = Overwrites()
    with pytest.raises(SelfCheckError, match="the module itself fails in training"):
        self_check(module, capture(module, X), X)
