"""The model as a DAG of operators: our own frozen form of a captured graph.

``OpDag.ops`` stands in one canonical topological order, chosen once at capture. A stage of a
Plan is a half-open interval of positions in that order, so every sum over uses of a tensor or
parameter has one order whatever the cut (DESIGN section 3). A node names its op, never holds
code; its arguments are references or literals. Node kinds from papers/decentralized.md 1.3, as it
recalls FusionLLM (unverified against the paper). This module knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Annotated

from atoll.bounded import MAX_ARGS, MAX_DIMS, MAX_OPS, Coded, Most, Name, Sorted

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
}
MAX_METRICS = 16
FLOATING = frozenset({"float64", "float32", "bfloat16", "float16", "complex64"})


class Kind(StrEnum):
    """Class of an op for the planner; PLACEHOLDER marks the DAG's inputs."""

    PLACEHOLDER = "placeholder"
    PARAMETRIC = "parametric"
    NON_PARAMETRIC = "non_parametric"
    LOSS = "loss"


class Source(StrEnum):
    """Origin of a named leaf tensor."""

    INPUT = "input"  # a micro-batch's data, from the data provider
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"  # lifted from the module at capture, never changes


@dataclass(frozen=True, slots=True)
class OpRef:
    """The value of the op at position ``op`` of ``OpDag.ops``."""

    op: int


@dataclass(frozen=True, slots=True)
class LeafRef:
    """A named tensor that no op of the DAG computes."""

    source: Source
    name: str


@dataclass(frozen=True, slots=True)
class TorchLiteral:
    """A torch enumeration as an argument: dtype 'float32', layout 'strided', memory_format
    'contiguous_format', or device '' (the device of the stage that runs the op)."""

    kind: str  # dtype | layout | memory_format | device
    name: str


Arg = OpRef | LeafRef | TorchLiteral | int | float | bool | str | None | tuple["Arg", ...]
SentArg = Annotated[Arg, Coded("argument")]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Static shape and dtype of one tensor at micro-batch size."""

    shape: Annotated[tuple[int, ...], Most(MAX_DIMS)]
    dtype: str

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Autocast:
    """An autocast region's own setting inside the model; overrides the job's precision."""

    enabled: bool
    dtype: str


@dataclass(frozen=True, slots=True)
class OpNode:
    """Operator call of a graph.

    ``outputs`` has one entry for an op that returns a tensor and n for one that returns a
    tuple (``is_tuple``); the ``builtin.getitem`` nodes of a tuple stand right behind it, so only
    single tensors ever cross a cut. ``requires_grad`` is that of the (single) output in training.
    """

    name: Name
    kind: Kind
    target: Name  # "aten.linear.default", "builtin.getitem"
    args: Annotated[tuple[SentArg, ...], Most(MAX_ARGS)]
    kwargs: Annotated[tuple[tuple[Name, SentArg], ...], Most(MAX_ARGS)]
    outputs: Annotated[tuple[TensorMeta, ...], Most(MAX_ARGS)]
    is_tuple: bool = False
    requires_grad: bool = False
    grad_enabled: bool = True
    autocast: Autocast | None = None
    random: bool = False
    flops_forward: int = 0
    flops_backward: int = 0
    bytes_moved: int = 0  # tensor bytes read and written by the forward
    bytes_saved: int = 0  # kept for the backward, beyond what other ops already keep
    bytes_repeatable: int = 0  # ... of these the results of ops that are cheap to run again
    module_path: str = ""  # "transformer.h.0.attn", for people and for grouping
    source_line: str = ""  # "model.py:41", for error messages
    # Of ``bytes_saved``: activations that few bits may stand for.
    bytes_few: int = 0  # ``atoll.few_bits``
    elements_few: int = 0  # of these


@dataclass(frozen=True, slots=True)
class StateMeta:
    """A parameter, buffer or constant of the module."""

    meta: TensorMeta
    requires_grad: bool = False
    mutated: bool = False  # a buffer that training ops write
    hidden_matrix: bool = False  # a parameter between embeddings and heads: ``atoll.hidden_matrices``


@dataclass(frozen=True, slots=True)
class OpDag:
    """A captured graph, in training or evaluation mode.

    ``unsplittable`` lists half-open ranges [a, b) of positions that must lie in one stage:
    tuple ops with their getitems, alias groups that are written in place, all users of a
    mutated buffer. ``aliases`` maps every other state-dict name of a tied tensor to the name
    used here. ``constant_ops`` depend on no input, no parameter and no mutated buffer, and are
    recomputed in each stage that uses them. ``metrics``: positions of further scalar outputs, in
    evaluation only. ``weight``: of the count that the loss is a sum over, behind the loss and in one stage
    with it; None where the loss is a mean. ``tail``: of an evaluation, the same graph with another number of
    rows (``atoll.rows``).
    """

    ops: Annotated[tuple[OpNode, ...], Most(MAX_OPS)]
    inputs: Annotated[dict[Name, TensorMeta], Sorted()]
    parameters: Annotated[dict[Name, StateMeta], Sorted()]
    buffers: Annotated[dict[Name, StateMeta], Sorted()]
    constants: Annotated[dict[Name, TensorMeta], Sorted()]
    loss: int
    unsplittable: Annotated[tuple[tuple[int, int], ...], Most(MAX_OPS)] = ()
    constant_ops: Annotated[frozenset[int], Most(MAX_OPS)] = field(default_factory=frozenset)
    aliases: Annotated[dict[Name, Name], Sorted()] = field(default_factory=dict)
    training: bool = True
    metrics: Annotated[dict[Name, int], Sorted(), Most(MAX_METRICS)] = field(default_factory=dict)
    weight: int | None = None
    tail: OpDag | None = None

    def cuttable(self) -> tuple[int, ...]:
        """Positions 0 < p < len(ops) where a stage may begin, ascending."""
        closed: set[int] = set()
        for begin, end in self.unsplittable:
            closed.update(range(begin + 1, end))
        return tuple(p for p in range(1, len(self.ops)) if p not in closed)


def op_refs(node: OpNode) -> tuple[int, ...]:
    """Positions of the ops whose values ``node`` reads, in argument order, without repeats."""
    return tuple(dict.fromkeys(leaf.op for leaf in arguments(node) if isinstance(leaf, OpRef)))


def leaf_refs(node: OpNode) -> tuple[LeafRef, ...]:
    """Named leaves that ``node`` reads, in argument order, without repeats."""
    return tuple(dict.fromkeys(leaf for leaf in arguments(node) if isinstance(leaf, LeafRef)))


def arguments(node: OpNode) -> list[Arg]:
    """Every reference and literal that ``node`` is given, those within tuples one by one, with repeats."""
    found = [*node.args, *(value for _, value in node.kwargs)]
    while any(isinstance(arg, tuple) for arg in found):
        found = [each for arg in found for each in (arg if isinstance(arg, tuple) else (arg,))]
    return found


def rows_of(inputs: Mapping[str, TensorMeta]) -> int:
    """Rows of a micro-batch: the inputs' common first dimension; 0 where they have none."""
    first = {meta.shape[0] if meta.shape else 0 for meta in inputs.values()}
    return first.pop() if len(first) == 1 else 0
