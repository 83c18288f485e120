"""Device speed: a CPU quota per host through cgroups.

The kernel lets a group run ``quota`` microseconds in every period and stops it for the rest.
The period is 4 ms: with 20 ms, a host at a quarter of a core ran a burst of 10 ms after idling
at almost full speed. Even so, compute spans to be compared with a model should be 40 ms or more.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from lab.tun import LabError

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 4_000
MIN_QUOTA_US = 1_000  # the kernel's own lower bound


def controller() -> Path | None:
    """Where groups with a CPU quota can be made: version 1's own tree, or version 2's."""
    for folder in (ROOT / "cpu", ROOT / "cpu,cpuacct"):
        if (folder / "cpu.cfs_quota_us").exists() or (folder / "cpu.shares").exists():
            return folder if os.access(folder, os.W_OK) else None
    listed = ROOT / "cgroup.controllers"
    if listed.exists() and "cpu" in listed.read_text(encoding="ascii").split():
        return ROOT if os.access(ROOT, os.W_OK) else None
    return None


def require_controller() -> Path:
    """``controller``, or a LabError that says what to do."""
    folder = controller()
    if folder is None:
        raise LabError(
            f"CPU quotas need a writable cgroup cpu controller under {ROOT} (version 1 or 2); "
            "run as root with cgroups mounted, or build the lab with quotas=False"
        )
    return folder


def is_version_2(folder: Path) -> bool:
    """Whether a controller's folder belongs to cgroup version 2."""
    return (folder / "cgroup.controllers").exists()


def make_group(name: str, cpu: float | None) -> Path:
    """Make a group limited to ``cpu`` cores (None: not limited)."""
    folder = require_controller()
    if is_version_2(folder):
        subtree = folder / "cgroup.subtree_control"
        if "cpu" not in subtree.read_text(encoding="ascii").split():
            subtree.write_text("+cpu", encoding="ascii")
    group = folder / name
    group.mkdir(exist_ok=True)
    set_quota(group, cpu)
    return group


def quota_us(cpu: float, period_us: int = PERIOD_US) -> tuple[int, int]:
    """(quota, period) for ``cpu`` cores; small shares get a longer period, as the quota must be >= 1 ms."""
    period = max(period_us, round(MIN_QUOTA_US / cpu))
    return round(cpu * period), period


def set_quota(group: Path, cpu: float | None) -> None:
    """Change a group's quota, live."""
    quota, period = (-1, PERIOD_US) if cpu is None else quota_us(cpu)
    if is_version_2(group):
        (group / "cpu.max").write_text(f"{'max' if quota < 0 else quota} {period}", encoding="ascii")
        return
    (group / "cpu.cfs_quota_us").write_text("-1", encoding="ascii")
    (group / "cpu.cfs_period_us").write_text(str(period), encoding="ascii")
    (group / "cpu.cfs_quota_us").write_text(str(quota), encoding="ascii")


def members(group: Path) -> set[int]:
    """Processes in a group."""
    try:
        return {int(line) for line in (group / "cgroup.procs").read_text(encoding="ascii").split()}
    except OSError:
        return set()


def remove_group(group: Path, patience_s: float = 60.0) -> None:
    """Kill what is left in a group and remove it; LabError when it does not go."""
    deadline_s = time.monotonic() + patience_s
    while group.exists():
        for pid in members(group):
            signal_if_alive(pid, signal.SIGKILL)
        try:
            group.rmdir()
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise LabError(
                    f"cannot remove {group}: {error.strerror}; processes {members(group)}"
                ) from error
            time.sleep(0.01)


def signal_if_alive(pid: int, number: int) -> None:
    """Send a signal; a process that has ended is no error."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
