"""The physical lower bound of a synchronous pipeline step, whatever the order of its work.

papers/peers.md 7.1, generalised from a chain to stages whose values skip: E(x) is the longest
way from the step's start to the start of x, W(x) the longest way from the end of x to the end
of the step, over one micro-batch's forwards, transfers and backwards. Where backwards b come in two
parts, only the one that others wait for lies on these ways: weight gradients w may come at any time
(w = 0 where backwards are whole). Then, with M micro-batches,

- stage:    max_i  E(F_i) + M (f_i + b_i) + max(0, W(B_i) - M w_i)
- one-way:  max_x  E(x) + M x + W(x)   over every forward, backward and transfer x
- shared:   max_r  min_x E(x) + M sum_x x + min_x W(x)   over the transfers x through resource r

which for a chain are the three terms given there. Transfers take bytes / rate plus one latency;
commit, optimizer, headers and per-message costs are not physics and are left out. Under a quota of CPU
time work may begin after a rest, and so end a little sooner: all work on E and W, of M the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.planning.costs.workload import Workload


@dataclass(frozen=True, slots=True)
class LowerBound:
    """No order of a step's work can be faster, its backwards whole or in two parts as in the plan."""

    step_s: float
    term: str  # stage | one-way | shared
    where: str  # "stage 2" | "link 1>2" | "lab up"
    terms: tuple[tuple[str, float], ...] = ()  # best of each kind


@dataclass(frozen=True, slots=True)
class _Transfer:
    source: int
    target: int
    backward: bool
    bits: float
    seconds: float
    latency_s: float


def lower_bound(
    work: Workload, payload_share: float = 1.0, in_flight: Sequence[int] | None = None
) -> LowerBound:
    """All three terms and the largest.

    ``payload_share`` < 1 turns payload rates back into configured ones, which bound from below.
    ``in_flight`` (by stage) adds a term that is memory's rather than physics'. With q
    micro-batches in flight, one in q begins only after the one before it has come back,
    E(F_i) + (1 + floor((M - 1) / q)) (from the start of F_i to the end of B_i) + W(B_i).
    """
    transfers = _transfers(work, payload_share)
    early_f, early_b, late_f, late_b = _longest_ways(work, transfers)
    m, stages = work.n_micro, work.stages
    found: list[LowerBound] = []
    for i, s in enumerate(stages):
        after_s = max(0.0, late_b[i] - m * (s.backward_s - s.input_s))  # what the stage cannot fill
        begun_f, begun_b = early_f[i] - s.quota.burst_s(s.forward_s), early_b[i] - s.quota.burst_s(s.input_s)
        found.append(LowerBound(begun_f + m * (s.forward_s + s.backward_s) + after_s, "stage", f"stage {i}"))
        found.append(LowerBound(begun_f + m * s.forward_s + late_f[i], "one-way", f"stage {i}"))
        found.append(LowerBound(begun_b + m * s.input_s + late_b[i], "one-way", f"stage {i}"))
    for i, q in enumerate(in_flight or ()):
        there_and_back = early_b[i] + stages[i].quota.soonest_s(stages[i].input_s) - early_f[i]
        bound = early_f[i] + (1 + (m - 1) // q) * there_and_back + late_b[i]
        found.append(LowerBound(bound, "in-flight", f"stage {i}"))
    shared: dict[str, list[tuple[float, float, float]]] = {}
    for x in transfers:
        begin, end = _around(work, x, (early_f, early_b, late_f, late_b))
        found.append(LowerBound(begin + m * x.seconds + end, "one-way", f"link {x.source}>{x.target}"))
        way = work.routes.get((x.source, x.target))
        for name, rate in way.resources if way is not None else ():
            shared.setdefault(name, []).append((begin, x.bits / rate, end))
    for name, uses in shared.items():
        total = min(u[0] for u in uses) + m * sum(u[1] for u in uses) + min(u[2] for u in uses)
        found.append(LowerBound(total, "shared", name))
    for those in work.together:
        if len(those) > 1:  # a device does the work of all its pieces
            work_s = sum(m * (stages[i].forward_s + stages[i].backward_s) for i in those)
            found.append(LowerBound(work_s, "stage", f"stage {those[0]}"))
    best = max(found, key=lambda bound: bound.step_s)
    kinds = ("stage", "one-way", "shared")
    terms = tuple((kind, max((f.step_s for f in found if f.term == kind), default=0.0)) for kind in kinds)
    return LowerBound(best.step_s, best.term, best.where, terms)


def _transfers(work: Workload, payload_share: float) -> list[_Transfer]:
    found = []
    for backward, hops in ((False, work.forward), (True, work.backward)):
        for hop in hops:
            way = work.routes.get((hop.source, hop.target))
            bits = 8.0 * hop.n_bytes * payload_share if way is not None else 0.0
            seconds, latency_s = (bits / way.rate_bps, way.latency_s) if way is not None else (0.0, 0.0)
            found.append(_Transfer(hop.source, hop.target, backward, bits, seconds, latency_s))
    return found


def _longest_ways(
    work: Workload, transfers: list[_Transfer]
) -> tuple[list[float], list[float], list[float], list[float]]:
    """(E of forwards, E of backwards, W of forwards, W of backwards), by stage."""
    n = len(work.stages)
    forward_s = [stage.quota.soonest_s(stage.forward_s) for stage in work.stages]
    input_s = [stage.quota.soonest_s(stage.input_s) for stage in work.stages]
    early_f, early_b = [0.0] * n, [0.0] * n
    late_f, late_b = [0.0] * n, [0.0] * n
    into_f: list[list[_Transfer]] = [[] for _ in range(n)]
    into_b: list[list[_Transfer]] = [[] for _ in range(n)]
    from_f: list[list[_Transfer]] = [[] for _ in range(n)]
    from_b: list[list[_Transfer]] = [[] for _ in range(n)]
    for x in transfers:
        (into_b if x.backward else into_f)[x.target].append(x)
        (from_b if x.backward else from_f)[x.source].append(x)
    for i in range(n):  # forwards reach later stages only
        early_f[i] = max(
            (early_f[x.source] + forward_s[x.source] + x.seconds + x.latency_s for x in into_f[i]),
            default=0.0,
        )
    for i in reversed(range(n)):  # backwards reach earlier stages only
        ways = [early_b[x.source] + input_s[x.source] + x.seconds + x.latency_s for x in into_b[i]]
        early_b[i] = max([early_f[i] + forward_s[i], *ways])
    for i in range(n):  # a stage's backward is followed by those of earlier stages
        for x in from_b[i]:
            way = x.seconds + x.latency_s + input_s[x.target] + late_b[x.target]
            late_b[i] = max(late_b[i], way)
    for i in reversed(range(n)):
        late_f[i] = input_s[i] + late_b[i]
        for x in from_f[i]:
            way = x.seconds + x.latency_s + forward_s[x.target] + late_f[x.target]
            late_f[i] = max(late_f[i], way)
    return early_f, early_b, late_f, late_b


def _around(
    work: Workload, x: _Transfer, ways: tuple[list[float], list[float], list[float], list[float]]
) -> tuple[float, float]:
    """(E, W) of a transfer."""
    early_f, early_b, late_f, late_b = ways
    source, target = work.stages[x.source], work.stages[x.target]
    if x.backward:
        end = x.latency_s + target.quota.soonest_s(target.input_s) + late_b[x.target]
        return early_b[x.source] + source.quota.soonest_s(source.input_s), end
    end = x.latency_s + target.quota.soonest_s(target.forward_s) + late_f[x.target]
    return early_f[x.source] + source.quota.soonest_s(source.forward_s), end
