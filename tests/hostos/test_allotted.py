"""Cores and memory that a process may use, as control groups of either version tell it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from atoll.errors import UsageError
from hostos import allotted
from hostos.allotted import Room, Usable, check_threads, memory_room, threads_each, usable

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


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(2.0, 64, 1), (64.0, 2, 32), (1.5, 1, 2), (0.25, 1, 1)]
)
def test_processes_of_one_command_share_the_cores_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch, cores: float, processes: int, threads: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(allotted, "usable", lambda: Usable(cores))
    assert threads_each(processes) == threads


def room(tmp_path: Path, own: str) -> Room | None:
    (tmp_path / "own").write_text(own)
    return memory_room(tmp_path / "own", tmp_path / "groups")


def test_memory_of_a_service_has_the_limit_of_its_own_group_and_not_of_the_root(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    group(groups, memory__stat="inactive_file 5")  # a root has no limit and no count
    group(groups / "a.slice", memory__max="max", memory__current="900")
    service = groups / "a.slice" / "b.service"
    group(service, memory__max="1000", memory__current="700", memory__stat="anon 400\ninactive_file 200")
    assert room(tmp_path, "0::/a.slice/b.service\n") == Room(1000, 500)
    group(groups / "a.slice", memory__max="800", memory__current="750", memory__stat="inactive_file 0")
    assert room(tmp_path, "0::/a.slice/b.service\n") == Room(800, 50)


def test_what_halts_a_process_is_a_limit_as_well(tmp_path: Path) -> None:
    group(tmp_path / "groups" / "a", memory__max="1000", memory__high="600", memory__current="650")
    assert room(tmp_path, "0::/a\n") == Room(600, 0)


def test_memory_of_version_1_in_a_group_of_its_own_and_in_a_container(tmp_path: Path) -> None:
    memory = tmp_path / "groups" / "memory"
    group(memory, memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="5000")
    assert room(tmp_path, "4:memory:/job_7\n2:cpu:/x\n0::/\n") is None
    files = "cache 300\ninactive_file 1\ntotal_inactive_file 250"
    group(memory / "job_7", memory__limit_in_bytes="1000", memory__usage_in_bytes="900", memory__stat=files)
    assert room(tmp_path, "4:memory:/job_7\n2:cpu:/x\n0::/\n") == Room(1000, 350)
    group(memory, memory__limit_in_bytes="2000", memory__usage_in_bytes="500")
    assert room(tmp_path, "4:memory:/docker/elsewhere\n") == Room(2000, 1500)


def test_a_process_whose_groups_cannot_be_seen_has_no_limit(tmp_path: Path) -> None:
    group(tmp_path / "groups" / "a", memory__max="max", memory__high="nonsense", memory__current="7")
    for own in ("", "nonsense\n", "0::/a\n", "0::/../..\n"):
        assert room(tmp_path, own) is None
    assert memory_room(tmp_path / "none", tmp_path / "nowhere") is None


def test_a_process_that_can_start_too_few_threads_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    check_threads(8)
    real, started = threading.Thread.start, list[threading.Thread]()

    def start(thread: threading.Thread) -> None:
        if len(started) == 5:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(UsageError, match=r"can start 5 .* at least 8: raise the limit of processes"):
        check_threads(8)
    assert threading.active_count() == before
