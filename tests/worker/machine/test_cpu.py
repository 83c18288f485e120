"""Cores that a process may use, as cgroups of either version tell it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from worker.machine import cpu
from worker.machine.cpu import CpuMeter, Usable, beside_computing, usable

ALL = Usable(float(len(os.sched_getaffinity(0))))


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def found(tmp_path: Path, own: str) -> Usable:
    (tmp_path / "own").write_text(own)
    return usable(tmp_path / "own", tmp_path / "groups")


def test_without_limits_it_is_the_affinity(tmp_path: Path) -> None:
    assert usable(tmp_path / "none", tmp_path / "nowhere") == ALL
    group(tmp_path / "groups" / "a", cpu__max="max 100000")
    assert found(tmp_path, "0::/a\n") == ALL


def test_version_2_and_the_tightest_group_above(tmp_path: Path) -> None:
    group(tmp_path / "groups" / "a", cpu__max="25000 100000")
    group(tmp_path / "groups" / "a" / "b", cpu__max="50000 100000")
    assert found(tmp_path, "0::/a/b\n") == Usable(0.25, 0.1)
    group(tmp_path / "groups" / "a" / "b", cpu__max="100 10000")
    assert found(tmp_path, "0::/a/b\n") == Usable(0.01, 0.01)


def test_version_1_in_a_group_of_its_own_and_in_a_container(tmp_path: Path) -> None:
    cpu = tmp_path / "groups" / "cpu"
    group(cpu, cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    group(cpu / "host", cpu__cfs_quota_us="1000", cpu__cfs_period_us="8000")
    assert found(tmp_path, "7:memory:/x\n3:cpu,cpuacct:/host\n") == Usable(0.125, 0.008)
    group(cpu, cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert found(tmp_path, "3:cpu,cpuacct:/docker/elsewhere\n") == Usable(0.5, 0.1)


@pytest.mark.parametrize("text", ["", "0 0", "x y", "100000", "-5 100000", "0 100000"])
def test_what_makes_no_sense_limits_nothing(tmp_path: Path, text: str) -> None:
    group(tmp_path / "groups" / "a", cpu__max=text)
    assert found(tmp_path, "0::/a\n") == ALL


def test_a_line_without_colons_is_passed_over(tmp_path: Path) -> None:
    assert found(tmp_path, "nonsense\n") == ALL


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
