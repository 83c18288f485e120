"""Gradient buckets: the dynamic program against all partitions and against MG-WFBP's published rule."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from atoll.errors import UsageError
from coordinator.planning.buckets import ExchangeCost, Gradient, merge, schedule

LAYERS = 8
WAN = ExchangeCost(0.05, 8 / 100e6)  # 100 Mbit/s, 50 ms a message
LAN = ExchangeCost(1e-4, 8 / 10e9)
RESNET_STAGES = ((9.4e3, 14), (2.2e5, 30), (1.2e6, 50), (7.1e6, 50), (1.5e7, 17))  # bytes, tensors of 161


def drawn(seed: int) -> tuple[list[Gradient], ExchangeCost, ExchangeCost]:
    """Eight layers whose sizes span three orders, and costs at which some merges pay and some do not."""
    draw = np.random.default_rng(seed)
    backward = draw.exponential(0.02, LAYERS)
    n_bytes = 10.0 ** draw.uniform(4, 7, LAYERS)
    forward = backward * draw.uniform(0.3, 0.7, LAYERS)
    gradients = [
        Gradient(f"w{LAYERS - 1 - i}", float(n_bytes[i]), float(backward[: i + 1].sum()), float(forward[i]))
        for i in range(LAYERS)
    ]
    reduce, gather = (
        ExchangeCost(float(10 ** draw.uniform(-4, -1.3)), float(10 ** draw.uniform(-10, -7))) for _ in "ab"
    )
    return gradients, reduce, gather


def partitions(n: int) -> list[tuple[int, ...]]:
    return [(*cuts, n) for k in range(n) for cuts in combinations(range(1, n), k)]


def simulated_finish(
    gradients: list[Gradient], stops: tuple[int, ...], reduce: ExchangeCost, gather: ExchangeCost | None
) -> float:
    """End of the next forward, op by op: written apart from the module under test."""
    link_free, start, arrived = 0.0, 0, {}
    bounds = []
    for stop in stops:
        size = sum(g.n_bytes for g in gradients[start:stop])
        link_free = max(link_free, max(g.ready_s for g in gradients[start:stop])) + reduce.of(size)
        bounds.append((start, stop, size))
        start = stop
    all_reduced = link_free
    for start, stop, size in reversed(bounds):
        link_free += gather.of(size) if gather else 0.0
        arrived.update(dict.fromkeys(range(start, stop), link_free))
    clock = all_reduced
    for layer in reversed(range(len(gradients))):
        clock = max(clock, arrived[layer]) + gradients[layer].forward_s
    return clock


def greedy(gradients: list[Gradient], cost: ExchangeCost) -> tuple[int, ...]:
    """MG-WFBP's rule as published (papers/compression.md 6), layers in backward's order."""
    size = [g.n_bytes for g in gradients]
    ready = [g.ready_s for g in gradients]

    def begins() -> list[float]:
        tau = [ready[0]]
        for i in range(1, len(size)):
            before = cost.of(size[i - 1]) if size[i - 1] else 0.0
            tau.append(max(tau[-1] + before, ready[i]))
        return tau

    merged = set()
    for i in range(len(size) - 1):
        tau = begins()
        if ready[i + 1] < tau[i] + cost.of(size[i]) and (
            ready[i + 1] < tau[i] or ready[i + 1] - tau[i] < cost.start_s
        ):
            size[i + 1] += size[i]
            size[i] = 0.0
            merged.add(i)
    return tuple(i + 1 for i in range(len(size)) if i not in merged)


@pytest.mark.parametrize("halves", [False, True])
def test_buckets_finish_as_early_as_the_best_of_all_partitions(halves):
    counts = set()
    for seed in range(100):
        gradients, reduce, second = drawn(seed)
        gather = second if halves else None
        plan = merge(gradients, reduce, gather)
        best = min(simulated_finish(gradients, stops, reduce, gather) for stops in partitions(LAYERS))
        assert plan.finish_s == pytest.approx(best, rel=1e-12), seed
        assert [name for bucket in plan.buckets for name in bucket.parameters] == [
            gradient.parameter for gradient in gradients
        ]
        counts.add(len(plan.buckets))
    assert len(counts) >= 5  # the cases are not all of one kind


def test_the_published_rule_is_never_better_and_sometimes_worse():
    ratios = []
    for seed in range(100):
        gradients, cost, _ = drawn(seed)
        published = simulated_finish(gradients, greedy(gradients, cost), cost, None)
        ratios.append(published / merge(gradients, cost).finish_s)
    assert min(ratios) >= 1.0 - 1e-12
    assert 1 <= sum(ratio > 1.0 + 1e-9 for ratio in ratios) <= 50


def test_a_schedule_is_the_one_that_an_op_by_op_simulation_finds():
    for seed in range(20):
        gradients, reduce, gather = drawn(seed)
        for stops in partitions(LAYERS)[:: seed + 1]:
            for second in (None, gather):
                found = schedule(gradients, stops, reduce, second).finish_s
                assert found == pytest.approx(simulated_finish(gradients, stops, reduce, second), rel=1e-12)


def resnet(backward_s: float = 0.2) -> list[Gradient]:
    """161 tensors of about ResNet-50's sizes, the last stage's first; backward and forward in proportion."""
    sizes = [size / 4 for size, tensors in reversed(RESNET_STAGES) for _ in range(tensors)]
    n = len(sizes)
    return [
        Gradient(f"w{n - 1 - i}", sizes[i], backward_s * (i + 1) / n, backward_s / 2 / n) for i in range(n)
    ]


def test_a_wide_area_link_gets_one_message_and_a_local_one_several():
    quick = resnet(backward_s=0.04)  # backward is shorter than the start of a message
    slow, fast = merge(quick, WAN), merge(quick, LAN)
    assert len(slow.buckets) == 1
    assert 2 <= len(fast.buckets) < len(quick)
    each = tuple(range(1, len(quick) + 1))
    assert fast.finish_s < schedule(quick, each, LAN).finish_s
    assert fast.finish_s < schedule(quick, each[-1:], LAN).finish_s


def test_a_long_backward_over_a_wide_area_link_is_worth_one_early_message():
    gradients = resnet()
    plan = merge(gradients, WAN)
    fused = schedule(gradients, (len(gradients),), WAN).finish_s
    assert greedy(gradients, WAN) == (len(gradients),)
    assert len(plan.buckets) == 2
    assert 0.97 * fused < plan.finish_s < fused


def test_two_halves_hide_the_second_one_behind_the_next_forward():
    gradients = resnet()
    cost, half = ExchangeCost(2e-3, 8 / 1e9), ExchangeCost(1e-3, 4 / 1e9)
    whole, split = merge(gradients, cost), merge(gradients, half, half)
    assert split.finish_s < whole.finish_s - 0.05
    gathers = [bucket.gather_s for bucket in reversed(split.buckets)]
    assert gathers[0][0] == split.buckets[-1].reduce_s[1]  # gathered first: what forward needs first
    assert all(a[1] == b[0] for a, b in pairwise(gathers))


def test_what_cannot_be_scheduled_is_refused():
    assert merge([], WAN).buckets == ()
    late, early = Gradient("b", 1.0, 2.0), Gradient("a", 1.0, 1.0)
    with pytest.raises(UsageError, match="ascend"):
        merge([late, early], WAN)
    with pytest.raises(UsageError, match="ascend to 2"):
        schedule([early, late], (1,), WAN)
