"""Formulas of a strategy that is its owner's own: per-tensor ops from a list, as data.

A formula is written for one tensor and captured once, at a stand-in's shape; every trained tensor of the
model goes through it. Its ops are a part of ``atoll.ops``'s list: element by element, or from all elements
to one number. So each value has the tensor's shape or none, whatever that shape is, and needs no more memory
than the tensor; nothing in a formula can loop, draw, write in place or read a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from atoll.bounded import Chars, Most, Name, Sorted
from atoll.errors import UsageError
from atoll.opdag import LeafRef, OpNode, Source, TensorMeta, leaf_refs, op_refs
from atoll.ops import check_node
from atoll.program import StageProgram

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_FORMULA_OPS = 256
MAX_ARRAYS = 8
"""Arrays of each kind beside the model, every one as large as it."""
MAX_SUMMARY = 200
STAND_IN = TensorMeta((3, 5), "float32")
NUMBER = TensorMeta((), "float64")
GRADIENT, RECEIVED, WEIGHT, DELTA, MEAN = "gradient", "received", "weight", "delta", "mean"
CLIENT_NUMBERS = ("steps", "lr", "momentum", "samples")
SERVER_NUMBERS = ("clients", "n_clients", "round")
OF_SGD = frozenset({"lr", "momentum"})
FIXED = frozenset({GRADIENT, RECEIVED, WEIGHT, DELTA, MEAN, *CLIENT_NUMBERS, *SERVER_NUMBERS})
_OPS = """
    abs add:Scalar,Tensor addcdiv addcmul ceil clamp:default,Tensor clamp_max:default,Tensor
    clamp_min:default,Tensor clone div:Scalar,Scalar_mode,Tensor,Tensor_mode eq:Scalar,Tensor erf exp
    expm1 floor ge:Scalar,Tensor gt:Scalar,Tensor isfinite le:Scalar,Tensor lerp:Scalar,Tensor log log1p
    logical_and logical_not logical_or lt:Scalar,Tensor maximum minimum mul:Scalar,Tensor nan_to_num
    ne:Scalar,Tensor neg pow:Scalar,Tensor_Scalar,Tensor_Tensor reciprocal relu round rsqrt rsub:Scalar,Tensor
    sgn sigmoid sign softplus sqrt square sub:Scalar,Tensor tanh trunc
    where:ScalarOther,ScalarSelf,self ones_like zeros_like full_like
    linalg_vector_norm max mean min norm:Scalar sum
"""
FORMULA_OPS = frozenset(
    f"aten.{name}.{overload}"
    for name, _, overloads in (item.partition(":") for item in _OPS.split())
    for overload in (overloads or "default").split(",")
)


@dataclass(frozen=True, slots=True)
class Formula:
    """Ops in order, captured at ``STAND_IN``, and the positions of named results. UsageError for an op that
    is not on the list, or whose value has a shape of its own."""

    ops: Annotated[tuple[OpNode, ...], Most(MAX_FORMULA_OPS)]
    results: Annotated[Mapping[Name, int], Sorted(), Most(2 * MAX_ARRAYS)]

    def __post_init__(self) -> None:
        if not 1 <= len(self.ops) <= MAX_FORMULA_OPS:
            raise UsageError(f"a formula of {len(self.ops)} ops; from 1 to {MAX_FORMULA_OPS}")
        for position, node in enumerate(self.ops):
            if node.target not in FORMULA_OPS:
                raise UsageError(
                    f"a formula with the op {node.target[:80]}; there are those that work element by element "
                    "and those that make one number of all elements (docs/own-strategies.md)"
                )
            check_node(node, STAND_IN.nbytes * 2)
            plain = not (node.is_tuple or node.random) and node.autocast is None and len(node.outputs) == 1
            if not plain or node.outputs[0].shape not in (STAND_IN.shape, ()):
                raise UsageError(f"a formula's op {node.target} makes {node.outputs[:2]}; give {_SHAPES}")
            if any(op >= position for op in op_refs(node)):
                raise UsageError(f"a formula's op {node.target} reads what comes after it")
            if any(leaf.source is not Source.INPUT for leaf in leaf_refs(node)):
                raise UsageError(f"a formula's op {node.target} reads a value that it does not have")
        bad = [name for name, op in self.results.items() if not 0 <= op < len(self.ops)]
        if bad or not self.results:
            raise UsageError(f"a formula without its results {bad[:3]}")
        for name, op in self.results.items():
            if self.ops[op].outputs != (STAND_IN,):
                found = self.ops[op].outputs[0]
                what = "one number" if not found.shape else f"of type {found.dtype}"
                raise UsageError(f"{name!r} is {what}; give it the tensor's shape and dtype")

    @property
    def reads(self) -> frozenset[str]:
        """Names of the values that it reads."""
        return frozenset(leaf.name for node in self.ops for leaf in leaf_refs(node))

    def at(self, meta: TensorMeta) -> StageProgram:
        """The formula for tensors of this shape and dtype, as a program that the executor runs."""
        ops = tuple(
            (at, replace(node, outputs=(_of(node.outputs[0], meta),))) for at, node in enumerate(self.ops)
        )
        inputs = tuple(sorted(self.reads))
        metrics = tuple(sorted(self.results.items()))
        return StageProgram(0, 1, ops, frozenset(), (), (), inputs, (), (), (), (), None, metrics)


_SHAPES = "values of the tensor's own shape, or single numbers"


def _of(declared: TensorMeta, meta: TensorMeta) -> TensorMeta:
    shape = declared.shape and meta.shape
    return TensorMeta(shape, meta.dtype if declared.dtype == STAND_IN.dtype else declared.dtype)


def value_meta(name: str, meta: TensorMeta) -> TensorMeta:
    """Meta of a formula's value of this name where the tensor has ``meta``."""
    return NUMBER if name in CLIENT_NUMBERS or name in SERVER_NUMBERS else meta


ArrayNames = Annotated[tuple[Name, ...], Most(MAX_ARRAYS)]


@dataclass(frozen=True, slots=True)
class DeclaredStrategy:
    """A strategy as it travels: what it keeps and sends beside the model, and its formulas.

    ``server``: arrays that the server keeps, one for each trained tensor, zero at first; ``sent_down``: those
    of them that every broadcast holds. ``client``: arrays that each client keeps, zero at first; ``sent_up``:
    arrays of every update, of which the server learns the sums. UsageError for what does not fit together.
    """

    summary: Annotated[str, Chars(MAX_SUMMARY)]
    server: ArrayNames = ()
    sent_down: ArrayNames = ()
    client: ArrayNames = ()
    sent_up: ArrayNames = ()
    by_samples: bool = True
    gradient: Formula | None = None
    after: Formula | None = None
    step: Formula | None = None
    # Beginning of frozen tensors' names -> of trained ones', whose received values they have in a round.
    copies: Annotated[Mapping[Name, Name], Sorted(), Most(MAX_ARRAYS)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = (*self.server, *self.client, *self.sent_up)
        if len(set(own)) < len(own) or FIXED & set(own):
            raise UsageError(f"arrays named {sorted(own)}; name each once, and none of {sorted(FIXED)}")
        if bad := [name for name in own if not name.isidentifier() or len(name) > 32]:
            raise UsageError(f"an array named {bad[0][:64]!r}; give a name of up to 32 letters, digits and _")
        if extra := sorted(set(self.sent_down) - set(self.server)):
            raise UsageError(f"{extra[0]!r} is sent down, but is not an array of the server")
        names = (*self.copies, *self.copies.values())
        if bad := [name for name in names if not name.endswith(".") or len(name) > MAX_SUMMARY]:
            raise UsageError(
                f'COPIES: {bad[0][:64]!r}; write names of modules with a dot, {{"teacher.": "net."}}'
            )
        if len(self.summary) > MAX_SUMMARY:
            raise UsageError(f"a summary of {len(self.summary)} characters; at most {MAX_SUMMARY}")
        here = (RECEIVED, *self.sent_down, *self.client)
        self._check("gradient", self.gradient, (GRADIENT, WEIGHT, *here), (GRADIENT,), (GRADIENT,))
        kept = (*self.sent_up, *self.client)
        self._check("after", self.after, (WEIGHT, DELTA, *here, *CLIENT_NUMBERS), kept, self.sent_up)
        read = (WEIGHT, MEAN, *self.server, *self.sent_up, *SERVER_NUMBERS)
        self._check("step", self.step, read, (WEIGHT, *self.server), (WEIGHT,))
        if self.after is None and kept:
            raise UsageError(f"arrays {kept} that nothing computes; define after()")

    def _check(
        self,
        what: str,
        formula: Formula | None,
        readable: Collection[str],
        allowed: Collection[str],
        due: Collection[str],
    ) -> None:
        if formula is None:
            return
        for name in sorted(formula.reads - set(readable)):
            raise UsageError(f"{what}() reads {name!r}; there are {', '.join(readable)}")
        if odd := sorted(set(formula.results) - set(allowed)):
            raise UsageError(f"{what}() returns {odd[0]!r}; it returns {', '.join(allowed) or 'nothing'}")
        if lacking := sorted(set(due) - set(formula.results)):
            raise UsageError(f"{what}() does not return {lacking[0]!r}")

    @property
    def reads_sgd(self) -> bool:
        """Whether a formula takes the local optimizer for SGD at one rate."""
        return self.after is not None and bool(self.after.reads & OF_SGD)


def value(name: str) -> LeafRef:
    """A formula's value of this name, as its ops refer to it."""
    return LeafRef(Source.INPUT, name)
