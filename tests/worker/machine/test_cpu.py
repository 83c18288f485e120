"""How long the cores of a process are at work, with what."""

from __future__ import annotations

import time

import pytest

from hostos.allotted import Usable
from worker.machine import cpu
from worker.machine.cpu import CpuMeter, beside_computing


def test_what_a_process_takes_at_rest_is_no_steps_work() -> None:
    now, used = [0.0], [0.0]
    meter = CpuMeter(0.5, 1, lambda: now[0], lambda: used[0])

    def later(seconds: float, cpu_s: float) -> None:
        now[0] += seconds
        used[0] += cpu_s

    for seconds, cpu_s in ((10.0, 2.0), (10.0, 0.1), (0.5, 0.0)):  # others measure; rest; too short to tell
        with meter.resting():
            later(seconds, cpu_s)
    assert meter.beside_s() == 0.0
    later(4.0, 1.04)
    assert meter.beside_s() == pytest.approx(2.0)
    later(4.0, 0.01)
    assert meter.beside_s() == 0.0
    later(4.0, 3.0)
    meter.forget()
    assert meter.beside_s() == 0.0


@pytest.mark.parametrize(
    ("cores", "threads", "thread_cpu_s", "expected_s"),
    [
        (0.25, 1, 0.2, 0.8),  # 1 s by the clock: other threads had a fifth of the part
        (0.25, 1, 0.5, 2.0),  # what a quota lent does not last
        (0.25, 2, 0.2, 1.0),  # its threads beside it are not on this one's clock
        (1.0, 1, 0.2, 1.0),  # other processes took the rest: that is how fast this machine is
    ],
)
def test_computing_on_a_part_of_a_core_is_told_without_other_threads(
    cores: float, threads: int, thread_cpu_s: float, expected_s: float
) -> None:
    now, used = iter([5.0, 6.0]), iter([2.0, 2.0 + thread_cpu_s])
    meter = CpuMeter(cores, threads, now.__next__, thread_clock=used.__next__)
    with meter.computing() as taken:
        assert taken.seconds == 0.0
    assert taken.seconds == pytest.approx(expected_s)


def test_rests_between_ops_are_time_that_computing_takes_and_no_work_beside_it() -> None:
    now, used, thread = [0.0], [0.0], [0.0]
    meter = CpuMeter(0.5, 1, lambda: now[0], lambda: used[0], lambda: thread[0])
    meter.beside_s()
    with meter.computing() as taken:
        thread[0] += 1.0
        used[0] += 1.2
        now[0] += 6.0
        meter.rested_s += 4.0
    assert taken.seconds == pytest.approx(1.0 / 0.5 + 4.0)
    assert meter.beside_s() == pytest.approx(0.2 / 0.5)


@pytest.mark.parametrize(("cores", "least_s"), [(0.25, 0.2), (1.0, 0.0), (2.0, 0.0)])
def test_what_a_process_takes_beside_one_that_computes_counts_where_they_share_a_part_of_a_core(
    monkeypatch: pytest.MonkeyPatch, cores: float, least_s: float
) -> None:
    monkeypatch.setattr(cpu, "usable", lambda: Usable(cores))
    beside_s = beside_computing()
    assert beside_s() == 0.0
    ends_s = time.process_time() + 0.05
    while time.process_time() < ends_s:
        pass
    found_s = beside_s()
    assert found_s >= least_s
    assert (found_s > 0.0) == (cores < 1.0)
