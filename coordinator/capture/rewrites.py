"""Rewrites that let a captured graph be cut without changing a bit of what it computes; and masks that say no
more than "causal", without which attention needs no mask in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atoll.execute import torch_literal
from atoll.kernels import resolve
from atoll.opdag import Arg, LeafRef, OpNode, OpRef, Source, TensorMeta, TorchLiteral, leaf_refs, op_refs
from atoll.ops import ALLOWED, GETITEM
from atoll.schemas import Ref, aliased_refs, is_random, named_arguments, references, written_refs
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


# ---------------------------------------------------------------- causal attention

_ATTENTION = "aten.scaled_dot_product_attention.default"


def without_causal_masks(
    nodes: list[OpNode], constants: Mapping[str, Tensor], device: torch.device
) -> list[OpNode]:
    """Return the nodes with ``is_causal`` in place of each mask that is that of every row and head.

    Libraries compute the mask of T tokens from positions, T^2 of it for each stage and micro-batch. Such a
    mask follows from no input, parameter or buffer: its value is found once. Attention is then that of
    torch's causal kernels, whose sums have another order; the ops behind the mask end as dead ones.
    """
    masks: dict[int, bool] = {}
    written = {
        member.op
        for members in Aliases(nodes).written_groups()
        for member in members
        if isinstance(member, OpRef)
    }
    found = list(nodes)
    for position, node in enumerate(nodes):
        if node.target != _ATTENTION:
            continue
        given = named_arguments(node)
        mask, query = given.get("attn_mask"), given.get("query")
        if not isinstance(mask, OpRef) or not isinstance(query, OpRef):
            continue
        tokens = nodes[query.op].outputs[0].shape[-2]
        if mask.op not in masks:
            behind = _constant_behind(mask.op, nodes, written)
            shape = nodes[mask.op].outputs[0].shape
            square = len(shape) > 1 and shape[-2:] == (tokens, tokens)
            masks[mask.op] = bool(
                square and behind and _is_causal(_evaluated(mask.op, behind, nodes, constants, device))
            )
        if masks[mask.op]:
            found[position] = _causal(node, given)
    return found


def _causal(node: OpNode, given: Mapping[str, Arg]) -> OpNode:
    args = (given["query"], given["key"], given["value"], None, given.get("dropout_p", 0.0), True)
    beside = tuple((name, value) for name, value in node.kwargs if name in ("scale", "enable_gqa"))
    return replace(node, args=args, kwargs=beside)


def _constant_behind(op: int, nodes: Sequence[OpNode], written: set[int]) -> list[int]:
    """Return all ops that an op follows from, itself included, in order; none where these read what may
    change, draw, or write."""
    found, stack = set[int](), [op]
    while stack:
        at = stack.pop()
        if at in found:
            continue
        node = nodes[at]
        varies = any(leaf.source is not Source.CONSTANT for leaf in leaf_refs(node))
        if varies or at in written or is_random(node) or node.target not in {*ALLOWED, GETITEM}:
            return []
        found.add(at)
        stack += op_refs(node)
    return sorted(found)


def _evaluated(
    op: int,
    behind: Sequence[int],
    nodes: Sequence[OpNode],
    constants: Mapping[str, Tensor],
    device: torch.device,
) -> Tensor:
    """The value of an op; each other one's goes with its last reader."""
    left = Counter(ref for at in behind for ref in op_refs(nodes[at]))
    values: dict[int, Any] = {}

    def value(arg: Arg) -> Any:
        match arg:
            case OpRef():
                return values[arg.op]
            case LeafRef():
                return constants[arg.name]
            case TorchLiteral():
                return torch_literal(arg, device)
            case tuple():
                return [value(each) for each in arg]
        return arg

    with torch.no_grad():
        for at in behind:
            node = nodes[at]
            named = {name: value(each) for name, each in node.kwargs}
            values[at] = resolve(node.target)(*map(value, node.args), **named)
            for ref in op_refs(node):
                left[ref] -= 1
                if not left[ref]:
                    values.pop(ref, None)
    found: Tensor = values[op]
    return found


def _is_causal(mask: Tensor) -> bool:
    """Whether it lets each query see the keys up to its own place, and those alone."""
    tokens = mask.shape[-1]
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype is torch.bool:
        return bool((mask == seen).all())
    if not mask.is_floating_point():
        return False
    least = torch.finfo(mask.dtype).min  # -inf is less
    return bool(torch.where(seen, mask == 0, mask <= least).all())
