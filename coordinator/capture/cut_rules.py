"""Constraints on a cut: aliases, in-place writes, buffers, tuples; and ops that need no input.

Works on the flat node list of a captured graph, in graph order: rewrites, then dead ops go,
tuple items move behind their op, and ranges that must stay whole and ops that depend on nothing
are derived. All is linear in the number of ops and arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atoll.errors import CaptureError
from atoll.opdag import LeafRef, OpNode, OpRef, Source, TensorMeta, leaf_refs, op_refs
from atoll.ops import GETITEM
from atoll.schemas import Ref, is_random
from coordinator.capture.aliasing import Aliases, renumber
from coordinator.capture.rewrites import copied_reads, follow_in_place, functional_twins


@dataclass(frozen=True)
class Region:
    """Nodes in canonical order with everything a cut must know."""

    nodes: tuple[OpNode, ...]
    loss: int
    unsplittable: tuple[tuple[int, int], ...]
    constant_ops: frozenset[int]
    mutated: frozenset[str]  # buffers that these nodes write
    metrics: Mapping[str, int]
    weight: int | None = None  # of the count that the loss is a sum over


def written_buffers(nodes: list[OpNode]) -> frozenset[str]:
    """Names of the buffers that ``nodes`` write, themselves or through a view."""
    return Aliases(nodes).written(Source.BUFFER)


def settle(
    nodes: list[OpNode],
    loss: int,
    mutated: frozenset[str],
    meta_of: Callable[[LeafRef], TensorMeta],
    training: bool,
    metrics: Mapping[str, int] | None = None,
    weight: int | None = None,
) -> Region:
    """Bring ``nodes`` into canonical form; ``mutated`` adds buffers that another graph writes,
    ``metrics`` outputs beside the loss, ``weight`` one that is its count, and stays with it.

    Random ops stay even when nothing uses them: the generator's stream is the module's.
    CaptureError when a parameter or a constant is written in place.
    """
    names = tuple(metrics or ())
    counts = () if weight is None else (weight,)
    nodes, outputs = follow_in_place(nodes, [loss, *(metrics or {}).values(), *counts])
    nodes = functional_twins(nodes, Aliases(nodes), meta_of)
    aliases = Aliases(nodes)
    _refuse_writes(nodes, aliases)
    if training:
        nodes, outputs = copied_reads(nodes, outputs, aliases)
        aliases = Aliases(nodes)
    order = _tuples_whole(nodes, _live(nodes, outputs, aliases))
    place = {old: new for new, old in enumerate(order)}
    nodes = [renumber(nodes[old], place) for old in order]
    aliases = Aliases(nodes)
    mutated = mutated | aliases.written(Source.BUFFER)
    ranges = [*_tuple_ranges(nodes), *aliases.ranges(), *_buffer_ranges(nodes, aliases, mutated)]
    constant = _constant_ops(nodes, aliases, mutated)
    loss, *others = (place[output] for output in outputs)
    if weight is not None:
        weight = others.pop()
        ranges.append((min(loss, weight), max(loss, weight) + 1))
        constant -= {weight}  # or it would be computed where something reads it: nowhere
    told = dict(zip(names, others, strict=True))
    return Region(tuple(nodes), loss, _merge(ranges), constant, mutated, told, weight)


def _refuse_writes(nodes: list[OpNode], aliases: Aliases) -> None:
    for source in (Source.PARAMETER, Source.CONSTANT):
        for name in sorted(aliases.written(source)):
            node = nodes[aliases.writers[aliases.find(LeafRef(source, name))][0]]
            raise CaptureError(
                f"op {node.target} in {node.module_path or 'the module'} at "
                f"{node.source_line or 'an unknown line'} writes the {source} {name!r} in place during the "
                "forward; register it as a buffer, or move the write out of forward"
            )


def _live(nodes: list[OpNode], outputs: Sequence[int], aliases: Aliases) -> set[int]:
    """Ops that the outputs, a written leaf or the generator's stream needs."""
    stack = [*outputs, *(position for position, node in enumerate(nodes) if is_random(node))]
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


def _buffer_ranges(nodes: list[OpNode], aliases: Aliases, mutated: frozenset[str]) -> list[tuple[int, int]]:
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


def _constant_ops(nodes: list[OpNode], aliases: Aliases, mutated: frozenset[str]) -> frozenset[int]:
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
