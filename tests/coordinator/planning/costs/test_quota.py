"""Work under a quota of CPU time: the model of ``Quota.burst_s`` against a clock that counts periods."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from coordinator.planning.costs.lower_bound import lower_bound
from coordinator.planning.costs.quota import Quota
from coordinator.planning.costs.timeline import simulate
from tests.coordinator.planning.costs.test_timeline import chain_work, random_work


class Kernel:
    """A thread under a quota, as the kernel counts: ``cores`` of every period at full speed, then it is
    stopped until the next. Seconds."""

    def __init__(self, cores: float, period_s: float, now_s: float) -> None:
        self.now_s, self._cores, self._period_s = now_s, cores, period_s
        self._period = int(now_s / period_s)
        self._left_s = cores * period_s

    def rest(self, seconds: float) -> None:
        self.now_s += seconds

    def work(self, cpu_s: float) -> float:
        """When ``cpu_s`` of CPU time are used."""
        while cpu_s > 1e-12:
            if int(self.now_s / self._period_s + 1e-9) > self._period:
                self._period = int(self.now_s / self._period_s + 1e-9)
                self._left_s = self._cores * self._period_s
            ends_s = (self._period + 1) * self._period_s
            runs_s = min(cpu_s, self._left_s, ends_s - self.now_s)
            self.now_s += runs_s
            self._left_s -= runs_s
            cpu_s -= runs_s
            if cpu_s > 1e-12 and self._left_s <= 1e-12:
                self.now_s = ends_s
        return self.now_s


@pytest.mark.parametrize("cores", [0.125, 0.35, 0.6])
@pytest.mark.parametrize(
    ("actions_s", "rest_s", "within_s"),  # in periods; actions as long as they last without a rest before
    [
        (12.0, 0.0, 0.01),
        (12.0, 0.2, 0.01),
        (12.0, 0.4, 0.01),
        (12.0, 3.0, 0.01),
        (30.0, 1.5, 0.01),
        (0.5, 4.0, 0.01),
        (1.0, 4.0, 0.2),  # sometimes its part is enough, sometimes it waits for another
    ],
)
def test_what_a_rest_lends_is_what_the_kernels_counting_gives(
    cores: float, actions_s: float, rest_s: float, within_s: float
) -> None:
    period_s, draw = 0.1, random.Random(0)
    part = Quota(cores, period_s)
    took_s, usual_s = [], []
    for _ in range(300):
        # No two of a size: a multiple of the part would always end with a period.
        lasts_s = [period_s * actions_s * draw.uniform(0.8, 1.2) for _ in range(8)]
        quota = Kernel(cores, period_s, draw.uniform(0.0, period_s))
        quota.work(cores * lasts_s[0])
        begun_s, foretold_s = quota.now_s, 0.0
        for seconds in lasts_s[1:]:
            rested_s = period_s * (rest_s if rest_s < 1 else draw.uniform(rest_s - 0.5, rest_s + 0.5))
            quota.rest(rested_s)
            quota.work(cores * seconds)
            foretold_s += rested_s + seconds - part.burst_s(seconds, rested_s)
        took_s.append(quota.now_s - begun_s)
        usual_s.append(foretold_s)
    found_s, expected_s = statistics.mean(took_s), statistics.mean(usual_s)
    assert found_s == pytest.approx(expected_s, abs=7 * within_s * period_s)


def test_nothing_is_lent_without_a_quota_or_a_rest() -> None:
    part = Quota(0.25, 0.1)
    assert Quota(1.0, 0.1).burst_s(1.0) == 0.0
    assert part.burst_s(1.0, 0.0) == 0.0
    assert Quota(0.25).burst_s(1.0) == 0.0
    assert part.burst_s(1.0) == pytest.approx(0.075)
    assert part.burst_s(1.0, 0.01) == pytest.approx(0.01)
    assert part.soonest_s(0.04) == pytest.approx(0.01)  # at a whole core's speed


def test_only_what_follows_a_rest_ends_sooner() -> None:
    """Two stages of F = 1, B = 2: the first rests before its first backward, the second before its first
    forward, then both work on."""
    work = chain_work(2, 4)
    lending = replace(work, stages=tuple(replace(stage, quota=Quota(0.5, 0.2)) for stage in work.stages))
    assert simulate(work).step_s == pytest.approx(15.0)
    # GPipe: the second stage's forwards fill the first one's rest; 4 forwards, then backwards one by one.
    assert simulate(lending).step_s == pytest.approx(15.0 - 0.1 - 0.1)


def test_no_step_is_faster_than_the_lower_bound_under_quotas() -> None:
    sooner = 0
    for seed in range(120):
        draw, work = random.Random(seed), random_work(seed)
        quotas = [(draw.uniform(0.1, 1.0), draw.choice((0.0, 0.02, 0.1))) for _ in work.stages]
        lending = replace(
            work,
            stages=tuple(
                replace(stage, quota=Quota(cores, period_s))
                for stage, (cores, period_s) in zip(work.stages, quotas, strict=True)
            ),
        )
        step_s = simulate(lending).step_s
        assert step_s >= lower_bound(lending).step_s * (1 - 1e-9), f"seed {seed}"
        assert lower_bound(lending).step_s <= lower_bound(work).step_s
        sooner += step_s < simulate(work).step_s
    assert sooner > 60
