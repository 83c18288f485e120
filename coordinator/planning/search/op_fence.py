"""OP-Fence: which devices, in which order, cut where (papers/decentralized.md 1.6).

Orders come from grouping by bandwidth and, in small fleets, from all permutations of all
subsets. Cuts of an order come from the chain dynamic programs under several ceilings and
assumptions on micro-batches in flight, plus the fence (the cheapest cut within 10 % of the work
around a group border). The lower bound ranks them, the timeline judges the best, and those are
improved locally: borders shifted, devices swapped, moved, dropped and added. Every search is
bounded by counts, never by the clock, so the same fleet gives the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from coordinator.planning import TUNED
from coordinator.planning.problem import Candidate, Problem, Scored, joined
from coordinator.planning.search.chain import backwards, extend, min_max, min_sum, step_bound, threshold
from coordinator.planning.search.clusters import groups, visiting_order
from coordinator.planning.search.ring import ring_cuts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from coordinator.planning.search.chain import Bools, ChainCut

    Floats = NDArray[np.float64]
    Positions = NDArray[np.intp]

Order = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Effort:
    """Bounds of the search, in counts."""

    candidates: int = 64  # devices of a larger fleet that are searched (``preselect``), ...
    few: int = 24  # ... and again, since no order of so few is too long for the thorough search
    exhaustive_devices: int = 5  # all subsets in all orders up to here (325 orders)
    coarse_positions: int = 48
    orders_kept: int = 16  # after the chain bound
    rings: int = 8  # orders whose rings are cut
    judged: int = 28  # by the timeline
    improved: int = 3
    moves: int = 300  # timeline runs of one local improvement
    dense_stages: int = 24  # longer orders are cut by threshold search
    order_moves: int = 160  # chain bounds when improving an order
    actions: int = 12_000  # simulated by one kind of effort: long pipelines are judged less often
    short: int = 12  # stages up to which any two devices may change places, not only neighbours, and ...
    short_actions: int = 60_000  # ... one local improvement simulates so many actions

    def affordable(self, most: int, problem: Problem, candidate: Candidate) -> int:
        """Return how many timeline runs of such a candidate are worth their time, at least 3."""
        return self._runs(most, self.actions, problem, candidate)

    def improving(self, problem: Problem, candidate: Candidate) -> int:
        """Return how many timeline runs improving it is worth, at least 3."""
        short = len(candidate.devices) <= self.short
        return self._runs(self.moves, self.short_actions if short else self.actions, problem, candidate)

    def _runs(self, most: int, actions: int, problem: Problem, candidate: Candidate) -> int:
        return max(3, min(most, actions // (2 * problem.n_micro * len(candidate.devices))))


def search(problem: Problem, effort: Effort | None = None) -> list[Scored]:
    """Judged candidates, best first; empty when nothing fits."""
    effort = effort or Effort()
    positions = problem.coarse(effort.coarse_positions)
    by_group = visiting_order(groups(problem.fleet.effective_bps), _boundary_seconds(problem, positions))
    bounds = _OrderBounds(problem, positions)
    orders = _orders(problem, by_group, bounds, positions, effort)
    alone = [Candidate((problem.owner,), (0,))] if problem.pinned else []
    # Pinned data need a device at both ends, which a row of stages has not.
    rows = () if problem.pinned else orders
    cuts = (c for order in rows for c in _cuts(problem, order, positions, by_group, effort))
    judged = _judge(problem, _ranked(problem, [*alone, *cuts]), effort)
    # The bounds know nothing of what shared parameters send, so rings are judged beside the others.
    rings = ring_cuts(problem, [o for o in orders if len(o) <= effort.dense_stages], positions, effort.rings)
    judged = sorted([*judged, *_judge(problem, _ranked(problem, rings), effort)], key=_step_s)
    improved = [improve(problem, s, positions, effort) for s in judged[: effort.improved]]
    return sorted([*improved, *judged], key=_step_s)


def _step_s(scored: Scored) -> float:
    return scored.step_s


def _ranked(problem: Problem, cuts: Iterable[Candidate], within_s: float = float("inf")) -> list[Candidate]:
    """Those that fit and may end within that, by their bounds."""
    values = {candidate: problem.surrogate(candidate) for candidate in dict.fromkeys(cuts)}
    ordered = sorted((value, c.devices, c.starts, c) for c, value in values.items())
    return [candidate for value, _, _, candidate in ordered if np.isfinite(value) and value <= within_s]


def without_one(
    problem: Problem, best: Scored, within_s: float, effort: Effort | None = None
) -> list[Scored]:
    """Judged candidates of one device fewer than ``best``, the others in its order, that may end a step
    within ``within_s``; best first, empty where the bounds say that there is none."""
    effort = effort or Effort()
    positions, whole = problem.coarse(effort.coarse_positions), tuple(dict.fromkeys(best.candidate.devices))
    slowest = sorted(range(len(whole)), key=lambda at: (-problem.compute[whole[at], -1], at))[
        : TUNED.left_out_one_by_one
    ]
    orders = [(*whole[:at], *whole[at + 1 :]) for at in slowest if len(whole) > 1]
    cuts = [c for order in orders for c in _cuts(problem, order, positions, (order,), effort)]
    judged = _judge(problem, _ranked(problem, cuts, within_s), effort)
    rings = [
        c
        for c in ring_cuts(problem, orders, positions, effort.rings)
        if len(set(c.devices)) == len(whole) - 1
    ]
    judged = sorted([*judged, *_judge(problem, _ranked(problem, rings, within_s), effort)], key=_step_s)
    if judged and judged[0].step_s <= TUNED.improves * within_s:
        better = improve(problem, judged[0], positions, effort)
        if len(set(better.candidate.devices)) == len(whole) - 1:
            judged.insert(0, better)
    return judged


def _judge(problem: Problem, ranked: Sequence[Candidate], effort: Effort) -> list[Scored]:
    """The timeline's verdict on the first of ``ranked`` and on the best of each further order,
    best first; fewer where pipelines are long."""
    found: list[Scored] = []
    seen: set[Order] = set()
    for at, candidate in enumerate(ranked):
        most = effort.affordable(effort.judged, problem, candidate)
        if at >= most and (len(seen) >= 2 * most or candidate.devices in seen):
            continue
        seen.add(candidate.devices)
        scored = problem.score(candidate)
        if scored is not None:
            found.append(scored)
    return sorted(found, key=_step_s)


def _boundary_seconds(problem: Problem, positions: Positions) -> Floats:
    """[n, n] seconds to send one typical boundary: latency plus bytes over rate."""
    live = problem.traffic.live_bytes[positions[1:-1]]
    n_bytes = float(np.median(live)) if len(live) else 0.0
    return problem.fleet.latency_s + 8.0 * n_bytes / problem.fleet.effective_bps


# ---------------------------------------------------------------- orders


class _OrderBounds:
    """Chain bound of an order: min sum + (M - 1) min max, each on its own, on coarse positions."""

    def __init__(self, problem: Problem, positions: Positions) -> None:
        self.problem = problem
        self.positions = positions
        self.blocked = backwards(len(positions))
        self.masks: dict[int, Bools | None] = {}
        self.links: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        self.known: dict[Order, float] = {}

    def mask(self, device: int) -> Bools | None:
        if device not in self.masks:
            self.masks[device] = self.problem.fits(device, self.positions, 1)
        return self.masks[device]

    def of(self, order: Order) -> float:
        """The bound in seconds; inf when the order cannot hold the model."""
        if order not in self.known:
            chain = self.problem.chain(order, self.positions, [self.mask(d) for d in order])
            self.known[order] = step_bound(chain, self.problem.n_micro)
        return self.known[order]

    def all_orders(self, devices: Sequence[int]) -> dict[Order, float]:
        """The bound of every order of every subset, sharing rows between common beginnings."""
        first = np.full(len(self.positions), np.inf)
        first[0] = 0.0
        found: dict[Order, float] = {}
        stack: list[tuple[Order, Floats, Floats]] = [((), first, first)]
        while stack:
            order, largest, total = stack.pop()
            for d in devices:
                if d in order:
                    continue
                pair = (*order[-1:], d)
                chain = self.problem.chain(pair, self.positions, [self.mask(x) for x in pair])
                row = len(pair) - 1
                now_largest, _ = extend(chain, row, largest, self.blocked, None)
                now_total, _ = extend(chain, row, total, self.blocked, 1e18)
                longer = (*order, d)
                bound = now_total[-1]
                if self.problem.n_micro > 1:  # times an infinite maximum, 0 would be no number
                    bound += (self.problem.n_micro - 1) * now_largest[-1]
                if np.isfinite(bound):
                    found[longer] = float(bound)
                if len(longer) < len(devices):
                    stack.append((longer, now_largest, now_total))
        return found


def _orders(
    problem: Problem,
    by_group: tuple[Order, ...],
    bounds: _OrderBounds,
    positions: Positions,
    effort: Effort,
) -> list[Order]:
    """The most promising orders by chain bound, the grouped ones always among them."""
    n = len(problem.fleet.devices)
    if n <= effort.exhaustive_devices:
        known = bounds.all_orders(range(n))
        whole = tuple(d for group in by_group for d in group)
        best = sorted(known, key=lambda o: (known[o], o))[: 2 * effort.orders_kept]
        return [*best, *([whole] if whole in known and whole not in best else [])]
    if n > effort.dense_stages:
        return _promising(
            problem,
            [*_both_ways(problem.likely), *_windows(problem, by_group, wide=n > 200)],
            positions,
            effort,
        )
    tried = {o: bounds.of(o) for o in (*_both_ways(problem.likely), *_windows(problem, by_group, wide=False))}
    tried.update({(d,): bounds.of((d,)) for d in range(n)})
    starts = sorted(tried, key=lambda o: (tried[o], len(o), o))[:4]
    for start in starts:
        _improve_order(start, bounds, range(n), effort.order_moves)
    feasible = {o: b for o, b in bounds.known.items() if np.isfinite(b)}
    return _varied(sorted(feasible, key=lambda o: (feasible[o], o)), effort.orders_kept)


def _both_ways(orders: Sequence[Order]) -> list[Order]:
    return [way for order in orders for way in (order, order[::-1])]


def _varied(ranked: Sequence[Order], most: int) -> list[Order]:
    """The first ``most``, then for each number of devices the best orders of different ones: the bound
    knows nothing of the micro-batches that memory keeps in flight, of which more stages hold more."""
    kept = dict.fromkeys(ranked[:most])
    seen = {frozenset(order) for order in kept}
    count = Counter(map(len, seen))
    for order in ranked[most:]:
        if count[len(order)] < TUNED.sets_each and frozenset(order) not in seen:
            seen.add(frozenset(order))
            count[len(order)] += 1
            kept[order] = None
    return list(kept)


def _promising(
    problem: Problem, orders: Sequence[Order], positions: Positions, effort: Effort
) -> list[Order]:
    """The best orders of a large fleet by a rough guess that needs no cut, and the best of each
    of a few sizes, since the guess is rough."""
    guess = {order: _rough_step(problem, order, positions) for order in orders}
    ranked = sorted((o for o in guess if np.isfinite(guess[o])), key=lambda o: (guess[o], o))
    kept = dict.fromkeys(ranked[: effort.orders_kept // 2])
    sizes: set[int] = set()
    for order in ranked:
        size = len(order).bit_length()
        if size not in sizes:
            sizes.add(size)
            kept[order] = None
    return list(kept)


def _rough_step(problem: Problem, order: Order, positions: Positions) -> float:
    """Seconds if the work could be split at will and every cut were the cheapest one.

    The fill (one micro-batch there and back) plus M - 1 times the period, or one fill for every
    q micro-batches where the memory left over keeps only q in flight.
    """
    devices = list(order)
    spare = float(problem.limits[devices].sum()) - problem.memory.state_bytes(0, problem.n_ops)
    if spare <= 0:
        return float("inf")
    link, toll = problem.links(devices, positions[1:-1])
    seconds = problem.compute[devices, -1]
    fill = float(seconds.mean() + toll.min(axis=1, initial=np.inf)[1:].sum())
    period = max(
        1.0 / float((1.0 / seconds).sum()), float(link.min(axis=1, initial=np.inf)[1:].max(initial=0))
    )
    each = problem.memory.per_micro_bytes(0, problem.n_ops)
    in_flight = max(1, min(problem.n_micro, int(spare // max(each, 1.0))))
    return fill + (problem.n_micro - 1) * max(period, fill / in_flight)


def _improve_order(order: Order, bounds: _OrderBounds, devices: Iterable[int], moves: int) -> Order:
    """Hill-climb on the chain bound by drop, add, swap and move; all tried land in ``known``."""
    spent = 0
    everyone = list(devices)
    while True:
        best = order
        for neighbour in _order_moves(order, everyone):
            if spent >= moves:
                return best
            spent += neighbour not in bounds.known
            if bounds.of(neighbour) < bounds.of(best) * (1 - 1e-6):
                best = neighbour
        if best == order:
            return order
        order = best


def _order_moves(order: Order, everyone: Sequence[int]) -> Iterator[Order]:
    n = len(order)
    if n > 1:
        for i in range(n):
            yield (*order[:i], *order[i + 1 :])
    for d in everyone:
        if d not in order:
            for i in range(n + 1):
                yield (*order[:i], d, *order[i:])
            for i in range(n):
                yield (*order[:i], d, *order[i + 1 :])
    for i in range(n):
        for j in range(i + 1, n):
            swapped = list(order)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            yield tuple(swapped)


def _windows(problem: Problem, by_group: tuple[Order, ...], wide: bool) -> list[Order]:
    """Runs of consecutive groups, thinned to their fastest devices, both ways round.

    ``wide`` (very large fleets): only runs and sizes that double, from the fastest groups.
    """
    speed = 1.0 / np.maximum(problem.compute[:, -1], 1e-12)
    k = len(by_group)
    lengths = sorted({min(k, 1 << i) for i in range(12)}) if wide or k > 12 else range(1, k + 1)
    found: dict[Order, None] = {}
    singles = sorted(range(len(speed)), key=lambda d: (-speed[d], d))
    for d in singles[:3]:
        found[(d,)] = None
    for length in lengths:
        begins = range(k - length + 1)
        if wide:
            power = [sum(float(speed[d]) for g in by_group[b : b + length] for d in g) for b in begins]
            begins_kept = sorted(begins, key=lambda b: -power[b])[:2]
        else:
            begins_kept = list(begins)
        for begin in begins_kept:
            window = [d for group in by_group[begin : begin + length] for d in group]
            for size in _sizes(len(window), wide):
                fastest = set(sorted(window, key=lambda d: (-speed[d], d))[:size])
                order = tuple(d for d in window if d in fastest)
                found[order] = None
                if not wide:
                    found[order[::-1]] = None
    return list(found)


def _sizes(n: int, wide: bool) -> list[int]:
    if n <= 8 and not wide:
        return list(range(1, n + 1))
    sizes = {n, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768}
    return sorted(s for s in sizes if s <= n and (not wide or s == n or s >= n // 8))


# ---------------------------------------------------------------- cuts


def _cuts(
    problem: Problem, order: Order, positions: Positions, by_group: tuple[Order, ...], effort: Effort
) -> Iterator[Candidate]:
    """Cuts of one order worth ranking."""
    if len(order) > effort.dense_stages or len(order) >= len(positions):
        yield from _threshold_cuts(problem, order)
        return
    group_of = {d: g for g, members in enumerate(by_group) for d in members}
    for fits in _memory_assumptions(problem, order, positions):
        chain = problem.chain(order, positions, fits)
        largest = min_max(chain)
        if largest is None:
            continue
        yield _candidate(order, positions, largest.starts)
        fenced = _fence(problem, order, positions, largest.starts, group_of)
        if fenced != largest.starts:
            yield _candidate(order, positions, fenced)
        if len(order) > 12:  # the sum term matters less the more micro-batches and stages
            continue
        for factor in TUNED.ceilings:
            cut = min_sum(chain, factor * largest.value * (1 + 1e-9))
            if cut is not None:
                yield _candidate(order, positions, cut.starts)


def _candidate(order: Order, positions: Positions, starts: Sequence[int]) -> Candidate:
    return Candidate(order, tuple(int(positions[i]) for i in starts))


def _memory_assumptions(problem: Problem, order: Order, positions: Positions) -> Iterator[list[Bools | None]]:
    """Which stages fit, for all micro-batches in flight, for a plain pipeline's, and for one."""
    k, n = len(order), problem.n_micro
    unlimited: set[tuple[int, ...]] = set()
    for depths in (
        [n] * k,
        [min(n, 2 * (k - s) - 1) for s in range(k)],
        [min(n, k - s) for s in range(k)],
        [1] * k,
    ):
        if tuple(depths) in unlimited:
            continue
        unlimited.add(tuple(depths))
        fits = [problem.fits(d, positions, q) for d, q in zip(order, depths, strict=True)]
        yield fits
        if all(mask is None for mask in fits):
            return  # memory binds nowhere: fewer in flight changes nothing


def _fence(
    problem: Problem,
    order: Order,
    positions: Positions,
    starts: tuple[int, ...],
    group_of: dict[int, int],
) -> tuple[int, ...]:
    """Move each border between groups to the fewest cut bytes within +-10 % of the work."""
    share = problem.compute[order[0]][positions] / max(problem.compute[order[0]][-1], 1e-12)
    live = problem.traffic.live_bytes[positions]
    moved = list(starts)
    for j in range(1, len(order)):
        if group_of[order[j - 1]] == group_of[order[j]]:
            continue
        low, high = moved[j - 1] + 1, (starts[j + 1] if j + 1 < len(starts) else len(positions) - 1) - 1
        near = [i for i in range(low, high + 1) if abs(share[i] - share[starts[j]]) <= TUNED.fence_share]
        if near:
            moved[j] = min(near, key=lambda i: (live[i], abs(share[i] - share[starts[j]]), i))
    return tuple(moved)


def _threshold_cuts(problem: Problem, order: Order) -> Iterator[Candidate]:
    """Min-max cuts of a long order, on all positions, for fewer and fewer micro-batches in flight."""
    positions = problem.positions
    chain = problem.chain(order, positions)
    value = 0.0
    cut: ChainCut | None = None
    for in_flight in reversed(list(_halves(min(problem.n_micro, 2 * len(order))))):
        limits = {float(problem.limits[d]) for d in order}
        reach = {x: problem.memory.farthest(positions, x, in_flight) for x in limits}
        by_device = [reach[float(problem.limits[d])] for d in order]
        if cut is not None and _within_reach(cut, by_device, len(positions) - 1):
            continue  # the best with less in flight, and so with more
        cut = threshold(chain.compute, chain.link, by_device.__getitem__, value, TUNED.cut_tolerance)
        if cut is None:
            return
        # More in flight fits less, so the largest stage only grows.
        value = cut.value / (1 + TUNED.cut_tolerance)
        yield _candidate(order[: len(cut.starts)], positions, cut.starts)


def _within_reach(cut: ChainCut, reach: Sequence[Positions], end: int) -> bool:
    stops = (*cut.starts[1:], end)
    return all(int(reach[j][a]) >= b for j, (a, b) in enumerate(zip(cut.starts, stops, strict=True)))


def _halves(n: int) -> Iterator[int]:
    while n > 1:
        yield n
        n //= 2
    yield 1


# ---------------------------------------------------------------- local improvement


def improve(problem: Problem, best: Scored, positions: Positions, effort: Effort) -> Scored:
    """Hill-climb under the timeline, by a bounded number of its runs."""
    moves = effort.improving(problem, best.candidate)
    spent = 0
    improved = True
    while improved and spent < moves:
        improved = False
        for candidate in _neighbours(problem, best.candidate, positions, effort):
            if spent >= moves:
                break
            spent += 1
            scored = problem.score(candidate)
            if scored is not None and scored.step_s < best.step_s * (1 - 1e-4):
                best, improved = scored, True
                break
    return best


def _neighbours(
    problem: Problem, candidate: Candidate, positions: Positions, effort: Effort
) -> Iterator[Candidate]:
    """Other devices for the same cut, one stage less, and shifted borders, in that order; far swaps last,
    as they are many."""
    devices, starts = candidate.devices, candidate.starts
    k = len(devices)
    for a in range(k - 1):
        yield _swapped(candidate, a, a + 1)
    spare = [d for d in range(len(problem.fleet.devices)) if d not in devices]
    for d in spare[: TUNED.spares]:
        for other in dict.fromkeys(devices):
            yield Candidate(tuple(d if one == other else one for one in devices), starts)
    if k > 1:
        for j in range(k):
            rest = (*devices[:j], *devices[j + 1 :])
            for border in {max(j, 1), min(j + 1, k - 1)}:
                yield joined(rest, (*starts[:border], *starts[border + 1 :]))
    yield from _shifted(problem, candidate, positions)
    if k <= effort.short:
        yield from (_swapped(candidate, a, b) for a, b in combinations(range(k), 2) if b - a > 1)


def _swapped(candidate: Candidate, a: int, b: int) -> Candidate:
    """The devices of two pieces with each other's, in all their pieces."""
    one, other = candidate.devices[a], candidate.devices[b]
    names = {one: other, other: one}
    return Candidate(tuple(names.get(d, d) for d in candidate.devices), candidate.starts)


def _shifted(problem: Problem, candidate: Candidate, positions: Positions) -> Iterator[Candidate]:
    """Each border one and two coarse positions, one and three fine ones either way."""
    starts = candidate.starts
    bounds = (*starts, problem.n_ops)
    for j in range(1, len(starts)):
        for grid, steps in ((positions, (1, 2)), (problem.positions, (1, 3))):
            at = int(np.searchsorted(grid, starts[j]))
            exact = at < len(grid) and grid[at] == starts[j]
            for step in steps:
                for i in (at - step, at + step - (0 if exact else 1)):
                    if 0 < i < len(grid) - 1 and bounds[j - 1] < grid[i] < bounds[j + 1]:
                        moved = (*starts[:j], int(grid[i]), *starts[j + 1 :])
                        yield Candidate(candidate.devices, moved)
