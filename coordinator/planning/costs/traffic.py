"""Tensors that a cut of the DAG sends: the planner's fast form of ``atoll.program``.

Each value that crosses goes once from its producer straight to every stage that reads it; its
gradient folds down the chain of those stages, latest first, to the producer. The same rules as
``atoll.program.stage_programs``, which the tests compare it with, at a fraction of the cost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from atoll.opdag import OpDag, Source, TensorMeta, leaf_refs, op_refs
from coordinator.planning.costs.op_seconds import is_trained

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from atoll.job import Optimizer

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Hop:
    """Tensors that one stage sends another for one micro-batch, in one direction."""

    source: int  # stage
    target: int
    n_bytes: int
    messages: int


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor of a hop: a value, or the gradient of one."""

    meta: TensorMeta
    direct: bool  # exactly one stage reads the value, so its gradient goes back the way it came


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """The tensors that one stage sends another for one micro-batch: values to a later stage,
    gradients to an earlier one."""

    source: int  # stage
    target: int
    tensors: tuple[Crossing, ...]

    @property
    def backward(self) -> bool:
        return self.source > self.target

    @property
    def n_bytes(self) -> int:
        return sum(t.meta.nbytes for t in self.tensors)


@dataclass(frozen=True, slots=True)
class TiedExchange:
    """A trained parameter used in several stages: partial sums down, one for each block of micro-batches,
    the total back up."""

    name: str
    holders: tuple[int, ...]  # stages, ascending
    n_bytes: int  # of one sum
    blocks: int = 1

    @property
    def ways(self) -> list[tuple[int, int]]:
        """(source, target) of each transfer: with two holders once there and once back."""
        first, *others = self.holders
        return [*pairwise(reversed(self.holders)), *((first, other) for other in others)]

    def sums(self, source: int, target: int) -> int:
        """Return how many sums one stage sends another."""
        return self.ways.count((source, target)) * (self.blocks if source > target else 1)


@dataclass(frozen=True, slots=True)
class Cut:
    """Everything that crosses between the stages of one cut."""

    forward: tuple[Hop, ...]
    backward: tuple[Hop, ...]
    tied: tuple[TiedExchange, ...]


class Traffic:
    """The values of a DAG that may cross a cut, and the parameters used more than once."""

    def __init__(self, dag: OpDag, optimizer: Optimizer, blocks: int = 1) -> None:
        self._blocks = blocks
        users: dict[int, list[int]] = {}
        uses: dict[str, list[int]] = {}
        for op, node in enumerate(dag.ops):
            if op in dag.constant_ops:
                continue
            for r in op_refs(node):
                if r not in dag.constant_ops:
                    users.setdefault(r, []).append(op)
            for leaf in leaf_refs(node):
                if leaf.source is Source.PARAMETER:
                    uses.setdefault(leaf.name, []).append(op)
        self.n_ops = len(dag.ops)
        self._producers = sorted(users)
        self._users = [users[p] for p in self._producers]
        self._last = np.array([u[-1] for u in self._users], dtype=np.int64)
        self._bytes = [sum(m.nbytes for m in dag.ops[p].outputs) for p in self._producers]
        self._metas = [dag.ops[p].outputs[0] for p in self._producers]
        self._grad = [dag.ops[p].requires_grad for p in self._producers]
        self._shared = [
            (name, tuple(ops), dag.parameters[name].meta.nbytes)
            for name, ops in uses.items()
            if len(ops) > 1 and is_trained(dag, name, optimizer)
        ]
        self._live: dict[int, tuple[int, ...]] = {}

    @property
    def shared(self) -> list[tuple[tuple[int, ...], int]]:
        """(ops that use it, bytes) of each trained parameter of several ops."""
        return [(ops, n_bytes) for _, ops, n_bytes in self._shared]

    @cached_property
    def live_bytes(self) -> Ints:
        """[p] bytes of the values that are computed before position p and read from p on."""
        return self._swept([1] * len(self._producers))

    @cached_property
    def live_grad_bytes(self) -> Ints:
        """[p] bytes of their gradients."""
        return self._swept([int(g) for g in self._grad])

    def cut(self, starts: Sequence[int]) -> Cut:
        """Return the tensors that cross when the stages begin at ``starts`` (ascending, first 0)."""
        forward: dict[tuple[int, int], list[int]] = {}
        backward: dict[tuple[int, int], list[int]] = {}
        for v, owner, stages in self._crossing(starts):
            for i, stage in enumerate(stages):
                _add(forward, (owner, stage), self._bytes[v])
                if self._grad[v]:
                    _add(backward, (stage, stages[i - 1] if i else owner), self._bytes[v])
        tied = []
        for name, ops, n_bytes in self._shared:
            holders = tuple(sorted({bisect_right(starts, op) - 1 for op in ops}))
            if len(holders) > 1:
                tied.append(TiedExchange(name, holders, n_bytes, self._blocks))
        return Cut(_hops(forward), _hops(backward), tuple(tied))

    def loads(self, starts: Sequence[int]) -> tuple[LinkLoad, ...]:
        """The same crossings tensor by tensor, tied parameters aside: what codecs work on."""
        found: dict[tuple[int, int], list[Crossing]] = {}
        for v, owner, stages in self._crossing(starts):
            tensor = Crossing(self._metas[v], len(stages) == 1)
            for i, stage in enumerate(stages):
                found.setdefault((owner, stage), []).append(tensor)
                if self._grad[v]:
                    found.setdefault((stage, stages[i - 1] if i else owner), []).append(tensor)
        return tuple(LinkLoad(s, t, tuple(tensors)) for (s, t), tensors in sorted(found.items()))

    def _crossing(self, starts: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
        """(value, stage that computes it, later stages that read it, ascending)."""
        for v in dict.fromkeys(v for p in starts[1:] for v in self._live_at(p)):
            owner = bisect_right(starts, self._producers[v]) - 1
            yield v, owner, sorted({bisect_right(starts, u) - 1 for u in self._users[v]} - {owner})

    def _live_at(self, position: int) -> tuple[int, ...]:
        if position not in self._live:
            before = bisect_right(self._producers, position - 1)
            found = np.flatnonzero(self._last[:before] >= position)
            self._live[position] = tuple(int(v) for v in found)
        return self._live[position]

    def _swept(self, weights: list[int]) -> Ints:
        change = np.zeros(self.n_ops + 2, dtype=np.int64)
        for v, producer in enumerate(self._producers):
            change[producer + 1] += weights[v] * self._bytes[v]
            change[self._last[v] + 1] -= weights[v] * self._bytes[v]
        return np.cumsum(change)[: self.n_ops + 1]


def _add(hops: dict[tuple[int, int], list[int]], key: tuple[int, int], n_bytes: int) -> None:
    entry = hops.setdefault(key, [0, 0])
    entry[0] += n_bytes
    entry[1] += 1


def _hops(found: dict[tuple[int, int], list[int]]) -> tuple[Hop, ...]:
    return tuple(Hop(s, t, n_bytes, count) for (s, t), (n_bytes, count) in sorted(found.items()))
