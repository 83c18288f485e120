"""Ops and parameters that a process divides in the whole graph, but has whole in a stage. Pure.

Ops that a tensor plan divides lie in regions: from products whose results are split to the op that sums over
them. A stage that begins inside a region receives whole values, and computes the rest of it whole. What two
stages use of parameters is whole on all their processes, so a region with such a parameter is, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.opdag import LeafRef, Source, leaf_refs

if TYPE_CHECKING:
    from atoll.mesh.share import Shared
    from atoll.opdag import OpDag


@dataclass(frozen=True)
class Region:
    """Ops that are divided together, ascending; ``uses``: all ops of the graph that read their parameters."""

    ops: tuple[int, ...]
    uses: tuple[int, ...]

    def breaks(self, a: int, b: int) -> bool:
        """Return whether ops [a, b), which have some of it, have to compute these whole."""
        return self.ops[0] < a or any(not a <= use < b for use in self.uses)


class Regions:
    """Regions of a graph and stored parts of its parameters, ``more`` bytes of each if it were whole."""

    def __init__(self, dag: OpDag, shared: Shared, more: Mapping[str, float]) -> None:
        uses: dict[str, list[int]] = {}
        for op, node in enumerate(dag.ops):
            for leaf in leaf_refs(node):
                if leaf.source is Source.PARAMETER and leaf.name in shared.stored:
                    uses.setdefault(leaf.name, []).append(op)
        self._reads = {op: _stored(leaf_refs(dag.ops[op]), uses) for op in range(len(dag.ops))}
        self._more, self._uses = more, uses
        self._regions = [
            Region(ops, tuple(sorted({use for op in ops for name in self._reads[op] for use in uses[name]})))
            for ops in _joined(shared.follows)
        ]

    def whole_ops(self, a: int, b: int) -> list[int]:
        """Return the ops of [a, b) that are divided in the whole graph, but not in a stage of these."""
        found = []
        for region in self._regions:
            if region.ops[0] < b and region.ops[-1] >= a and region.breaks(a, b):
                found += [op for op in region.ops if a <= op < b]
        return found

    def more_bytes(self, a: int, b: int) -> float:
        """Return how much more of its parameters' state a process holds for ops [a, b)."""
        names = {name for op in self.whole_ops(a, b) for name in self._reads[op]}
        for name, ops in self._uses.items():
            if len(ops) > 1 and any(a <= op < b for op in ops) and not a <= ops[0] <= ops[-1] < b:
                names.add(name)
        return sum(self._more[name] for name in names)


def _stored(leaves: Sequence[LeafRef], uses: Mapping[str, object]) -> list[str]:
    return [leaf.name for leaf in leaves if leaf.source is Source.PARAMETER and leaf.name in uses]


def _joined(follows: Mapping[int, frozenset[int]]) -> Iterator[tuple[int, ...]]:
    """Ops by the products that they follow from; products that one op follows from are of one region."""
    root: dict[int, int] = {}

    def find(op: int) -> int:
        while root.setdefault(op, op) != op:
            op = root[op]
        return op

    for columns in follows.values():
        first, *others = columns
        for other in others:
            root[find(other)] = find(first)
    found: dict[int, list[int]] = {}
    for op, columns in sorted(follows.items()):
        found.setdefault(find(next(iter(columns))), []).append(op)
    return map(tuple, found.values())
