"""Weight gradients taken later, of the layers whose products are known by hand: the bits of torch's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll import deferred
from atoll.deferred import Debt, deferring
from atoll.kernels import resolve
from atoll.opdag import Kind, OpNode, TensorMeta
from atoll.ops import LAYERS

if TYPE_CHECKING:
    from collections.abc import Callable

MICROS = 2


@dataclass(frozen=True)
class Case:
    """A layer and what is odd about its arguments."""

    target: str
    rows: tuple[int, ...]
    n_in: int
    n_out: int
    biased: bool = True
    value: str = "plain"  # or transposed, no_grad
    frozen: str = ""  # weight, bias
    written: bool = False  # the result, in place, by the next op
    dtype: torch.dtype = torch.float32

    @property
    def by_hand(self) -> bool:
        return self.value == "plain" and not self.frozen and len(self.rows) <= 2 and self.n_out > 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    target = draw(st.sampled_from(sorted(LAYERS)))
    linear = target == "aten.linear.default"
    size = st.integers(1, 9)
    rows = draw(st.lists(size, min_size=1, max_size=3 if linear else 1).map(tuple))
    return Case(
        target,
        rows,
        draw(st.sampled_from((1, 3, 16, 33))),
        draw(st.sampled_from((0, 1, 2, 17, 32))),
        biased=draw(st.booleans()) or not linear,
        value=draw(st.sampled_from(("plain", "plain", "transposed", "no_grad"))),
        frozen=draw(st.sampled_from(("", "", "weight", "bias"))),
        written=draw(st.booleans()),
        dtype=draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16))),
    )


def node(target: str) -> OpNode:
    return OpNode(target, Kind.PARAMETRIC, target, (), (), (TensorMeta((1,), "float32"),))


class Run:
    """A layer's leaves and their gradients after some micro-batches."""

    def __init__(self, case: Case, *, defer: bool) -> None:
        made = torch.Generator().manual_seed(5)
        weight = (case.n_out, case.n_in) if case.target == "aten.linear.default" else (case.n_in, case.n_out)
        self.weight, self.bias = (
            torch.randn(shape, generator=made).to(case.dtype).requires_grad_(case.frozen != name)
            for name, shape in (("weight", weight), ("bias", (case.n_out,)))
        )
        anchor = torch.zeros((), requires_grad=True)
        self.debt = Debt(anchor, selective=False)
        call: Callable[..., Tensor] = resolve(case.target)
        used = (self.weight, self.bias) if case.biased else (self.weight,)
        leaves = tuple(leaf for leaf in used if leaf.requires_grad)
        if defer and leaves:
            call = deferring(node(case.target), call, leaves, self.debt)
        self.sources = [torch.randn((*case.rows, case.n_in), generator=made) for _ in range(MICROS)]
        for micro, source in enumerate(self.sources):
            self.debt.micro = micro
            self.run(case, call, source, torch.randn((*case.rows, case.n_out), generator=made))

    def run(self, case: Case, call: Callable[..., Tensor], source: Tensor, gradient: Tensor) -> None:
        source.requires_grad_(case.value != "no_grad")
        value = (source * 2.0).to(case.dtype)
        if case.value == "transposed":
            value = value.transpose(0, -1).contiguous().transpose(0, -1)
        if case.target == "aten.addmm.default":
            out = call(self.bias, value, self.weight)
        else:
            out = call(value, self.weight, *([self.bias] if case.biased else []))
        if not out.requires_grad:
            return
        out = torch.ops.aten.relu_.default(out) if case.written else out
        torch.autograd.backward([out], [gradient.to(case.dtype)])

    @property
    def gradients(self) -> list[Tensor | None]:
        return [leaf.grad for leaf in (self.weight, self.bias, *self.sources)]


@given(cases())
def test_both_parts_together_are_the_bits_of_a_whole_backward(case: Case) -> None:
    whole, parts = Run(case, defer=False), Run(case, defer=True)
    if case.by_hand:
        assert [type(owed) for owed in parts.debt.owed] == [deferred._LayerOwed] * MICROS
        assert parts.weight.grad is None
    assert [owed.micro for owed in parts.debt.owed] in (list(range(MICROS)), [])
    while parts.debt.owed:
        parts.debt.owed.popleft().take()
    for expected, found in zip(whole.gradients, parts.gradients, strict=True):
        if expected is None:
            assert found is None
        else:
            assert found is not None
            assert torch.equal(expected, found)
            assert expected.stride() == found.stride()


def test_every_layer_has_its_arguments_named() -> None:
    assert deferred._ARGUMENTS.keys() == LAYERS


def test_a_value_that_was_written_before_its_backward_is_refused() -> None:
    debt = Debt(torch.zeros((), requires_grad=True), selective=False)
    weight = torch.ones(2, 3, requires_grad=True)
    layer = deferring(node("aten.linear.default"), resolve("aten.linear.default"), (weight,), debt)
    value = torch.ones(4, 3, requires_grad=True) * 1.0
    out = layer(value, weight)
    value.add_(1.0)
    with pytest.raises(RuntimeError, match="was written before its backward"):
        out.sum().backward()
    assert not debt.owed


def test_under_autocast_a_layer_keeps_its_own_graph() -> None:
    debt = Debt(torch.zeros((), requires_grad=True), selective=False)
    weight = torch.ones(2, 3, requires_grad=True)
    layer = deferring(node("aten.linear.default"), resolve("aten.linear.default"), (weight,), debt)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.ones(4, 3, requires_grad=True) * 1.0, weight)
    out.sum().backward()
    assert [type(owed) for owed in debt.owed] == [deferred._OwnGraph]
