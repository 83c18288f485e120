"""How many CPU cores this process may use at once: its affinity, and what cgroups allow.

Cgroups of version 1 (``cpu.cfs_quota_us``) and 2 (``cpu.max``), from the process's own group up: the
tightest of them counts. A container sees its own group as the root.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def usable_cores(own: Path = OWN, groups: Path = GROUPS) -> float:
    """At least 0.01; a share of one core where a quota says so."""
    try:
        most = float(len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):  # not on every system
        most = float(os.cpu_count() or 1)
    return max(0.01, min([most, *map(_quota, _folders(own, groups))]))


def _folders(own: Path, groups: Path) -> Iterator[Path]:
    """Of this process's cpu groups and all above them."""
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / "cpu" if controllers else groups
        folder = root / path.strip("/")
        while folder != root:
            yield folder
            folder = folder.parent
        yield root


def _quota(folder: Path) -> float:
    """Cores that a group may use; inf without a limit."""
    for name, other in (("cpu.max", ""), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = (folder / name).read_text(encoding="ascii").split()
            words += (folder / other).read_text(encoding="ascii").split() if other else []
            quota, period = float(words[0]), float(words[1])
        except (OSError, ValueError, IndexError):
            continue  # "max" too: not limited
        if quota > 0 and period > 0:
            return quota / period
    return math.inf
