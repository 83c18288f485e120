"""What a cut must respect: aliases, in-place writes, buffers, tuples; and what needs no input.

Works on the flat node list of a captured graph, in graph order. Passes: references follow an
in-place op to its result; in-place ops on tensors that have no other view become their
functional twins; dead ops go; tuple items move behind their op; ranges that must stay whole and
ops that depend on nothing are derived. All are linear in the number of ops and arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from atoll.errors import CaptureError
from atoll.opdag import Arg, LeafRef, OpNode, OpRef, Source, TensorMeta, leaf_refs, op_refs
from atoll.ops import ALLOWED, GETITEM, resolve

Ref = OpRef | LeafRef

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
# Composite ops that may return a view although their schema does not say so.
_HIDDEN_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "alpha_dropout.default",
        "atleast_1d.default",
        "atleast_1d.Sequence",
        "atleast_2d.default",
        "atleast_2d.Sequence",
        "atleast_3d.default",
        "atleast_3d.Sequence",
        "broadcast_tensors.default",
        "cartesian_prod.default",
        "conj_physical.default",
        "dropout.default",
        "einsum.default",
        "feature_alpha_dropout.default",
        "feature_dropout.default",
        "meshgrid.default",
        "meshgrid.indexing",
        "unsafe_chunk.default",
    )
)
_DROPOUTS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")


@dataclass(frozen=True)
class Region:
    """Nodes in canonical order with everything a cut must know."""

    nodes: tuple[OpNode, ...]
    loss: int
    unsplittable: tuple[tuple[int, int], ...]
    constant_ops: frozenset[int]
    mutated: frozenset[str]  # buffers that these nodes write


def written_buffers(nodes: list[OpNode]) -> frozenset[str]:
    """Names of the buffers that ``nodes`` write, themselves or through a view."""
    return _Aliases(nodes).written(Source.BUFFER)


def settle(
    nodes: list[OpNode],
    loss: int,
    mutated: frozenset[str],
    meta_of: Callable[[LeafRef], TensorMeta],
    training: bool,
) -> Region:
    """Bring ``nodes`` into canonical form; ``mutated`` adds buffers that another graph writes.

    Random ops stay even when nothing uses them: the generator's stream is the module's.
    CaptureError when a parameter or a constant is written in place.
    """
    nodes = follow_in_place(nodes)
    nodes = functional_twins(nodes, _Aliases(nodes), meta_of)
    aliases = _Aliases(nodes)
    _refuse_writes(nodes, aliases)
    if training:
        nodes, loss = copied_reads(nodes, loss, aliases)
        aliases = _Aliases(nodes)
    order = _tuples_whole(nodes, _live(nodes, loss, aliases))
    place = {old: new for new, old in enumerate(order)}
    nodes = [_renumber(nodes[old], place) for old in order]
    aliases = _Aliases(nodes)
    mutated = mutated | aliases.written(Source.BUFFER)
    ranges = [*_tuple_ranges(nodes), *aliases.ranges(), *_buffer_ranges(nodes, aliases, mutated)]
    return Region(tuple(nodes), place[loss], _merge(ranges), _constant_ops(nodes, aliases, mutated), mutated)


def _refuse_writes(nodes: list[OpNode], aliases: _Aliases) -> None:
    for source in (Source.PARAMETER, Source.CONSTANT):
        for name in sorted(aliases.written(source)):
            node = nodes[aliases.writers[aliases.find(LeafRef(source, name))][0]]
            raise CaptureError(
                f"op {node.target} in {node.module_path or 'the module'} at "
                f"{node.source_line or 'an unknown line'} writes the {source} {name!r} in place during the "
                "forward; register it as a buffer, or move the write out of forward"
            )


def is_random(node: OpNode) -> bool:
    """Whether the op draws from the generator; ops that hide a dropout are asked for its rate."""
    if node.target == GETITEM or node.target not in ALLOWED:
        return False
    given = _named_arguments(node)
    name = node.target.split(".")[1].rstrip("_")
    if name in _DROPOUTS:
        return bool(given.get("train")) and given.get("p") != 0
    if name == "scaled_dot_product_attention":
        return bool(given.get("dropout_p"))
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return bool(given.get("train")) and bool(given.get("dropout"))
    if name == "rrelu":
        return bool(given.get("training"))
    if name == "native_dropout":
        return given.get("train") is not False and given.get("p") != 0
    return torch.Tag.nondeterministic_seeded in getattr(resolve(node.target), "tags", ())


def follow_in_place(nodes: list[OpNode]) -> list[OpNode]:
    """Later readers of a tensor that was written whole read the writer's result instead.

    Both names are one tensor; with one name fewer values cross a cut.
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
        node = _map_ops(node, latest)
        found.append(node)
        written = [ref for ref in _written_refs(node) if isinstance(ref, OpRef)]
        if len(written) == 1 and node.args and node.args[0] == written[0]:
            newest[written[0]] = OpRef(position)
    return found


def functional_twins(
    nodes: list[OpNode], aliases: _Aliases, meta_of: Callable[[LeafRef], TensorMeta]
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


def copied_reads(nodes: list[OpNode], loss: int, aliases: _Aliases) -> tuple[list[OpNode], int]:
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
        return nodes, loss
    found: list[OpNode] = []
    place: dict[int, int] = {}
    for position, node in enumerate(nodes):
        original = node
        node = _renumber(node, place)
        kept = {*_written_refs(original), *_aliased_refs(original)}
        copies: dict[Ref, Ref] = {}
        for ref in dict.fromkeys(_refs((*original.args, *(v for _, v in original.kwargs)))):
            if ref not in kept and aliases.find(ref) in roots and original.grad_enabled:
                now: Ref = OpRef(place[ref.op]) if isinstance(ref, OpRef) else ref
                copies[now] = OpRef(len(found))
                found.append(_copy_node(original, now, len(copies)))
        place[position] = len(found)
        found.append(_substituted(node, copies) if copies else node)
    return found, place[loss]


def _substituted(node: OpNode, copies: Mapping[Ref, Ref]) -> OpNode:
    return _map_refs(node, lambda ref: copies.get(ref, ref))


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
    for ref in _refs((*node.args[1:], *(value for _, value in node.kwargs))):
        dtype = meta_of(ref).dtype if isinstance(ref, LeafRef) else nodes[ref.op].outputs[0].dtype
        if dtype not in fitting:
            return False
    return True


class _Aliases:
    """Union-find over op results and leaves that may share memory, and who writes them."""

    def __init__(self, nodes: list[OpNode]) -> None:
        self.nodes = nodes
        self.parent: dict[Ref, Ref] = {}
        for position, node in enumerate(nodes):
            for ref in _aliased_refs(node):
                self.parent[self.find(ref)] = self.find(OpRef(position))
        self.writers: dict[Ref, list[int]] = defaultdict(list)
        for position, node in enumerate(nodes):
            for ref in _written_refs(node):
                self.writers[self.find(ref)].append(position)

    def find(self, ref: Ref) -> Ref:
        root = ref
        while (above := self.parent.get(root, root)) != root:
            root = above
        while (above := self.parent.get(ref, ref)) != root:
            self.parent[ref] = root
            ref = above
        return root

    def written_groups(self) -> list[list[Ref]]:
        """Members of every group that some op writes."""
        if not self.writers:
            return []
        groups: dict[Ref, list[Ref]] = {root: [] for root in self.writers}
        leaves = {leaf for node in self.nodes for leaf in leaf_refs(node)}
        members: Iterable[Ref] = (*(OpRef(p) for p in range(len(self.nodes))), *sorted(leaves, key=str))
        for member in members:
            root = self.find(member)
            if root in groups:
                groups[root].append(member)
        return list(groups.values())

    def written(self, source: Source) -> frozenset[str]:
        return frozenset(
            m.name
            for members in self.written_groups()
            for m in members
            if isinstance(m, LeafRef) and m.source is source
        )

    def ranges(self) -> list[tuple[int, int]]:
        """From the first member to the last write; all users where a named leaf is written."""
        readers: dict[Ref, list[int]] = defaultdict(list)
        for position, node in enumerate(self.nodes):
            for ref in {self.find(leaf) for leaf in leaf_refs(node)}:
                readers[ref].append(position)
        found = []
        for members in self.written_groups():
            root = self.find(members[0])
            touched = [m.op for m in members if isinstance(m, OpRef)]
            last = max(self.writers[root])
            if any(isinstance(m, LeafRef) for m in members):
                # The leaf is one tensor in each stage that holds it: a write reaches only its own.
                touched += readers[root]
                last = max(last, *touched)
            found.append((min(*touched, last), last + 1))
        return found


def _aliased_refs(node: OpNode) -> list[Ref]:
    """References whose memory the result may share."""
    if node.target == GETITEM:
        return _refs(node.args[:1])
    if node.target not in ALLOWED:
        return []
    given = _named_arguments(node)
    if node.target in _HIDDEN_VIEWS:
        drawn = node.target.split(".")[1] in _DROPOUTS and is_random(node)
        return [] if drawn else _refs(tuple(given.values()))
    schema = resolve_schema(node.target)
    if all(r.alias_info is None for r in schema.returns):
        return []
    return _refs(
        tuple(given[a.name] for a in schema.arguments if a.alias_info is not None and a.name in given)
    )


def _written_refs(node: OpNode) -> list[Ref]:
    """References that the op writes in place, those that its schema hides included."""
    if node.target == GETITEM or node.target not in ALLOWED:
        return []
    given = _named_arguments(node)
    name = node.target.split(".")[1]
    if name in ("batch_norm", "instance_norm"):
        training = given.get("training" if name == "batch_norm" else "use_input_stats")
        return _refs((given.get("running_mean"), given.get("running_var"))) if training else []
    schema = resolve_schema(node.target)
    if not schema.is_mutable:
        return []
    return _refs(
        tuple(
            given[a.name]
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and a.name in given
        )
    )


def resolve_schema(target: str) -> Any:
    """torch's schema of an allowed op."""
    op = resolve(target)
    found = getattr(op, "_schema", None)
    if found is None:
        _, name, overload = target.split(".")
        found = getattr(getattr(torch.ops.aten, name), overload)._schema
    return found


def _named_arguments(node: OpNode) -> dict[str, Arg]:
    """Argument name -> value, as far as they are given."""
    names = [argument.name for argument in resolve_schema(node.target).arguments]
    return {**dict(zip(names, node.args, strict=False)), **dict(node.kwargs)}


def _refs(args: tuple[Arg, ...]) -> list[Ref]:
    found: list[Ref] = []
    for arg in args:
        if isinstance(arg, tuple):
            found += _refs(arg)
        elif isinstance(arg, OpRef | LeafRef):
            found.append(arg)
    return found


def _map_refs(node: OpNode, change: Callable[[Ref], Ref]) -> OpNode:
    def mapped(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(mapped(item) for item in arg)
        return change(arg) if isinstance(arg, OpRef | LeafRef) else arg

    args = tuple(mapped(arg) for arg in node.args)
    kwargs = tuple((name, mapped(value)) for name, value in node.kwargs)
    return node if args == node.args and kwargs == node.kwargs else replace(node, args=args, kwargs=kwargs)


def _map_ops(node: OpNode, change: Callable[[OpRef], OpRef]) -> OpNode:
    return _map_refs(node, lambda ref: change(ref) if isinstance(ref, OpRef) else ref)


def _renumber(node: OpNode, place: dict[int, int]) -> OpNode:
    return _map_ops(node, lambda ref: OpRef(place[ref.op]))


def _live(nodes: list[OpNode], loss: int, aliases: _Aliases) -> set[int]:
    """Ops that the loss, a written leaf or the generator's stream needs."""
    stack = [loss, *(position for position, node in enumerate(nodes) if is_random(node))]
    for members in aliases.written_groups():
        if any(isinstance(m, LeafRef) and m.source is Source.BUFFER for m in members):
            stack += aliases.writers[aliases.find(members[0])]
    live: set[int] = set()
    woken: set[Ref] = set()
    while stack:
        position = stack.pop()
        if position in live:
            continue
        live.add(position)
        stack += op_refs(nodes[position])
        refs: tuple[Ref, ...] = (OpRef(position), *leaf_refs(nodes[position]))
        for ref in refs:
            root = aliases.find(ref)
            if root in aliases.writers and root not in woken:
                woken.add(root)
                stack += aliases.writers[root]
    return live


def _tuples_whole(nodes: list[OpNode], live: set[int]) -> list[int]:
    """Live positions in graph order, the items of a tuple right behind it."""
    items: dict[int, list[int]] = defaultdict(list)
    for position in sorted(live):
        if nodes[position].target == GETITEM:
            items[op_refs(nodes[position])[0]].append(position)
    order: list[int] = []

    def place(position: int) -> None:
        order.append(position)
        for item in items.get(position, ()):
            place(item)

    for position in sorted(live):
        if nodes[position].target != GETITEM:
            place(position)
    return order


def _tuple_ranges(nodes: list[OpNode]) -> list[tuple[int, int]]:
    last = {position: position for position, node in enumerate(nodes) if node.is_tuple}
    for position, node in enumerate(nodes):
        if node.target == GETITEM:
            last[op_refs(node)[0]] = position
    return [(first, end + 1) for first, end in last.items() if end > first]


def _buffer_ranges(nodes: list[OpNode], aliases: _Aliases, mutated: frozenset[str]) -> list[tuple[int, int]]:
    """All users of a buffer that any graph writes, views of it included."""
    users: dict[Ref, list[int]] = defaultdict(list)
    roots = {aliases.find(LeafRef(Source.BUFFER, name)) for name in mutated}
    for position, node in enumerate(nodes):
        refs: tuple[Ref, ...] = (*leaf_refs(node), *(OpRef(r) for r in op_refs(node)))
        for ref in refs:
            root = aliases.find(ref)
            if root in roots:
                users[root].append(position)
    return [(min(positions), max(positions) + 1) for positions in users.values()]


def _merge(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Disjoint ranges of more than one op, ascending."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(r for r in ranges if r[1] - r[0] > 1):
        if found and begin < found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return tuple(found)


def _constant_ops(nodes: list[OpNode], aliases: _Aliases, mutated: frozenset[str]) -> frozenset[int]:
    """Ops that depend on no input, parameter, mutated buffer or random draw.

    A group that is written and has one dependent member depends as a whole.
    """
    groups = [[m.op for m in members if isinstance(m, OpRef)] for members in aliases.written_groups()]
    dependent: set[int] = set()
    while True:
        before = len(dependent)
        for position, node in enumerate(nodes):
            if (
                position in dependent
                or is_random(node)
                or any(_varies(leaf, mutated) for leaf in leaf_refs(node))
                or any(r in dependent for r in op_refs(node))
            ):
                dependent.add(position)
        for group in groups:
            if any(member in dependent for member in group):
                dependent.update(group)
        if len(dependent) == before:
            return frozenset(range(len(nodes))) - dependent


def _varies(leaf: LeafRef, mutated: frozenset[str]) -> bool:
    return leaf.source in (Source.INPUT, Source.PARAMETER) or leaf.name in mutated
