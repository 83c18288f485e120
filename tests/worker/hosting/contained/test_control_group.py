"""Where a control group is made, and why not elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from worker.hosting.contained.control_group import ControlGroup, _place, memory_groups


def tree(folder: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A process's list of groups, and the groups' files."""
    (folder / "own").write_text(own)
    for name, text in files.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "own", folder / "groups"


SERVICE = {
    "cgroup.controllers": "cpu memory pids",
    "app.slice/cgroup.subtree_control": "memory pids",
    "app.slice/atoll.service/cpu.max": "max 100000",
    "app.slice/atoll.service/memory.max": "max",
    "app.slice/atoll.service/cpuset.cpus": "\n",
}


def test_in_version_1_it_is_below_ours_in_the_memory_hierarchy_alone(tmp_path: Path) -> None:
    files = {"memory/hosts/a/cgroup.procs": "", "cpu/quota/a/cpu.cfs_quota_us": "50000"}
    own, groups = tree(tmp_path, "4:memory:/hosts/a\n2:cpu,cpuacct:/quota/a\n0::/\n", files)
    ours = groups / "memory" / "hosts" / "a"
    assert _place(own, groups) == (ours, ours, 1)


def test_in_a_container_of_version_1_ours_is_what_it_sees_as_the_root(tmp_path: Path) -> None:
    own, groups = tree(tmp_path, "4:memory:/docker/12ab\n", {"memory/cgroup.procs": ""})
    assert _place(own, groups) == (groups / "memory", groups / "memory", 1)


def test_in_version_2_it_is_beside_ours(tmp_path: Path) -> None:
    own, groups = tree(tmp_path, "0::/app.slice/atoll.service\n", SERVICE)
    assert _place(own, groups) == (groups / "app.slice", groups / "app.slice" / "atoll.service", 2)


@pytest.mark.parametrize(
    ("changed", "why_not"),
    [
        ({"app.slice/atoll.service/cpu.max": "50000 100000"}, "limit that would be lost (cpu.max)"),
        ({"app.slice/atoll.service/memory.max": "1073741824"}, "limit that would be lost (memory.max)"),
        ({"app.slice/atoll.service/cpuset.cpus": "0-1"}, "limit that would be lost (cpuset.cpus)"),
        ({"app.slice/cgroup.subtree_control": "pids"}, "no memory limits beside"),
    ],
)
def test_in_version_2_nothing_that_ours_has_is_given_up(
    tmp_path: Path, changed: dict[str, str], why_not: str
) -> None:
    own, groups = tree(tmp_path, "0::/app.slice/atoll.service\n", SERVICE | changed)
    assert why_not in str(_place(own, groups))


@pytest.mark.parametrize(
    ("own", "files", "why_not"),
    [
        ("", {"x": ""}, "no memory control groups"),
        ("0::/\n", {"x": ""}, "no memory control groups"),
        ("0::/\n", {"cgroup.controllers": "memory"}, "the root of the control groups"),
        ("0::/elsewhere\n", {"cgroup.controllers": "memory"}, "the root of the control groups"),
        ("4:memory:/a\n", {"memory/a/tasks": ""}, "may not make control groups"),
        ("4:memory:/a\n", {"memory/a/cgroup.procs": ""}, "have no memory limits"),
    ],
)
def test_why_there_is_none_is_said(tmp_path: Path, own: str, files: dict[str, str], why_not: str) -> None:
    found = memory_groups(*tree(tmp_path, own, files))
    assert why_not in found
    assert list(tmp_path.rglob("atoll-*")) == []


def test_groups_of_workers_that_were_killed_are_removed_and_others_stay(tmp_path: Path) -> None:
    own, groups = tree(tmp_path, "4:memory:/\n", {"memory/cgroup.procs": ""})
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        ended.wait()
    for name in (f"atoll-{ended.pid}-1", "atoll-1-1", "other"):
        (groups / "memory" / name).mkdir()
    ControlGroup.create(own, groups)
    assert {path.name for path in (groups / "memory").iterdir()} == {"cgroup.procs", "atoll-1-1", "other"}


def test_a_group_that_takes_nobody_is_as_if_it_had_not_been() -> None:
    made = ControlGroup.create()
    if isinstance(made, str):
        pytest.skip(f"no control group: {made}")
    assert not made.take(lambda: [], 1 << 20)
    made.remove()
    made.remove()
    assert not made.folder.exists()
