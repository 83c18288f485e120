"""Which tensors of a captured graph may share memory, who writes them, and who draws at random.

Read from torch's op schemas, and from short lists where the schemas are silent; errs towards
"shares" and "writes".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from atoll.opdag import Arg, LeafRef, OpNode, OpRef, Source, leaf_refs
from atoll.ops import ALLOWED, GETITEM, overload, schema

Ref = OpRef | LeafRef

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


class Aliases:
    """Union-find over op results and leaves that may share memory, and who writes them."""

    def __init__(self, nodes: list[OpNode]) -> None:
        self.nodes = nodes
        self.parent: dict[Ref, Ref] = {}
        for position, node in enumerate(nodes):
            for ref in aliased_refs(node):
                self.parent[self.find(ref)] = self.find(OpRef(position))
        self.writers: dict[Ref, list[int]] = defaultdict(list)
        for position, node in enumerate(nodes):
            for ref in written_refs(node):
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
    return torch.Tag.nondeterministic_seeded in overload(node.target).tags


def aliased_refs(node: OpNode) -> list[Ref]:
    """References whose memory the result may share."""
    if node.target == GETITEM:
        return references(node.args[:1])
    if node.target not in ALLOWED:
        return []
    given = _named_arguments(node)
    if node.target in _HIDDEN_VIEWS:
        drawn = node.target.split(".")[1] in _DROPOUTS and is_random(node)
        return [] if drawn else references(tuple(given.values()))
    declared = schema(node.target)
    if all(r.alias_info is None for r in declared.returns):
        return []
    return references(
        tuple(given[a.name] for a in declared.arguments if a.alias_info is not None and a.name in given)
    )


def written_refs(node: OpNode) -> list[Ref]:
    """References that the op writes in place, those that its schema hides included."""
    if node.target == GETITEM or node.target not in ALLOWED:
        return []
    given = _named_arguments(node)
    name = node.target.split(".")[1]
    if name in ("batch_norm", "instance_norm"):
        training = given.get("training" if name == "batch_norm" else "use_input_stats")
        return references((given.get("running_mean"), given.get("running_var"))) if training else []
    declared = schema(node.target)
    if not declared.is_mutable:
        return []
    return references(
        tuple(
            given[a.name]
            for a in declared.arguments
            if a.alias_info is not None and a.alias_info.is_write and a.name in given
        )
    )


def _named_arguments(node: OpNode) -> dict[str, Arg]:
    """Argument name -> value, as far as they are given."""
    names = [argument.name for argument in schema(node.target).arguments]
    return {**dict(zip(names, node.args, strict=False)), **dict(node.kwargs)}


def references(args: tuple[Arg, ...]) -> list[Ref]:
    """All references within ``args``, nested ones included, in order."""
    found: list[Ref] = []
    for arg in args:
        if isinstance(arg, tuple):
            found += references(arg)
        elif isinstance(arg, OpRef | LeafRef):
            found.append(arg)
    return found


def map_refs(node: OpNode, change: Callable[[Ref], Ref]) -> OpNode:
    """``node`` with every reference changed."""

    def mapped(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(mapped(item) for item in arg)
        return change(arg) if isinstance(arg, OpRef | LeafRef) else arg

    args = tuple(mapped(arg) for arg in node.args)
    kwargs = tuple((name, mapped(value)) for name, value in node.kwargs)
    return node if args == node.args and kwargs == node.kwargs else replace(node, args=args, kwargs=kwargs)


def map_ops(node: OpNode, change: Callable[[OpRef], OpRef]) -> OpNode:
    """``node`` with every reference to an op changed."""
    return map_refs(node, lambda ref: change(ref) if isinstance(ref, OpRef) else ref)


def renumber(node: OpNode, place: dict[int, int]) -> OpNode:
    """``node`` after the ops it reads moved to new positions."""
    return map_ops(node, lambda ref: OpRef(place[ref.op]))
