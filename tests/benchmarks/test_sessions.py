"""Arithmetic of the session benchmark."""

from __future__ import annotations

import math

import pytest

from benchmarks.sessions import Usage, bytes_a_session, cpu_share, latency_ms, percentile, shared_out


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        (range(1, 101), 0.99, 99),
        (range(1, 101), 1.0, 100),
        (range(100, 0, -1), 0.5, 50),
        ([7.0], 0.99, 7.0),
        ([1.0, 2.0], 0.5, 1.0),
    ],
)
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(
    values: list[float], share: float, expected: float
) -> None:
    assert percentile(values, share) == expected


def test_a_latency_is_in_milliseconds_and_unknown_without_samples() -> None:
    assert latency_ms([0.001, 0.003, 0.002]) == {"median": 2.0, "p99": 3.0, "samples": 3}
    nothing = latency_ms([])
    assert nothing["samples"] == 0
    assert math.isnan(nothing["median"])
    assert math.isnan(nothing["p99"])


@pytest.mark.parametrize(("workers", "processes"), [(1000, 4), (10, 3), (2, 4), (1, 1)])
def test_workers_are_shared_out_evenly_and_all_of_them(workers: int, processes: int) -> None:
    parts = shared_out(workers, processes)
    assert [number for first, count in parts for number in range(first, first + count)] == list(
        range(workers)
    )
    counts = [count for _, count in parts]
    assert len(parts) == min(workers, processes)
    assert max(counts) - min(counts) <= 1


def test_what_a_session_costs() -> None:
    before, after = Usage(100_000_000, 3.0, 10.0), Usage(150_000_000, 5.0, 14.0)
    assert bytes_a_session(before, after, 1000) == 50_000
    assert bytes_a_session(before, after, 0) == 0
    assert cpu_share(before, after) == 0.5
