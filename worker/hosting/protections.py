"""Protections that are on for the process that computes, in words."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from worker.hosting.control_group import memory_groups
from worker.hosting.limits import LOOK_EVERY_S
from worker.hosting.sandbox import probe


@dataclass(frozen=True, slots=True)
class Protections:
    """What stands between a stranger's graph and this machine."""

    split: bool  # computing has a process without key and sockets
    no_sandbox: str  # why there is no sandbox; "" where there is one
    no_group: str  # why no control group bounds its memory; "" where one does
    data_limit: bool  # RLIMIT_DATA bounds it too

    @property
    def memory(self) -> str:
        """By what means memory is bounded."""
        if not self.no_group:
            return "control group"
        look = f"watchdog, every {LOOK_EVERY_S:g} s"
        return f"RLIMIT_DATA and {look}" if self.data_limit else look

    def words(self) -> list[tuple[str, bool, str]]:
        """Return for each protection: its name, whether it is on in full, and what is so."""
        if not self.split:
            return [("process", False, "computing runs in the process that holds the key and the sockets")]
        found = [("process", True, "computing has a process of its own, without key and sockets")]
        if self.no_sandbox:
            found.append(("sandbox", False, f"none: {self.no_sandbox}"))
        else:
            found.append(("sandbox", True, "bubblewrap: no network, read-only system, nobody's files"))
        bound = f"what a job adds is bounded by {self.memory}"
        if self.no_group:
            bound += f" ({self.no_group})"
        found.append(("memory bound", not self.no_group, bound))
        return found

    def line(self) -> str:
        """One line for a log: "own process, bubblewrap, memory by control group"."""
        if not self.split:
            return "none: computing in this process"
        sandbox = f"no sandbox ({self.no_sandbox})" if self.no_sandbox else "bubblewrap"
        return f"own process, {sandbox}, memory by {self.memory}"


def protections(device: str, *, split: bool = True) -> Protections:
    """Find what is on here for a worker that lends a ``device`` (cpu | cuda)."""
    linux = sys.platform.startswith("linux")
    return Protections(split, probe().why_not, memory_groups(), linux and device == "cpu")
