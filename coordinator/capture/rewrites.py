"""Rewrites that let a captured graph be cut without changing a bit of what it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from atoll.opdag import LeafRef, OpNode, OpRef, Source, TensorMeta
from atoll.ops import GETITEM
from atoll.schemas import Ref, aliased_refs, references, written_refs
from coordinator.capture.aliasing import Aliases, map_ops, map_refs, renumber

_ACTIVATIONS = (
    "abs", "detach", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish", "neg", "relu",
    "relu6", "sigmoid", "silu", "sqrt", "tanh", "tril", "triu",
)  # fmt: skip
# In-place ops whose functional twin computes the same bits. No op here that autocast treats
# differently in its two forms, and none that draws random numbers.
_TWINS = frozenset(
    f"aten.{name}_.{overload}"
    for name, overloads in (
        ("add", "Tensor Scalar"),
        ("sub", "Tensor Scalar"),
        ("mul", "Tensor Scalar"),
        ("div", "Tensor Scalar"),
        ("masked_fill", "Tensor Scalar"),
        ("fill", "Tensor Scalar"),
        ("clamp", "default Tensor"),
        ("clamp_min", "default Tensor"),
        ("clamp_max", "default Tensor"),
        *((name, "default") for name in _ACTIVATIONS),
    )
    for overload in overloads.split()
)


def follow_in_place(nodes: list[OpNode], outputs: Sequence[int]) -> tuple[list[OpNode], list[int]]:
    """Later readers of a tensor that was written whole read the writer's result instead.

    Both names are one tensor; with one name fewer values cross a cut. ``outputs``: positions that the
    graph returns, given back as they are called now.
    """
    newest: dict[OpRef, OpRef] = {}

    def latest(ref: OpRef) -> OpRef:
        end = ref
        while end in newest:
            end = newest[end]
        while ref in newest:  # shorten the path, or a long chain would be walked at each read
            newest[ref], ref = end, newest[ref]
        return end

    found: list[OpNode] = []
    for position, node in enumerate(nodes):
        node = map_ops(node, latest)
        found.append(node)
        written = [ref for ref in written_refs(node) if isinstance(ref, OpRef)]
        if len(written) == 1 and node.args and node.args[0] == written[0]:
            newest[written[0]] = OpRef(position)
    return found, [latest(OpRef(output)).op for output in outputs]


def functional_twins(
    nodes: list[OpNode], aliases: Aliases, meta_of: Callable[[LeafRef], TensorMeta]
) -> list[OpNode]:
    """Replace in-place ops by functional ones where no view, leaf or no-grad block is involved.

    Otherwise a model that adds its residuals in place could not be cut at all.
    """
    found = list(nodes)
    for members in aliases.written_groups():
        if any(isinstance(member, LeafRef) for member in members):
            continue
        positions = sorted(member.op for member in members if isinstance(member, OpRef))
        writers = positions[1:]
        if len({nodes[p].grad_enabled for p in positions}) != 1:
            continue
        if nodes[positions[0]].is_tuple or nodes[positions[0]].target == GETITEM:
            continue
        if all(_has_twin(nodes[p], nodes, meta_of) for p in writers):
            for p in writers:
                target = nodes[p].target.replace("_.", ".", 1)
                found[p] = replace(nodes[p], target=target)
    return found


def copied_reads(
    nodes: list[OpNode], outputs: Sequence[int], aliases: Aliases
) -> tuple[list[OpNode], list[int]]:
    """Ops read a copy of a buffer that the graph writes.

    Autograd may keep what they read for the backward, and by then a pipeline's next micro-batch
    has written the buffer. Views and writers go on with the buffer itself.
    """
    roots = {
        aliases.find(member)
        for members in aliases.written_groups()
        for member in members
        if isinstance(member, LeafRef) and member.source is Source.BUFFER
    }
    if not roots:
        return nodes, list(outputs)
    found: list[OpNode] = []
    place: dict[int, int] = {}
    for position, node in enumerate(nodes):
        original = node
        node = renumber(node, place)
        kept = {*written_refs(original), *aliased_refs(original)}
        copies: dict[Ref, Ref] = {}
        for ref in dict.fromkeys(references((*original.args, *(v for _, v in original.kwargs)))):
            if ref not in kept and aliases.find(ref) in roots and original.grad_enabled:
                now: Ref = OpRef(place[ref.op]) if isinstance(ref, OpRef) else ref
                copies[now] = OpRef(len(found))
                found.append(_copy_node(original, now, len(copies)))
        place[position] = len(found)
        found.append(_substituted(node, copies) if copies else node)
    return found, [place[output] for output in outputs]


def _substituted(node: OpNode, copies: Mapping[Ref, Ref]) -> OpNode:
    return map_refs(node, lambda ref: copies.get(ref, ref))


def _copy_node(reader: OpNode, ref: Ref, number: int) -> OpNode:
    return replace(
        reader,
        name=f"{reader.name}__copy_{number}",
        target="aten.clone.default",
        args=(ref,),
        kwargs=(),
        outputs=(),
        is_tuple=False,
    )


def _has_twin(node: OpNode, nodes: list[OpNode], meta_of: Callable[[LeafRef], TensorMeta]) -> bool:
    if node.target not in _TWINS or not isinstance(node.args[0], OpRef):
        return False
    # A wider operand would widen the functional result, not the in-place one.
    fitting = {node.outputs[0].dtype, "bool"}
    for ref in references((*node.args[1:], *(value for _, value in node.kwargs))):
        dtype = meta_of(ref).dtype if isinstance(ref, LeafRef) else nodes[ref.op].outputs[0].dtype
        if dtype not in fitting:
            return False
    return True
