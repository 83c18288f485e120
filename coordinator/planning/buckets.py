"""Which gradients share a message: merged where a message's start costs more than waiting does.

    cost(M)    = a + b M, one exchange at a time
    end(k)     = max(end(k - 1), ready of the last in bucket k) + cost(bucket k)        (reduce)
    halves     = reduce in backward, then gather in the order of the next forward, whose ops wait for their
                 bucket alone: after(k) = gather(k) + max(forward of k and of all that follow, after(k + 1))
    finish     = end(last bucket) + after(first in forward order)

MG-WFBP merges by a greedy comparison of neighbours (papers/compression.md 6) and ends up to 6 % later on 22
of 100 drawn cases of this very model. Both terms of ``finish`` only grow with what precedes, so a dynamic
program over the cuts is exact: it keeps every pair (end, after) that no other one beats in both, which
without a second half is one pair a cut, O(n^2). Source of the halves: DeAR (papers/compression.md 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from atoll.errors import UsageError


@dataclass(frozen=True, slots=True)
class Gradient:
    """A parameter's gradient in backward."""

    parameter: str
    n_bytes: float
    ready_s: float  # from the beginning of backward
    forward_s: float = 0.0  # of the ops of the next forward that need the new parameter


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """Seconds of one exchange: start_s + per_byte_s * bytes."""

    start_s: float
    per_byte_s: float

    def of(self, n_bytes: float) -> float:
        return self.start_s + self.per_byte_s * n_bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients sent together, and when: seconds from the beginning of backward."""

    parameters: tuple[str, ...]
    n_bytes: float
    reduce_s: tuple[float, float]  # begin, end; the whole exchange where there is no second half
    gather_s: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Buckets in the order of backward, and when the next forward ends."""

    buckets: tuple[Bucket, ...]
    finish_s: float


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Buckets of the first gradients: ``end_s`` of their last reduce, ``after_s`` as in ``finish``."""

    end_s: float
    after_s: float
    cuts: tuple[int, ...]  # 0, then where each bucket ends


def merge(
    gradients: Sequence[Gradient], reduce: ExchangeCost, gather: ExchangeCost | None = None
) -> BucketPlan:
    """Return the buckets with which the next forward ends first; the fewest of them where several do.

    ``gradients``: in backward's order, ready times ascending, else UsageError. ``reduce``: cost of the whole
    exchange, or of its first half where ``gather`` is the second.
    """
    sizes = [0.0, *accumulate(gradient.n_bytes for gradient in gradients)]
    forward = [0.0, *accumulate(gradient.forward_s for gradient in gradients)]
    best = [[_Cuts(0.0, 0.0, (0,))]]
    for stop in range(1, len(gradients) + 1):
        ready = gradients[stop - 1].ready_s
        found: list[_Cuts] = []
        for start, states in enumerate(best):
            n_bytes = sizes[stop] - sizes[start]
            gather_s = gather.of(n_bytes) if gather else 0.0
            found += [
                _Cuts(
                    max(state.end_s, ready) + reduce.of(n_bytes),
                    gather_s + max(forward[stop], state.after_s),
                    (*state.cuts, stop),
                )
                for state in states
            ]
        best.append(_unbeaten(found))
    chosen = min(best[-1], key=lambda state: (state.end_s + state.after_s, len(state.cuts)))
    return schedule(gradients, chosen.cuts[1:], reduce, gather)


def _unbeaten(states: list[_Cuts]) -> list[_Cuts]:
    """Those that no other one equals or beats in both times; with fewer buckets where times are equal."""
    kept: list[_Cuts] = []
    for state in sorted(states, key=lambda state: (state.end_s, state.after_s, len(state.cuts))):
        if not kept or state.after_s < kept[-1].after_s:
            kept.append(state)
    return kept


def schedule(
    gradients: Sequence[Gradient],
    stops: Sequence[int],
    reduce: ExchangeCost,
    gather: ExchangeCost | None = None,
) -> BucketPlan:
    """Return when given buckets travel: each ends before the gradient of its ``stops``, as a slice does.

    UsageError for ready times that fall, or stops that do not ascend to the number of gradients.
    """
    if any(a.ready_s > b.ready_s for a, b in pairwise(gradients)):
        raise UsageError("ready times of gradients must ascend; give them in backward's order")
    cuts = [0, *stops]
    if any(a >= b for a, b in pairwise(cuts)) or cuts[-1] != len(gradients):
        raise UsageError(f"buckets end at {list(stops)}; ends must ascend to {len(gradients)}")
    members = [gradients[start:stop] for start, stop in pairwise(cuts)]
    sizes = [sum(gradient.n_bytes for gradient in bucket) for bucket in members]
    now, reduced, gathered = 0.0, [], []
    for bucket, n_bytes in zip(members, sizes, strict=True):
        begin = max(now, bucket[-1].ready_s)
        now = begin + reduce.of(n_bytes)
        reduced.append((begin, now))
    forward_end = now
    for bucket, n_bytes in zip(reversed(members), reversed(sizes), strict=True):
        begin = now
        now += gather.of(n_bytes) if gather else 0.0
        gathered.append((begin, now))
        forward_end = max(forward_end, now) + sum(gradient.forward_s for gradient in bucket)
    buckets = (
        Bucket(tuple(g.parameter for g in bucket), n_bytes, halves[0], halves[1] if gather else None)
        for bucket, n_bytes, *halves in zip(members, sizes, reduced, reversed(gathered), strict=True)
    )
    return BucketPlan(tuple(buckets), forward_end)
