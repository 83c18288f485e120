"""Protections that are on for the process that computes, in words."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from worker.hosting import TUNED
from worker.hosting.contained.control_group import memory_groups
from worker.hosting.contained.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class Protection:
    """One of them: what is so, and what would make it better ("" where nothing needs to)."""

    name: str
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Protections:
    """What stands between a stranger's graph and this machine, beside the checks of its ops."""

    no_sandbox: str  # why there is no sandbox; "" where there is one
    sandbox_remedy: str
    no_group: str  # why no control group bounds the memory; "" where one does
    data_limit: bool  # RLIMIT_DATA bounds it too
    network: bool = False  # it reaches the hosts of its site

    @property
    def memory(self) -> str:
        """By what means memory is bounded."""
        if not self.no_group:
            return "control group"
        look = f"watchdog every {TUNED.memory_look_s:g} s"
        return f"RLIMIT_DATA and {look}" if self.data_limit else look

    def words(self) -> list[Protection]:
        """Return each of them, in words."""
        network = "the network of its site" if self.network else "no network"
        sandbox = f"bubblewrap: {network}, a read-only system, none of your files, no other process"
        why_not = f" ({self.no_group})" if self.no_group else ""
        return [
            Protection("process", "computing has a process of its own, without key and sockets"),
            Protection("sandbox", f"none: {self.no_sandbox}", self.sandbox_remedy)
            if self.no_sandbox
            else Protection("sandbox", sandbox),
            Protection("memory bound", f"of what a job adds, by {self.memory}{why_not}"),
        ]

    def line(self) -> str:
        """Return one line for a log: "own process, bubblewrap, memory by control group"."""
        sandbox = f"no sandbox ({self.no_sandbox})" if self.no_sandbox else "bubblewrap"
        sandbox += " with the site's network" if self.network and not self.no_sandbox else ""
        return f"own process, {sandbox}, memory by {self.memory}"


def protections(device: str, sandbox: Sandbox, *, network: bool = False) -> Protections:
    """Find what is on here for a worker that lends a ``device`` (cpu | cuda) within ``sandbox``; ``network``:
    as of ``View``."""
    data_limit = sys.platform.startswith("linux") and device == "cpu"
    return Protections(sandbox.why_not, sandbox.remedy, memory_groups(), data_limit, network)
