"""A control group for one compute process, where this user may make one.

Version 1: below the group of this process in the memory hierarchy, which is apart from that of the CPU:
quotas stay as they are. Version 2 has one hierarchy, where a group with processes cannot have groups
with limits below it: the new one stands beside ours, if ours has no limit that it would lose.

Memory that a process held when it entered stays with its former group: the limit counts what comes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from worker.hosting import TUNED

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_NEARLY_BYTES = 4 << 20  # two large pages: what did not fit
_ROUNDS = 20  # of moving processes that start others meanwhile
_LOST = ("cpu.max", "cpuset.cpus", "memory.max", "memory.high", "memory.swap.max")  # by leaving our group
SYSTEM_SHORT = "this system ran short of memory"
_numbers = itertools.count(1)


class ControlGroup:
    """One group; its processes are those that ``take`` found."""

    def __init__(self, folder: Path, home: Path, version: int) -> None:
        """``home``: the group that its processes come from."""
        self.folder, self._home, self._version = folder, home, version
        self._lock = threading.Lock()
        self._removed = False

    @classmethod
    def create(cls, own: Path = OWN, groups: Path = GROUPS) -> ControlGroup | str:
        """Make an empty group; return why not in words where that cannot be."""
        place = _place(own, groups)
        if isinstance(place, str):
            return place
        parent, home, version = place
        if not (os.access(parent, os.W_OK) and os.access(parent / "cgroup.procs", os.W_OK)):
            return f"this user may not make control groups in {parent}"
        _sweep(parent)
        folder = parent / f"atoll-{os.getpid()}-{next(_numbers)}"
        try:
            folder.mkdir()
        except OSError as error:
            return f"no control group can be made in {parent}: {error.strerror}"
        made = cls(folder, home, version)
        if not (folder / made._limit_file).exists():
            made.remove()
            return f"control groups in {parent} have no memory limits"
        return made

    @property
    def _limit_file(self) -> str:
        return "memory.max" if self._version == 2 else "memory.limit_in_bytes"

    def take(self, members: Callable[[], list[int]], limit_bytes: int) -> bool:
        """Set the limit, then move all ``members`` in; False, and all is as before, when that fails."""
        inside: set[int] = set()
        try:
            self._write(self._limit_file, limit_bytes)
            # Swap counts as memory; kernels without swap accounting lack these files.
            for name, value in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", limit_bytes)):
                if (self.folder / name).exists():
                    self._write(name, value)
            if (self.folder / "memory.oom.group").exists():
                self._write("memory.oom.group", 1)
            for _ in range(_ROUNDS):
                new = [process for process in members() if process not in inside]
                if not new:
                    return bool(inside)
                for process in new:
                    inside.add(process)
                    with contextlib.suppress(ProcessLookupError):
                        self._write("cgroup.procs", process)
        except OSError:
            pass
        for process in inside:
            with contextlib.suppress(OSError):
                (self._home / "cgroup.procs").write_text(str(process))
        return False

    def shortage(self, allowed: str) -> str:
        """Return why the kernel ended a process of this group for want of memory, "" if it did not."""
        if self._version == 2:
            kills, full = self._count("memory.events", "oom_kill"), self._count("memory.events", "oom") > 0
        else:
            kills = self._count("memory.oom_control", "oom_kill")
            most, limit = self._count("memory.max_usage_in_bytes"), self._count("memory.limit_in_bytes")
            full = most > limit - _NEARLY_BYTES
        if not kills:
            return ""
        if not full:
            return SYSTEM_SHORT
        return f"its memory bound: {allowed} more than at rest allowed (control group)"

    @property
    def peak_bytes(self) -> int:
        """The most that it has held since ``restart_peak``; pages of files that were written count, too. 0
        where that is not known."""
        return self._count("memory.peak" if self._version == 2 else "memory.max_usage_in_bytes")

    def restart_peak(self) -> None:
        """Count the most that it holds from now on, where the kernel can (version 1)."""
        if self._version == 1:
            with contextlib.suppress(OSError):
                self._write("memory.max_usage_in_bytes", 0)

    def remove(self) -> None:
        """Remove the group once its processes have ended. Any number of times, any thread."""
        with self._lock:
            if self._removed:
                return
            self._removed = True
        until_s = time.monotonic() + TUNED.gone_within_s
        while not _removed(self.folder) and time.monotonic() < until_s:
            time.sleep(0.01)

    def _count(self, name: str, field: str = "") -> int:
        """A number in a file of the group: the line ``field`` of it, or all of it."""
        with contextlib.suppress(OSError):
            if match := re.search(rf"^{field} ?(\d+)$", (self.folder / name).read_text(), re.MULTILINE):
                return int(match[1])
        return 0

    def _write(self, name: str, value: int) -> None:
        (self.folder / name).write_text(str(value))


def memory_groups(own: Path = OWN, groups: Path = GROUPS) -> str:
    """Return why no memory limit by a control group can be had here, "" where it can."""
    made = ControlGroup.create(own, groups)
    if isinstance(made, str):
        return made
    made.remove()
    return ""


def _place(own: Path, groups: Path) -> tuple[Path, Path, int] | str:
    """The folder to make a group in, our own, and their version; or why there is none."""
    paths: dict[str, str] = {}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in own.read_text(encoding="ascii").splitlines():
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            paths |= {name: path.strip("/") for name in controllers.split(",")}
    if "memory" in paths:
        root = groups / "memory"
        folder = root / paths["memory"]
        folder = folder if folder.is_dir() else root  # a container sees its own as the root
        return folder, folder, 1
    if "" not in paths or not (groups / "cgroup.controllers").exists():
        return "this system has no memory control groups"
    folder = groups / paths[""]
    if folder == groups or not folder.is_dir():
        return "this process stands in the root of the control groups that it sees"
    for name in _LOST:
        with contextlib.suppress(OSError):
            if (folder / name).read_text().split()[:1] not in ([], ["max"]):
                return f"this process's own control group has a limit that would be lost ({name})"
    with contextlib.suppress(OSError):
        if "memory" in (folder.parent / "cgroup.subtree_control").read_text().split():
            return folder.parent, folder, 2
    return "there are no memory limits beside this process's control group"


def _sweep(parent: Path) -> None:
    """Remove empty groups of workers that were killed."""
    with contextlib.suppress(OSError):
        for folder in parent.glob("atoll-*-*"):
            if not Path("/proc", folder.name.split("-")[1]).exists():
                _removed(folder)


def _removed(folder: Path) -> bool:
    """Remove an empty group; False while processes are in it."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
