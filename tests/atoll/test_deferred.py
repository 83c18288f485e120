"""Weight gradients taken later, of the layers whose products are known by hand: the bits of torch's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from atoll import deferred
from atoll.deferred import Debt, by_rows, deferring, has_rows
from atoll.kernels import resolve
from atoll.opdag import Kind, LeafRef, OpNode, OpRef, Source, TensorMeta
from atoll.ops import LAYERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


EMBEDDING = "aten.embedding.default"
TABLE = LeafRef(Source.PARAMETER, "table")


def reading(*args: object) -> OpNode:
    return OpNode("rows", Kind.PARAMETRIC, EMBEDDING, args, (), (TensorMeta((1,), "float32"),))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Reads:
    """What some micro-batches read of a table."""

    height: int
    width: int
    indices: tuple[tuple[int, ...], ...]  # by micro-batch
    options: tuple[object, ...]
    dtype: torch.dtype
    index_dtype: torch.dtype

    def gradient(self, how: str) -> Tensor | None:
        """The table's, after all of them; ``how``: torch, at once, later."""
        made = torch.Generator().manual_seed(7)
        table = torch.randn(self.height, self.width, generator=made).to(self.dtype).requires_grad_()
        debt = Debt(torch.zeros((), requires_grad=True), selective=False)
        call: Callable[..., Tensor] = resolve(EMBEDDING)
        if how != "torch":
            call = by_rows(call, debt, later=how == "later")
        for micro, chosen in enumerate(self.indices):
            debt.micro = micro
            out = call(table, torch.tensor(chosen, dtype=self.index_dtype), *self.options)
            # Zeros of both signs, too.
            given = torch.randn(out.shape, generator=made).mul_(2).round_().to(self.dtype)
            out.backward(given)  # type: ignore[no-untyped-call]
        if how == "later" and self.indices:
            assert table.grad is None
        while debt.owed:
            debt.owed.popleft().take()
        return table.grad


@st.composite
def reads(draw: st.DrawFn) -> Reads:
    height = draw(st.integers(1, 12))
    row = st.integers(0, height - 1)
    options = draw(
        st.sampled_from(((), (-1,), (-1, False, False), (draw(row),), (draw(row), True), (-1, True, False)))
    )
    return Reads(
        height,
        draw(st.sampled_from((1, 3, 16, 33))),
        draw(st.lists(st.lists(row, max_size=20).map(tuple), max_size=3).map(tuple)),
        options,
        draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16))),
        draw(st.sampled_from((torch.int64, torch.int32))),
    )


@given(reads())
def test_a_table_s_gradient_by_rows_has_the_bits_of_torch_s_own(case: Reads) -> None:
    expected = case.gradient("torch")
    for found in (case.gradient("at once"), case.gradient("later")):
        if expected is None:
            assert found is None
        else:
            assert found is not None
            assert torch.equal(expected, found)
            assert torch.equal(expected.signbit(), found.signbit())
            assert expected.stride() == found.stride()


class Largest(TorchDispatchMode):
    """Notes how many elements the largest result of an op has."""

    elements = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not str(func).startswith(("aten.index_add_", "aten.detach")):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("known", [True, False])
def test_a_later_micro_batch_makes_nothing_of_a_table_s_size(known: bool) -> None:
    table = torch.zeros(1000, 8, requires_grad=True)
    debt = Debt(torch.zeros((), requires_grad=True), selective=False)
    call: Callable[..., Tensor] = resolve(EMBEDDING)
    call = by_rows(call, debt, later=False) if known else call
    call(table, torch.tensor([1, 5, 1])).sum().backward()
    with Largest() as seen:
        call(table, torch.tensor([2, 5, 2])).sum().backward()
    assert (seen.elements < 100) == known


@pytest.mark.parametrize(
    ("node", "leaves", "fits"),
    [
        (reading(TABLE, OpRef(1)), 1, True),
        (reading(TABLE, OpRef(1), 3, True, False), 1, True),
        (reading(TABLE, OpRef(1), -1, False, True), 1, False),
        (reading(OpRef(0), OpRef(1)), 0, False),
        (node("aten.linear.default"), 1, False),
    ],
    ids=["plain", "options", "sparse", "computed", "layer"],
)
def test_rows_are_read_of_a_leaf_alone(node: OpNode, leaves: int, fits: bool) -> None:
    assert has_rows(node, (torch.ones(2, 2),) * leaves) == fits
