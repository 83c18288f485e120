"""Costs of each op of a captured graph: found by running it once on shapes alone.

The run gives actual shapes, dtypes and who needs a gradient, and neither computes nor allocates. FLOPs come
from torch's own formulas for matrix products, convolutions and attention, and from a few operations per
element for the rest; bytes saved are what autograd keeps, each storage counted once. What only a kernel
refuses, an index or a label, is looked for with the example inputs' own whole numbers.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from atoll.effects import effects
from atoll.errors import AtollError, CaptureError
from atoll.execute import DTYPES, Executor, torch_literal
from atoll.few_bits import takes
from atoll.job import Precision
from atoll.kernels import resolve
from atoll.opdag import (
    Autocast,
    LeafRef,
    OpDag,
    OpNode,
    OpRef,
    Source,
    TensorMeta,
    TorchLiteral,
    leaf_refs,
    op_refs,
)
from atoll.ops import GETITEM, schema
from atoll.program import stage_programs
from atoll.repeats import repeatable
from coordinator.capture.torch_export import meta_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

# Operations per element of the output (of the input where that is larger), forward; the
# backward of the same op is taken to cost as much. Everything not named here costs 1.
_PER_ELEMENT = {
    "batch_norm": 8, "group_norm": 8, "instance_norm": 8, "layer_norm": 8, "rms_norm": 5,
    "softmax": 5, "log_softmax": 5, "cross_entropy_loss": 6, "nll_loss": 2,
    "gelu": 10, "silu": 5, "sigmoid": 4, "tanh": 6, "exp": 4, "log": 4, "sin": 4, "cos": 4,
    "pow": 4, "sqrt": 2, "rsqrt": 2, "dropout": 3, "max_pool2d": 9, "avg_pool2d": 9,
}  # fmt: skip
# They move bytes, or nothing at all, but compute nothing.
_NO_ARITHMETIC_NAMES = """
    alias arange cat chunk clone concat contiguous copy_ detach detach_ embedding empty empty_like
    expand expand_as flatten full full_like gather getitem index index_select lift_fresh_copy
    movedim narrow new_empty new_full new_ones new_zeros ones ones_like pad permute repeat reshape
    select slice split split_with_sizes squeeze stack t to transpose type_as unbind unflatten
    unsqueeze view view_as zeros zeros_like _to_copy _unsafe_view
"""
_NO_ARITHMETIC = frozenset(_NO_ARITHMETIC_NAMES.split())
_READS_ROWS = frozenset(("embedding", "gather", "index", "index_select"))
# Their kernels on a CPU keep a work space that no shape tells of.
_KEEPS_UNSEEN = frozenset(("aten.lstm.input", "aten.lstm.data"))
# Attention's backward recomputes the scores: five products for the forward's two.
_ATTENTION_BACKWARD = 2.5


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the FLOPs of the products that composite ops break down to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in flop_registry:
            self.total += int(flop_registry[packet](*args, **kwargs, out_val=out))
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            shapes = (tensor.shape for tensor in args[:3])
            self.total += int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
        return out

    def take(self) -> int:
        total, self.total = self.total, 0
        return total


class _Ledger:
    """Observes a run op by op and keeps what each op did."""

    def __init__(
        self, dag: OpDag, leaves: Mapping[str, Tensor], flops: _Flops, cheap: Mapping[int, int]
    ) -> None:
        self.dag = dag
        self.cheap_ops = cheap
        self.flops = flops
        self.nodes: dict[int, OpNode] = {}
        self.products: dict[int, int] = {}
        self.saved: dict[int, int] = {}
        self.repeatable: dict[int, int] = {}
        self.few: dict[int, tuple[int, int]] = {}  # bytes that few bits may stand for, and their elements
        self.storages: dict[int, set[int]] = {}
        self.known = {tensor.untyped_storage()._cdata for tensor in leaves.values()}
        self.kept: list[object] = []  # keeps saved storages alive, so that no address is used twice
        self.pending = self.pending_repeatable = self.pending_few = self.pending_elements = 0
        self.at: Callable[[], int | None] = lambda: None  # op that runs
        self.cheap: set[int] = set()  # storages of results that are cheap to compute again
        self.nothing = torch.empty(0)
        whole = {p for begin, end in dag.unsplittable for p in range(begin, end)}
        self.whole = whole
        self.late: dict[int, Tensor] = {}
        self.standing: frozenset[int] = frozenset()  # ops whose results no micro-batch keeps

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a saved tensor; what is handed back is never unpacked."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.kept.append(storage)
            self.pending += storage.nbytes()
            if storage._cdata in self.cheap:
                self.pending_repeatable += storage.nbytes()
            if self._takes_few(tensor):
                self.pending_few += storage.nbytes()
                self.pending_elements += storage.nbytes() // tensor.element_size()
        return self.nothing

    def _takes_few(self, tensor: Tensor) -> bool:
        """Return whether few bits may stand for a tensor that the op under way saves."""
        node = self.dag.ops[self.at() or 0]
        leaves = [leaf for leaf in leaf_refs(node) if leaf.source is not Source.INPUT]
        metas = [_leaf_meta(self.dag, leaf) for leaf in leaves]
        read = [meta for ref in op_refs(node) for meta in self.nodes[ref].outputs]
        read += [_leaf_meta(self.dag, leaf) for leaf in leaf_refs(node)]
        largest = max((meta.elements for meta in read), default=0)
        return takes(tensor, largest, [(meta.elements, DTYPES[meta.dtype]) for meta in metas])

    def observe(self, position: int, value: Any) -> None:
        node = self.dag.ops[position]
        several = isinstance(value, tuple | list)
        tensors = [v for v in (value if several else (value,)) if isinstance(v, Tensor)]
        where = f"op {node.target} in {node.module_path or 'the module'} at {node.source_line}"
        self.storages[position] = {t.untyped_storage()._cdata for t in tensors}
        if position in self.standing:
            self.known |= self.storages[position]
            self.kept += [tensor.untyped_storage() for tensor in tensors]
        self.nodes[position] = replace(
            node,
            outputs=tuple(meta_of(t, where) for t in tensors),
            is_tuple=several,
            requires_grad=any(t.requires_grad for t in tensors),
        )
        if position in self.whole and not several and tensors:
            self.late[position] = tensors[0]
        if needed := self.cheap_ops.get(position):
            first = [arg for arg in node.args[:needed] if isinstance(arg, OpRef)]
            if len(first) == needed and all(self.nodes[ref.op].requires_grad for ref in first):
                self.cheap |= self.storages[position]
                self.kept += [tensor.untyped_storage() for tensor in tensors]
        self.products[position] = self.flops.take()
        self.saved[position], self.pending = self.pending, 0
        self.repeatable[position], self.pending_repeatable = self.pending_repeatable, 0
        self.few[position] = self.pending_few, self.pending_elements
        self.pending_few = self.pending_elements = 0

    def shares(self, position: int) -> bool:
        """Return whether the op's result is a view of an argument."""
        own = self.storages[position]
        return any(own & self.storages[r] for r in op_refs(self.dag.ops[position]))


def measured(
    dag: OpDag,
    inputs: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    precision: Precision,
    device: torch.device,
) -> OpDag:
    """``dag`` with the actual metas and costs of every op; ``state`` is left as it is."""
    (program,) = stage_programs(dag, [0])
    frozen = [name for name, meta in dag.parameters.items() if not meta.requires_grad]
    cheap = repeatable(program, effects(program).values)
    with torch.random.fork_rng(), _on_shapes(dag):
        leaves = {name: _blank(tensor, device) for name, tensor in state.items()}
        given = {name: _blank(tensor, device) for name, tensor in inputs.items()}
        executor = Executor(program, device, precision, differentiate=dag.training)
        ledger = _Ledger(dag, {**leaves, **executor.buffers}, _Flops(), cheap)
        ledger.at = lambda: executor.at
        with (
            torch.autograd.graph.saved_tensors_hooks(ledger.pack, lambda packed: packed),
            ledger.flops,
        ):
            executor.load(leaves, frozen, ledger.observe)
            ledger.standing = executor.standing
            try:
                executor.forward(0, 0, given, {}, ledger.observe)
            except AtollError:
                raise
            except Exception as error:  # a label of another shape than its logits'
                at = next(at for at in range(len(dag.ops)) if at not in ledger.nodes)
                raise _refused(dag.ops[at], error) from error
    executor.reset()
    for position, tensor in ledger.late.items():
        # A write through a view may have made it differentiable after the op that made it.
        if tensor.requires_grad:
            ledger.nodes[position] = replace(ledger.nodes[position], requires_grad=True)
    metas = dict(enumerate(ledger.nodes[p].outputs for p in range(len(dag.ops))))
    found = replace(dag, ops=tuple(_priced(dag, ledger, metas, p) for p in range(len(dag.ops))))
    _try_whole_numbers(found, inputs, precision, device)
    return found


def _on_shapes(dag: OpDag) -> AbstractContextManager[object]:
    """Fake tensors; real ones for a graph with an op whose kernel keeps more than its shapes say."""
    return nullcontext() if any(node.target in _KEEPS_UNSEEN for node in dag.ops) else FakeTensorMode()


def _blank(tensor: Tensor, device: torch.device) -> Tensor:
    """Zeros in the tensor's layout: as an index, a valid one."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    zeros = torch.zeros(extent if tensor.numel() else 0, dtype=tensor.dtype, device=device)
    return zeros.as_strided(tensor.shape, tensor.stride())


def _try_whole_numbers(
    dag: OpDag, inputs: Mapping[str, Tensor], precision: Precision, device: torch.device
) -> None:
    """Run what reads whole numbers that follow from the inputs alone: tokens, positions, labels.

    CaptureError for the op that a kernel refuses. Other operands are one zero each, seen in all its places.
    """
    values: dict[int, Tensor] = {}
    given = {name: tensor.to(device, copy=True) for name, tensor in inputs.items() if _is_whole(tensor)}
    default = Autocast(precision is Precision.BF16, "bfloat16")

    def value(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return [value(item) for item in arg]
        if isinstance(arg, TorchLiteral):
            return torch_literal(arg, device)
        if isinstance(arg, OpRef) and arg.op in values:
            return values[arg.op]
        if isinstance(arg, LeafRef) and arg.source is Source.INPUT and arg.name in given:
            return given[arg.name]
        if isinstance(arg, OpRef | LeafRef):
            meta = dag.ops[arg.op].outputs[0] if isinstance(arg, OpRef) else _leaf_meta(dag, arg)
            return torch.zeros((), dtype=DTYPES[meta.dtype], device=device).expand(meta.shape)
        return arg

    for position, node in enumerate(dag.ops):
        ops, leaves = op_refs(node), leaf_refs(node)
        of_inputs = [given.get(leaf.name) for leaf in leaves if leaf.source is Source.INPUT]
        tensors = [t for t in (*map(values.get, ops), *of_inputs) if t is not None]
        if node.random or node.is_tuple or not any(tensor.dtype != torch.bool for tensor in tensors):
            continue
        declared = schema(node.target)
        if len(tensors) < len(ops) + len(leaves) and declared is not None and declared.is_mutable:
            continue  # one zero stands for all of a tensor, which cannot be written
        setting = node.autocast or default
        try:
            with (
                torch.no_grad(),
                torch.autocast(device.type, DTYPES[setting.dtype], enabled=setting.enabled),
            ):
                kwargs = {name: value(arg) for name, arg in node.kwargs}
                result = resolve(node.target)(*map(value, node.args), **kwargs)
        except Exception as error:  # a kernel may refuse what the export let pass, such as a label's type
            raise _refused(node, error) from error
        if len(tensors) == len(ops) + len(leaves) and _is_whole(result):
            values[position] = result


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _refused(node: OpNode, error: Exception) -> CaptureError:
    text = " ".join(str(error).split())[:240]
    return CaptureError(
        f"op {node.target} in {node.module_path or 'the module'} at {node.source_line} fails on the example "
        f"inputs: {type(error).__name__}: {text}"
    )


def _priced(
    dag: OpDag, ledger: _Ledger, metas: Mapping[int, tuple[TensorMeta, ...]], position: int
) -> OpNode:
    node = ledger.nodes[position]
    read = [meta for op in op_refs(node) for meta in metas[op]]
    read += [_leaf_meta(dag, leaf) for leaf in leaf_refs(node)]
    forward = ledger.products[position] or _elementwise(node, read)
    backward = 0
    if node.requires_grad and dag.training:
        backward = int(forward * _backward_factor(dag, ledger, position))
    moved = 0
    if node.target != GETITEM and not ledger.shares(position):
        written = sum(meta.nbytes for meta in node.outputs)
        moved = 2 * written if _name(node) in _READS_ROWS else written + sum(meta.nbytes for meta in read)
    elif node.target.split(".")[1].endswith("_"):
        moved = 2 * sum(meta.nbytes for meta in node.outputs)
    return replace(
        node,
        flops_forward=forward,
        flops_backward=backward,
        bytes_moved=moved,
        bytes_saved=ledger.saved[position] if dag.training else 0,
        bytes_repeatable=ledger.repeatable[position] if dag.training else 0,
        bytes_few=ledger.few[position][0] if dag.training else 0,
        elements_few=ledger.few[position][1] if dag.training else 0,
    )


def _elementwise(node: OpNode, read: list[TensorMeta]) -> int:
    name = _name(node)
    if name in _NO_ARITHMETIC:
        return 0
    elements = max((prod(meta.shape) for meta in (*node.outputs, *read)), default=0)
    return elements * _PER_ELEMENT.get(name, 1)


def _backward_factor(dag: OpDag, ledger: _Ledger, position: int) -> float:
    """Return a product for each of the (two) operands that need a gradient; 1 for other ops."""
    node = ledger.nodes[position]
    if not ledger.products[position]:
        return 1.0
    if "scaled_dot_product" in node.target:
        return _ATTENTION_BACKWARD
    operands = [r for r in _operands(node.args) if _needs_gradient(dag, ledger, r)]
    return float(min(2, max(1, len(operands))))


def _operands(args: tuple[Any, ...]) -> list[OpRef | LeafRef]:
    """The first two tensors that hold more than a bias: addmm's own order is (bias, a, b)."""
    flat: list[OpRef | LeafRef] = []
    for arg in args:
        if isinstance(arg, tuple):
            flat += _operands(arg)
        elif isinstance(arg, OpRef | LeafRef):
            flat.append(arg)
    return flat[-2:] if len(flat) == 2 else flat


def _needs_gradient(dag: OpDag, ledger: _Ledger, ref: OpRef | LeafRef) -> bool:
    if isinstance(ref, OpRef):
        return ledger.nodes[ref.op].requires_grad and len(ledger.nodes[ref.op].outputs[0].shape) > 1
    known = dag.parameters.get(ref.name) if ref.source is Source.PARAMETER else None
    return known is not None and known.requires_grad and len(known.meta.shape) > 1


def _leaf_meta(dag: OpDag, leaf: LeafRef) -> TensorMeta:
    if leaf.source is Source.PARAMETER:
        return dag.parameters[leaf.name].meta
    if leaf.source is Source.BUFFER:
        return dag.buffers[leaf.name].meta
    return dag.inputs[leaf.name] if leaf.source is Source.INPUT else dag.constants[leaf.name]


def _name(node: OpNode) -> str:
    return node.target.split(".")[1]
