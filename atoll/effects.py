"""Memory that ops write and that their results share, read from the op schemas.

Torch's schemas say it for most ops; where they are silent (batch norm writes its running
statistics, dropout may return its argument) this module errs towards "written" and "shared".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.opdag import Arg, LeafRef, OpNode, OpRef, Source, leaf_refs, op_refs
from atoll.ops import GETITEM, overload, schema
from atoll.schemas import HIDDEN_VIEWS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from atoll.program import StageProgram


@dataclass(frozen=True, slots=True)
class Effects:
    """Values that the ops of a program write, and the constants that hold for all micro-batches."""

    cached: frozenset[int]  # constant ops to run once, at load
    leaves: frozenset[LeafRef]  # named tensors that an op may write
    values: frozenset[int]  # ops whose results an op may write

    def fixed(self, trained: Collection[str]) -> Callable[[LeafRef], bool]:
        """Return whether a leaf stays as it is while the parameters ``trained`` change."""
        return lambda leaf: (
            leaf.source is not Source.INPUT and leaf.name not in trained and leaf not in self.leaves
        )


def effects(program: StageProgram) -> Effects:
    """Derive aliasing and writing from the op schemas; errs towards "written"."""
    nodes = dict(program.ops)
    leaves: set[LeafRef] = set()
    values: set[int] = set()
    spoilt: set[int] = set()
    while True:
        cached: set[int] = set()
        for op, node in program.ops:
            settled = op in program.constant_ops and op not in spoilt and not node.random
            if settled and all(r in cached for r in op_refs(node)):
                cached.add(op)
        found: set[int] = set()
        for op, node in program.ops:
            ops, named = _written(node, nodes)
            leaves |= named
            values |= ops
            if op not in cached:
                found |= ops & cached
        if not found:
            return Effects(frozenset(cached), frozenset(leaves), frozenset(values))
        spoilt |= found


def _written(node: OpNode, nodes: Mapping[int, OpNode]) -> tuple[set[int], set[LeafRef]]:
    """Ops and leaves whose memory ``node`` may write."""
    ops: set[int] = set()
    leaves: set[LeafRef] = set()
    if "batch_norm" in node.target or "instance_norm" in node.target:
        # Their schemas hide that they write the running statistics.
        leaves |= {leaf for leaf in leaf_refs(node) if leaf.source is Source.BUFFER}
    stack = [ref for arg in _written_args(node) for ref in references(arg)]
    while stack:
        ref = stack.pop()
        if isinstance(ref, LeafRef):
            leaves.add(ref)
        elif ref.op in nodes and ref.op not in ops:
            ops.add(ref.op)
            if may_alias(nodes[ref.op]):
                stack.extend(r for arg in nodes[ref.op].args for r in references(arg))
    return ops, leaves


def _written_args(node: OpNode) -> list[Arg]:
    declared = schema(node.target)
    if declared is None or not declared.is_mutable:
        return []
    named = dict(node.kwargs)
    given = [*node.args, *(named.get(a.name) for a in declared.arguments[len(node.args) :])]
    return [
        value
        for argument, value in zip(declared.arguments, given, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def may_alias(node: OpNode) -> bool:
    """Return whether the op's result may share memory with an argument."""
    if node.target == GETITEM:
        return True
    op = overload(node.target)
    hidden = node.target in HIDDEN_VIEWS
    hidden |= any(tag.name == "maybe_aliasing_or_mutating" for tag in op.tags)
    return hidden or any(r.alias_info is not None for r in op._schema.returns)


def references(arg: Arg) -> list[OpRef | LeafRef]:
    """Every reference within an argument, in order."""
    if isinstance(arg, tuple):
        return [ref for item in arg for ref in references(item)]
    return [arg] if isinstance(arg, OpRef | LeafRef) else []
