"""Which integer values index into a table, and within which bounds.

A kernel that looks a value up raises on the CPU when it is out of range; on a GPU the process loses the
device. So values are checked where they enter a worker (the data provider's inputs, tensors of
other stages), and those that the stage computes itself right before the op, on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.calls import Shapes, call_of
from atoll.opdag import FLOATING, Arg, LeafRef, OpRef, Source
from atoll.ops import GETITEM

if TYPE_CHECKING:
    from atoll.calls import Call
    from atoll.opdag import OpNode
    from atoll.program import StageProgram

# Ops that hand on the values of their first argument, in another shape or dtype.
_SHAPE_ONLY = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "reshape.default", "slice.Tensor", "unsqueeze.default", "squeeze.default",
        "squeeze.dim", "contiguous.default", "to.dtype", "to.device", "to.dtype_layout", "_to_copy.default",
        "alias.default", "detach.default", "clone.default", "select.int", "expand.default",
        "transpose.int", "permute.default", "flatten.using_ints",
    )
)  # fmt: skip
_ALONG_DIM = frozenset(
    (
        "gather", "index_select", "index_add", "index_copy", "index_reduce", "index_fill", "scatter",
        "scatter_add", "scatter_reduce",
    )
)  # fmt: skip
_CLASSES = frozenset(["cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "multi_margin_loss"])
MAX_LOOK_THROUGH = 64


@dataclass(frozen=True, slots=True)
class Range:
    """Values from ``low`` to ``high`` - 1, and ``besides`` (a loss's ignore_index)."""

    low: int
    high: int
    besides: int | None = None

    def both(self, other: Range) -> Range:
        """Return the range that both accept."""
        besides = self.besides if self.besides == other.besides else None
        return Range(max(self.low, other.low), min(self.high, other.high), besides)


@dataclass(frozen=True, slots=True)
class IndexRanges:
    """Bounds of a program's integer values: of its inputs by name, of what it receives by op, and, by the
    op that looks them up, of arguments that the program computes."""

    inputs: Mapping[str, Range]
    received: Mapping[int, Range]
    computed: Mapping[int, tuple[tuple[str, Range], ...]]


def index_ranges(program: StageProgram, shapes: Shapes) -> IndexRanges:
    """Derive the bounds from the ops that index."""
    nodes = dict(program.ops)
    inputs: dict[str, Range] = {}
    received: dict[int, Range] = {}
    computed: dict[int, list[tuple[str, Range]]] = {}
    here = {r.op for r in program.received}
    for op, node in program.ops:
        for name, arg, bounds in uses(node, shapes):
            behind = _behind(arg, nodes)
            meta = shapes.of(behind) if isinstance(behind, OpRef | LeafRef) else None
            if meta is None or meta[0].dtype in FLOATING:
                computed.setdefault(op, []).append((name, bounds))
            elif isinstance(behind, LeafRef) and behind.source is Source.INPUT:
                inputs[behind.name] = bounds.both(inputs.get(behind.name, bounds))
            elif isinstance(behind, OpRef) and behind.op in here:
                received[behind.op] = bounds.both(received.get(behind.op, bounds))
            else:
                computed.setdefault(op, []).append((name, bounds))
    return IndexRanges(inputs, received, {op: tuple(found) for op, found in computed.items()})


def uses(node: OpNode, shapes: Shapes) -> Iterator[tuple[str, Arg, Range]]:
    """(argument name, argument, bounds) of every integer tensor that ``node`` indexes by."""
    if node.target == GETITEM:
        return
    call = call_of(node, shapes)
    for name, arg, bounds in _uses(call):
        meta = None if not isinstance(arg, OpRef | LeafRef) else shapes.of(arg)
        if meta is not None and meta[0].dtype not in FLOATING and meta[0].dtype != "bool":
            yield name, arg, bounds


def _uses(call: Call) -> Iterator[tuple[str, Arg, Range]]:
    given, name = call.given, call.name
    if name in ("embedding", "embedding_bag"):
        yield "indices", given["indices"], Range(0, _size(call, "weight", 0))
    elif name in _ALONG_DIM:
        yield "index", given["index"], Range(0, _size(call, "self", call.number("dim", 0)))
    elif name == "take":
        elements = call.tensor("self").elements
        yield "index", given["index"], Range(-elements, elements)
    elif name == "take_along_dim":
        dim = given.get("dim")
        size = _size(call, "self", dim) if isinstance(dim, int) else call.tensor("self").elements
        yield "indices", given["indices"], Range(0, size)
    elif name == "one_hot":
        yield "self", given["self"], Range(0, max(0, call.number("num_classes", -1)))
    elif name in _CLASSES:
        classes = _size(call, "self", 1 if len(call.tensor("self").shape) > 1 else 0)
        besides = None if name == "multi_margin_loss" else call.number("ignore_index", -100)
        yield "target", given["target"], Range(0, classes, besides)
    elif name in ("index", "index_put"):
        listed = given["indices"]
        for dim, arg in enumerate(listed if isinstance(listed, tuple) else ()):
            size = _size(call, "self", dim)
            yield f"indices[{dim}]", arg, Range(-size, size)


def _size(call: Call, name: str, dim: int) -> int:
    shape = call.tensor(name).shape
    if not shape:
        return 1
    return shape[dim] if -len(shape) <= dim < len(shape) else 0


def _behind(arg: Arg, nodes: Mapping[int, OpNode]) -> Arg:
    """Return the source of ``arg``, looking through ops that only change its shape."""
    for _ in range(MAX_LOOK_THROUGH):
        if not isinstance(arg, OpRef) or arg.op not in nodes:
            return arg
        node = nodes[arg.op]
        if node.target not in _SHAPE_ONLY or not node.args:
            return arg
        arg = node.args[0]
    return arg
