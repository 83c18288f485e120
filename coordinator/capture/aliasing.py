"""Which tensors of a captured graph may share memory, and who writes them (``atoll.schemas`` of one op)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from atoll.opdag import Arg, LeafRef, OpNode, OpRef, Source, leaf_refs
from atoll.schemas import Ref, aliased_refs, written_refs


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
