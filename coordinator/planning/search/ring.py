"""Rings: all uses of a shared parameter on one device, which holds an interval of the ops around each.

Where several ops use one trained parameter, as a tied head does its embedding, a chain of stages adds up and
sends back its gradient between the first and the last: twice the table a step. One device with an interval
around each use (an *anchor*) sends none of it; a micro-batch crosses one boundary more. The other devices
share what is between the anchors, in a row, cut by the chain's dynamic programs over the ops that are left.
The device of the anchors goes on behind the first one as far as that balances. Timeline and memory judge what
comes of it, as of every candidate.

Where inputs are pinned to a worker, the ops that read them are anchors of its device, with the uses of shared
parameters or without.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np

from coordinator.planning import TUNED
from coordinator.planning.costs.memory import Together
from coordinator.planning.problem import Candidate, Problem, joined
from coordinator.planning.search.chain import Chain, min_max, min_sum, step_bound

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from coordinator.planning.problem import Positions
    from coordinator.planning.search.chain import Bools

Order = tuple[int, ...]
Interval = tuple[int, int]


def ring_cuts(
    problem: Problem, orders: Sequence[Order], positions: Positions, most: int
) -> Iterator[Candidate]:
    """Rings of the ``most`` promising of these orders of devices and of their rotations; none where no shared
    parameter is larger than what a boundary carries, and nothing is pinned."""
    turned = dict.fromkeys(
        order[at:] + order[:at] for order in orders for at in range(len(order)) if len(order) > 1
    )
    if problem.pinned:
        own = problem.owner
        turned = dict.fromkeys((own, *(d for d in order if d != own)) for order in (*orders, *turned))
        turned.pop((own,), None)
    for anchors in _anchors(problem, positions) if most else ():
        ring = _Ring(problem, positions, anchors)
        bounds = {order: ring.bound(order) for order in turned}
        best = sorted((o for o in turned if np.isfinite(bounds[o])), key=lambda o: (bounds[o], o))
        for order in best[:most]:
            yield from ring.cuts(order)


def _anchors(problem: Problem, positions: Positions) -> list[tuple[Interval, ...]]:
    """Intervals around the uses of what is shared: of all such parameters, and of the largest alone; around
    what is pinned as well, between narrow places, between any, and between the narrowest."""
    live = problem.traffic.live_bytes
    inner = live[positions[1:-1]]
    if not len(inner):
        return []
    narrow = [0, *(int(p) for p in problem.positions[1:-1] if live[p] <= np.median(inner)), problem.n_ops]
    shared = sorted((n_bytes, ops) for ops, n_bytes in problem.traffic.shared if n_bytes > inner.min())
    every = [tuple(op for _, ops in shared[at:] for op in ops) for at in {0, len(shared) - 1} if shared]
    if problem.pinned:
        pins = tuple(map(int, problem.pins))
        every = [pins, *((*pins, *ops) for ops in every)]
        anywhere = list(map(int, problem.positions))
        # Far narrower than the rest, as around a layer of split fine-tuning: worth a longer way to it.
        thin = [
            p for p in narrow if p in (0, problem.n_ops) or live[p] <= np.median(inner) * TUNED.thin_place
        ]
        places = (narrow, anywhere, thin)
        least = [_around(sorted({*ops}), among) for ops in every for among in places]
        pinned = (*least, *(_to_ends(problem, anchors) for anchors in least))
        return [anchors for anchors in dict.fromkeys(pinned) if anchors != ((0, problem.n_ops),)]
    found = (_to_ends(problem, _around(sorted(ops), narrow)) for ops in every)
    return [anchors for anchors in dict.fromkeys(found) if len(anchors) > 1]


def _around(ops: Sequence[int], narrow: Sequence[int]) -> tuple[Interval, ...]:
    """The least intervals between narrow positions that hold these ops."""
    found: list[Interval] = []
    for op in ops:
        a, b = narrow[bisect_right(narrow, op) - 1], narrow[bisect_left(narrow, op + 1)]
        if found and a <= found[-1][1]:
            a, b = found[-1][0], max(found.pop()[1], b)
        found.append((a, b))
    return tuple(found)


def _to_ends(problem: Problem, anchors: tuple[Interval, ...]) -> tuple[Interval, ...]:
    """Let the first and the last of them reach the ends of the ops where there is hardly any work beyond."""
    share = problem.compute.sum(axis=0) / problem.compute[:, -1].sum()
    (a, b), *others = anchors
    found = [(a if share[a] >= TUNED.ring_rest else 0, b), *others]
    a, b = found[-1]
    found[-1] = (a, b if share[b] <= 1.0 - TUNED.ring_rest else problem.n_ops)
    return tuple(found)


@dataclass
class _Ring:
    """Ways to give all ``anchors`` to the first device of an order and what is between them to the others.

    A *node* is a place where the others' intervals may begin and end: a position, or an anchor, before which
    one ends and behind which the next begins.
    """

    problem: Problem
    positions: Positions
    anchors: tuple[Interval, ...]

    def __post_init__(self) -> None:
        n = self.problem.n_ops
        outside = [(int(p), int(p)) for p in self.positions if not any(a <= p <= b for a, b in self.anchors)]
        nodes = sorted([*outside, *self.anchors])
        self.left = np.array([a for a, _ in nodes], dtype=np.intp)  # where an interval may end ...
        self.right = np.array([b for _, b in nodes], dtype=np.intp)  # ... and the next begin
        self.first, self.last = nodes[0][0] == 0 < nodes[0][1], nodes[-1][1] == n > nodes[-1][0]
        self._masks: dict[tuple[float, int], Bools] = {}
        self._own: dict[tuple[int, int], Bools] = {}

    @cached_property
    def _between(self) -> Bools:
        """[l, i] whether the ops from node l to node i hold no anchor, and at least one op."""
        inside = np.concatenate(([0], np.cumsum(self.left < self.right)))  # anchors before a node
        n = len(self.left)
        apart = inside[np.newaxis, :n] > inside[1 : n + 1, np.newaxis]
        found: Bools = ~apart & ~np.tri(n, dtype=bool)
        return found

    def _fits(self, device: int, in_flight: int) -> Bools:
        key = float(self.problem.limits[device]), in_flight
        if key not in self._masks:
            every = np.unique(np.concatenate((self.left, self.right)))
            held = self.problem.memory.matrix(every, in_flight)
            rows, columns = np.searchsorted(every, self.right), np.searchsorted(every, self.left)
            self._masks[key] = (held[np.ix_(rows, columns)] <= key[0]) & self._between
        return self._masks[key]

    def _own_fits(self, device: int, in_flight: int) -> Bools:
        """[i] whether a device can hold the anchors, the first one up to node i."""
        key = device, in_flight
        if key not in self._own:
            limit = self.problem.limits[device]
            found = np.zeros(len(self.left), dtype=bool)
            (a, _), *others = self.anchors
            for i, end in enumerate(self.left):
                pieces = [(a, max(int(end), self.anchors[0][1])), *others]
                if any(one[1] >= other[0] for one, other in pairwise(pieces)):
                    break
                micros = [(in_flight, None)] * (len(pieces) - self.last) + [(1, None)] * self.last
                found[i] = Together(self.problem.memory, pieces).bytes(micros) <= limit
            self._own[key] = found
        return self._own[key]

    def _chain(self, order: Order, in_flight: int, *, on: bool) -> Chain:
        """The others in a row over the nodes; with ``on`` before them the device of the anchors, which goes
        on behind the first one."""
        device, *others = order
        rows = [device, *others] if on else others
        taken = np.cumsum(self.problem.compute[:, self.right] - self.problem.compute[:, self.left], axis=1)
        compute = self.problem.compute[rows][:, self.right] - taken[rows]
        fits = [self._fits(d, in_flight) for d in rows]
        if on:
            compute[0, 0] -= taken[device, -1]
            fits[0] = self._own_fits(device, in_flight)[np.newaxis, :] & self._between
        link, toll = self.problem.links([order[-1], *rows], self.right)
        return Chain(compute, link[1:], toll[1:], fits)

    def _ways(self) -> tuple[bool, ...]:
        """Whether the device of the anchors may go on behind the first one, and whether it need not."""
        return (True, False) if self.first else (False,)

    def bound(self, order: Order) -> float:
        """Seconds of a step by the chain's bound, one micro-batch in flight; inf where nothing fits."""
        if not self._own_fits(order[0], 1)[0]:
            return float("inf")
        n = self.problem.n_micro
        return min(step_bound(self._chain(order, 1, on=on), n) for on in self._ways())

    def cuts(self, order: Order) -> Iterator[Candidate]:
        """Cuts worth ranking: for all micro-batches in flight, for a plain pipeline's, and for one."""
        n = self.problem.n_micro
        for in_flight, on in product(dict.fromkeys((n, min(n, len(order)), 1)), self._ways()):
            if not self._own_fits(order[0], in_flight)[0]:
                continue
            chain = self._chain(order, in_flight, on=on)
            largest = min_max(chain)
            if largest is None:
                continue
            ceilings = (factor * largest.value * (1 + 1e-9) for factor in TUNED.ceilings)
            found = [largest, *(cut for most in ceilings if (cut := min_sum(chain, most)) is not None)]
            yield from dict.fromkeys(self._candidate(order, cut.starts, on=on) for cut in found)

    def _candidate(self, order: Order, starts: Sequence[int], *, on: bool) -> Candidate:
        rows = order if on else order[1:]
        begins = [(int(self.right[i]), d) for i, d in zip(starts, rows, strict=True) if i or not on]
        pieces = sorted([*((a, order[0]) for a, _ in self.anchors), *begins])
        return joined([d for _, d in pieces], [a for a, _ in pieces])
