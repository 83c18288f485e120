"""Values that follow from weights alone which nobody trains: a dequantised or cast weight, a bias table.

A micro-batch in flight would keep each such value for its backward, at full width for every layer. It keeps
what the value is computed from instead (``atoll.repeats``), and the backward computes it again: the same
kernels on the same tensors, so the same bits. A base of 4 bits then takes its 4 bits and one layer at full
width, whatever number of micro-batches is in flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.opdag import LeafRef, OpDag, OpNode, Source, leaf_refs, op_refs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable


def standing(
    ops: Iterable[tuple[int, OpNode]],
    fixed: Callable[[LeafRef], bool],
    cached: Collection[int],
    written: Collection[int] = (),
    given: Collection[int] = (),
) -> frozenset[int]:
    """Return the positions of ``ops``, in order, that read nothing but what is ``fixed``, constants and each
    other. ``cached``: constant ops, which are computed once anyway; ``written``: ops whose results some op
    writes; ``given``: standing ops of an earlier stage, whose results this one receives."""
    found = set(given).difference(written)
    for op, node in ops:
        if op in cached or op in written or node.random or node.is_tuple:
            continue
        refs, leaves = op_refs(node), leaf_refs(node)
        known = all(ref in found or ref in cached for ref in refs)
        if known and (leaves or any(ref in found for ref in refs)) and all(map(fixed, leaves)):
            found.add(op)
    return frozenset(found.difference(given))


def standing_of(dag: OpDag, trained: Callable[[str], bool]) -> frozenset[int]:
    """Return the same of a whole graph, as a planner sees it: ``trained`` says which parameters are. An op
    that writes in place, which its name tells, is none."""

    def fixed(leaf: LeafRef) -> bool:
        if leaf.source is Source.PARAMETER:
            return not trained(leaf.name)
        return leaf.source is Source.CONSTANT or (
            leaf.source is Source.BUFFER and not dag.buffers[leaf.name].mutated
        )

    writers = {op for op, node in enumerate(dag.ops) if node.target.rpartition(".")[0].endswith("_")}
    return standing(enumerate(dag.ops), fixed, dag.constant_ops, writers)


def weights_behind(dag: OpDag, ops: Collection[int]) -> dict[int, tuple[str, ...]]:
    """Return for those of ``ops`` that follow from weights alone the parameters among these that a job may
    train, in order of their names. They are standing where a job freezes all of them."""
    found = standing_of(dag, lambda _: False) if ops else frozenset()  # nothing crosses within one stage
    return {op: tuple(sorted(_trainable(dag, op))) for op in ops if op in found}


def _trainable(dag: OpDag, op: int) -> set[str]:
    names: set[str] = set()
    seen, stack = set[int](), [op]
    while stack:
        at = stack.pop()
        if at not in seen:
            seen.add(at)
            stack.extend(op_refs(dag.ops[at]))
            leaves = (leaf.name for leaf in leaf_refs(dag.ops[at]) if leaf.source is Source.PARAMETER)
            names.update(name for name in leaves if dag.parameters[name].requires_grad)
    return names


def kept_for_backward(dag: OpDag, among: frozenset[int]) -> frozenset[int]:
    """Return those of ``among`` that an op with a backward reads, itself or by way of others of them."""
    found: set[int] = set()
    for op in range(len(dag.ops) - 1, -1, -1):
        if dag.ops[op].requires_grad or op in found:
            found.update(ref for ref in op_refs(dag.ops[op]) if ref in among)
    return frozenset(found)
