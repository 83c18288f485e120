"""Bound of the memory that a job adds to the process that computes it.

What the process holds when it is idle and ready (torch alone takes some hundred MB) is its baseline; a
job may add so many bytes. Three means, the first two where they exist:

- A control group with a memory limit, of version 1 or 2: the kernel counts every page, shared and
  temporary files' too, and ends the process at the bound.
- RLIMIT_DATA, on a CPU only: one allocation far beyond the bound fails inside the process, as an error
  of its op. It counts addresses, not pages, hence its slack. Never RLIMIT_AS: CUDA maps addresses of
  any amount.
- A watchdog, every 0.1 s: the number of processes, and without a control group their resident size.
  Private pages and shared memory count (RssAnon, RssShmem), in every process that maps them, so that
  forked ones count twice what they have in common. Pages of files do not, nor files in memory that
  nobody maps, which a control group alone sees.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
from collections.abc import Callable

import psutil

from worker.hosting import TUNED
from worker.hosting.contained.control_group import SYSTEM_SHORT, ControlGroup

MOST_PROCESSES = 256
MOST_TEXT_BYTES = 64 << 10  # of a file of /proc
OOM_SCORE = 1000  # short of memory, the system ends a guest's computing before anything else


def descendants(root: int) -> list[int]:
    """Return the processes below ``root`` that live, parents first; at most ``MOST_PROCESSES`` + 1."""
    found: list[int] = []
    waiting = [root]
    while waiting and len(found) <= MOST_PROCESSES:
        children = _children(waiting.pop(0))
        found += children
        waiting += children
    return found[: MOST_PROCESSES + 1]


def computed_s(root: int) -> float:
    """Return the CPU seconds of all processes below ``root``."""
    total = 0.0
    for pid in descendants(root):
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def _children(process: int) -> list[int]:
    tasks = f"/proc/{process}/task"
    try:
        numbers = os.listdir(tasks)
        if os.path.exists(f"{tasks}/{numbers[0]}/children"):
            return [int(child) for n in numbers for child in _text(f"{tasks}/{n}/children").split()]
    except (OSError, IndexError):
        return []
    with contextlib.suppress(psutil.Error):  # a kernel without that file, or another system
        return [child.pid for child in psutil.Process(process).children()]
    return []


def resident_bytes(processes: list[int]) -> int:
    """Return the memory that processes hold: private pages and shared memory, no pages of files."""
    return sum(map(_resident, processes))


def restart_peaks(processes: list[int]) -> None:
    """Have the kernel count the most that processes hold from now on."""
    for process in processes:
        with contextlib.suppress(OSError), open(f"/proc/{process}/clear_refs", "w") as file:
            file.write("5")


def _sum_of(processes: list[int], name: str) -> int:
    """Bytes of a size in /proc/PID/status, of all of them together."""
    return sum(_status(process).get(name, 0) for process in processes)


def _resident(process: int) -> int:
    fields = _status(process)
    if "RssAnon" in fields:
        return fields["RssAnon"] + fields.get("RssShmem", 0)
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(process).memory_info().rss)
    return 0


def _status(process: int) -> dict[str, int]:
    """Sizes in /proc/PID/status, bytes by name."""
    found = {}
    for line in _text(f"/proc/{process}/status").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def _text(path: str) -> str:
    """Content of a small file of /proc, "" where it is gone; a third of what ``Path.read_text`` takes."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(opened, MOST_TEXT_BYTES).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(opened)


class MemoryBound:
    """Bound on a running process and all below it, until ``close``."""

    def __init__(
        self, root: int, added_bytes: int, shared_bytes: int, device: str, over: Callable[[str, bool], None]
    ) -> None:
        """``root``: the process above those that are bounded, itself not. ``added_bytes``: at least 0;
        ``shared_bytes``: of memory that they share with us, once. ``over`` is called, in a thread,
        when the watchdog finds too much: the reason, and True if that is memory."""
        self._root, self._over = root, over
        members = descendants(root)
        self.baseline_bytes, self._rest_bytes = resident_bytes(members), _sum_of(members, "VmRSS")
        self.added_bytes = added_bytes
        self._peak_bytes = 0  # as last looked at
        more = added_bytes + shared_bytes + TUNED.slack_bytes
        self._most_bytes = self.baseline_bytes + more
        found = ControlGroup.create()
        self.group = found if isinstance(found, ControlGroup) else None
        if self.group is not None and not self.group.take(lambda: descendants(root), more):
            self.group.remove()
            self.group = None
        if device == "cpu":
            _limit_data(members, more)
        restart_peaks(members)
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._look, name="atoll-memory-watchdog", daemon=True)
        self._watch.start()

    @property
    def peak_bytes(self) -> int:
        """The most that they have held beyond rest since ``restart_peak``, by the kernel's own counts.

        A control group counts written files as well, which the kernel takes back when memory is short; a
        process's high-water mark counts pages of libraries. What was needed is at most the less of the two.
        """
        members = descendants(self._root)
        marks = [_sum_of(members, "VmHWM") - self._rest_bytes]
        if self.group is not None:
            marks.append(self.group.peak_bytes)
        if found := [mark for mark in marks if mark > 0]:
            self._peak_bytes = max(self._peak_bytes, min(found))
        return self._peak_bytes

    def restart_peak(self) -> None:
        """Begin to count anew: another stage is loaded."""
        self._peak_bytes = 0
        restart_peaks(descendants(self._root))
        if self.group is not None:
            self.group.restart_peak()

    @property
    def killed_bytes(self) -> int:
        """Bytes beyond rest at which they were ended for want of memory, by the kernel or the watchdog: the
        bound, or where the system itself was short what they were last seen to hold."""
        short = self.group is not None and self.breach() == SYSTEM_SHORT
        return max(1, self._peak_bytes if short else self.added_bytes)

    def breach(self) -> str:
        """Return why the kernel ended one of them for want of memory, by its own count; "" if it did not.
        Asked after they ended and before ``close``."""
        return self.group.shortage(_mib(self.added_bytes)) if self.group is not None else ""

    def close(self) -> None:
        """Stop watching, remove the group; the processes are gone. Any number of times."""
        self._closed.set()
        if self.group is not None:
            self.group.remove()

    def _look(self) -> None:
        while not self._closed.wait(TUNED.memory_look_s):
            members = descendants(self._root)
            if not members:
                return None
            if len(members) > MOST_PROCESSES:
                return self._over(f"it had more than {MOST_PROCESSES} processes", False)
            if not psutil.LINUX:
                self._peak_bytes = max(self._peak_bytes, resident_bytes(members) - self.baseline_bytes)
            if cause := self._passed(members):
                return self._over(cause, True)

    def _passed(self, members: list[int]) -> str:
        if self.group is not None:
            return self.breach()  # the kernel ended one process; the others shall not go on without it
        used_bytes = resident_bytes(members)
        if used_bytes <= self._most_bytes:
            return ""
        added, allowed = _mib(used_bytes - self.baseline_bytes), _mib(self.added_bytes)
        return f"its memory bound: {added} more than at rest, {allowed} allowed (watchdog)"


def _limit_data(processes: list[int], more: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    for process in processes:
        most = _status(process).get("VmData", 0) + 2 * more + TUNED.data_slack_bytes
        with contextlib.suppress(OSError, ValueError):  # it ended, or has a lower limit already
            resource.prlimit(process, resource.RLIMIT_DATA, (most, most))


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
