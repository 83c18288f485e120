"""Backwards in two parts: first what other stages wait for, then, op by op, the gradients of weights.

The ops are those that torch differentiates by each argument on its own (matrix products, convolutions,
embeddings), so that both parts together do the work of the whole. The same kernels get the same tensors and
each accumulator its micro-batches in the same order, so the bits are those of an undivided backward.

Such an op has a graph of its own, which stays until its weight gradients are taken. That graph and a second
walk of torch's engine cost a third of a millisecond an op, as much as a small one itself. So of the layers
that most models consist of (``ops.LAYERS``) both parts are the products that torch's own formulas come to.

A table that rows are read from (``ops.reads_rows``) has its gradient by rows on a CPU, also in an undivided
backward. Torch fills a gradient as large as the table for every micro-batch, zeros but for the rows read, and
adds it: of a vocabulary of 32,000 that was a fifth of a small language model's step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from atoll.ops import is_layer, reads_rows

if TYPE_CHECKING:
    from atoll.opdag import OpNode
    from atoll.slots import Call

    _Input = Tensor | GradientEdge


class Owed(Protocol):
    """Gradients of one op's weights that are still to be taken."""

    @property
    def micro(self) -> int:
        """The micro-batch that owes them."""

    def take(self) -> None:
        """Add them to the weights' own."""


class Debt:
    """Pending weight gradients, and whose ops run. Graphs refer to this, not to the executor, which would
    live as long as they, for they are invisible to Python's garbage collector. ``selective``: saved values
    may be recomputed, so nobody else may keep them."""

    def __init__(self, anchor: Tensor, selective: bool) -> None:
        self.anchor = anchor
        self.selective = selective
        self.micro = 0
        self.owed: deque[Owed] = deque()


def deferring(node: OpNode, call: Call, leaves: tuple[Tensor, ...], debt: Debt) -> Call:
    """``call``, which runs ``node``, so that its backward leaves the gradients of ``leaves`` to be taken."""
    own_graph = _with_own_graph(call, leaves, debt)
    if not is_layer(node) or debt.selective:
        return own_graph
    layer = _ARGUMENTS[node.target]
    fits: dict[tuple[torch.Size, tuple[int, ...]], bool] = {}  # all else is the same in every micro-batch

    def by_hand(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args)
        value, weight, bias = layer.of(args)
        form = value.shape, value.stride()
        if form not in fits:
            fits[form] = layer.fits(value, weight, bias)
        if not fits[form]:
            return own_graph(*args)
        # Without its weights torch's graph gives on the gradient of the value alone, and does not keep it.
        known = {layer.weight: weight.detach(), layer.bias: None if bias is None else bias.detach()}
        rows = value.view(-1, value.shape[-1])
        out = call(*[known.get(at, rows) for at in range(len(args))])
        micro, version = debt.micro, value._version

        def owe(gradient: Tensor) -> None:
            if value._version != version:
                raise RuntimeError(f"the value that {node.target} reads was written before its backward")
            debt.owed.append(_LayerOwed(micro, gradient, rows.detach(), weight, bias, layer.transposed))

        # Of the rows: who writes in place what only is a view of them goes round a hook of the view.
        out.register_hook(owe)
        return out.view(*value.shape[:-1], out.shape[-1])

    return by_hand


# ---------------------------------------------------------------- any op, in a graph of its own


@dataclass(frozen=True, slots=True)
class _OwnGraph:
    micro: int
    edge: GradientEdge  # the op in its own graph
    gradient: Tensor  # of the op's result
    leaves: tuple[Tensor, ...]

    def take(self) -> None:
        torch.autograd.backward([self.edge], [self.gradient], inputs=self.leaves)


class _Op:
    """Run of an op for one micro-batch, on arguments that were cut off from the graph around it."""

    __slots__ = ("debt", "edge", "inner", "leaves", "micro", "out")

    def __init__(self, debt: Debt, out: Tensor, inner: list[_Input], leaves: tuple[Tensor, ...]) -> None:
        self.debt, self.micro, self.inner, self.leaves = debt, debt.micro, inner, leaves
        self.out: Tensor | None = out
        self.edge = get_gradient_edge(out)  # keeps what the op saved, but not its result


class _Apart(torch.autograd.Function):
    """Such an op in the graph around it: gives on the gradient of its arguments and leaves its weights'
    to be taken from its own graph. All else that the backward of the graph around it saved goes at once."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, op: _Op, *outer: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.op = op
        out, op.out = op.out, None
        assert out is not None  # noqa: S101  runs once
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, gradient = ctx.op, grads[0]
        if gradient is None:
            return (None, None, *(None for _ in op.inner))
        op.debt.owed.append(_OwnGraph(op.micro, op.edge, gradient, op.leaves))
        if not op.inner:
            return None, None
        return (None, None, *torch.autograd.grad([op.edge], op.inner, [gradient], retain_graph=True))


class _Entry(torch.autograd.Function):
    """An argument in the graph of its op: no leaf, which would keep its memory."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


def _cut_off(arg: Any, outer: list[Tensor], inner: list[_Input], debt: Debt) -> Any:
    """An argument, or one in a list, without its graph; both forms of what has one are noted."""
    if isinstance(arg, list):
        return [_cut_off(item, outer, inner, debt) for item in arg]
    if not isinstance(arg, Tensor) or arg.grad_fn is None:
        return arg
    outer.append(arg)
    if debt.selective:
        entered: Tensor = _Entry.apply(debt.anchor, arg.detach())  # type: ignore[no-untyped-call]
        inner.append(get_gradient_edge(entered))
        return entered
    leaf = arg.detach().requires_grad_()
    inner.append(leaf)
    return leaf


def _with_own_graph(call: Call, leaves: tuple[Tensor, ...], debt: Debt) -> Call:
    def with_own_graph(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args)
        outer: list[Tensor] = []
        inner: list[_Input] = []
        out = call(*[_cut_off(arg, outer, inner, debt) for arg in args])
        return _Apart.apply(debt.anchor, _Op(debt, out, inner, leaves), *outer)  # type: ignore[no-untyped-call]

    return with_own_graph


# ---------------------------------------------------------------- a layer, by its products


class _Layer(NamedTuple):
    """``value @ weight + bias``, or by the weight transposed: where an op has these arguments."""

    value: int
    weight: int
    bias: int
    transposed: bool  # the weight is [out, in]
    dims: tuple[int, ...]  # that the value may have

    def of(self, args: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """Value, weight and bias."""
        return args[self.value], args[self.weight], args[self.bias] if self.bias < len(args) else None

    def fits(self, value: Any, weight: Any, bias: Any) -> bool:
        """Return whether torch's formulas for these are the products below: strides as if new, no cast, all
        weights trained, and a gradient of the value to pass on."""
        return (
            isinstance(value, Tensor)
            and value.grad_fn is not None
            and value.dim() in self.dims
            and value.stride() == _row_major(value.shape)
            and value.numel() > 0
            and _is_trained(weight)
            and weight.numel() > 0
            and weight.dim() == 2
            and weight.stride() == _row_major(weight.shape)
            and weight.dtype == value.dtype
            and (
                bias is None
                or (_is_trained(bias) and bias.shape == (weight.shape[0 if self.transposed else 1],))
            )
            and not torch.is_autocast_enabled(value.device.type)
        )


_ARGUMENTS = {
    "aten.linear.default": _Layer(0, 1, 2, True, (2, 3)),
    "aten.addmm.default": _Layer(1, 2, 0, False, (2,)),
}


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _is_trained(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf and leaf.is_floating_point()


@dataclass(frozen=True, slots=True)
class _LayerOwed:
    micro: int
    gradient: Tensor  # [rows, out]
    value: Tensor  # [rows, in]
    weight: Tensor
    bias: Tensor | None
    transposed: bool

    def take(self) -> None:
        with torch.no_grad():
            if self.bias is not None:
                _accumulate(self.bias, self.gradient.sum(0))
            rows, value = self.gradient, self.value
            _accumulate(self.weight, rows.t().mm(value) if self.transposed else value.t().mm(rows))


def _accumulate(leaf: Tensor, gradient: Tensor) -> None:
    if leaf.grad is None:
        leaf.grad = gradient
    else:
        leaf.grad.add_(gradient)


# ---------------------------------------------------------------- a table, by the rows that are read


def has_rows(node: OpNode, leaves: tuple[Tensor, ...]) -> bool:
    """Return whether ``by_rows`` fits: the op reads rows of a leaf on a CPU. On a GPU torch's kernel for few
    rows adds in another order than that for many."""
    return reads_rows(node) and len(leaves) == 1 and leaves[0].device.type == "cpu"


def by_rows(call: Call, debt: Debt, *, later: bool) -> Call:
    """``call``, which reads rows of a leaf, so that its backward adds to those of the leaf's gradient alone:
    at once, or ``later``, when what is owed is taken. The bits are those of torch's own."""
    owe = debt.owed.append if later else _take

    def reading(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args)
        return _Rows.apply(debt.anchor, call, owe, debt.micro, args)  # type: ignore[no-untyped-call]

    return reading


def _take(owed: Owed) -> None:
    owed.take()


class _Rows(torch.autograd.Function):
    """Rows of a table in the graph, which does not lead to the table."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Call, owe: Any, micro: int, args: tuple[Any, ...]) -> Tensor:
        ctx.set_materialize_grads(False)
        table, indices, *options = args
        ctx.save_for_backward(indices)
        ctx.owe, ctx.owed = owe, (micro, table, *options[:2])  # without sparse, which is False
        found: Tensor = call(table.detach(), indices, *options)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is not None:
            (indices,) = ctx.saved_tensors
            ctx.owe(_RowsOwed(grads[0], indices, *ctx.owed))
        return None, None, None, None, None


@dataclass(frozen=True, slots=True)
class _RowsOwed:
    gradient: Tensor  # of the rows as they were read
    indices: Tensor
    micro: int
    table: Tensor
    padding: int = -1
    by_count: bool = False  # each read of a row counts for its share of all of them

    def take(self) -> None:
        with torch.no_grad():
            # Torch's kernel on a table of the rows that occur: each is summed in the order of the reads.
            rows, places = torch.unique(self.indices, return_inverse=True)
            padding = int((rows < self.padding).sum()) if (rows == self.padding).any() else -1
            sums = torch.ops.aten.embedding_dense_backward(
                self.gradient, places, len(rows), padding, self.by_count
            )
            if self.table.grad is None:
                self.table.grad = torch.zeros_like(self.table)
            self.table.grad.index_add_(0, rows, sums)
