"""What a worker takes of the memory that its owner lets it take as a whole, and what is left for a stage.

On a CPU the daemon, the idle process that computes and a reserve are the worker's own; on a GPU the context.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil

from atoll.errors import UsageError
from hostos.units import shown_size

if TYPE_CHECKING:
    from worker.config import WorkerConfig

RESERVE_BYTES = 96 << 20
"""Beside what is held before it joins: 32 MiB for page tables, stacks and heap edges of the process that
computes, the rest for what the daemon grows by as it joins and its queues fill (45 MiB were seen)."""
LEAST_STAGE_BYTES = 16 << 20  # less holds no stage


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """``stage_bytes``: the most that a job may add; ``planned_bytes``: that a plan counts on."""

    own_bytes: int
    stage_bytes: int
    planned_bytes: int
    limited: bool = False  # by its owner

    def __str__(self) -> str:
        own, stage = shown_size(self.own_bytes), shown_size(self.stage_bytes)
        whole = shown_size(self.own_bytes + self.stage_bytes)
        planned = shown_size(self.planned_bytes)
        less = f", of which plans count on {planned}" if self.planned_bytes < self.stage_bytes else ""
        return f"{whole}, of it {own} for Atoll itself, {stage} for a stage{less}"

    def times(self, count: int) -> MemoryShare:
        """Return the share of ``count`` processes that have as much each."""
        own, stage, planned = self.own_bytes, self.stage_bytes, self.planned_bytes
        return MemoryShare(count * own, count * stage, count * planned, self.limited)

    def checked(self, option: str = "--memory") -> MemoryShare:
        """Return the same. UsageError where what its owner lets it take leaves nothing for a stage."""
        if self.limited and self.stage_bytes < LEAST_STAGE_BYTES:
            whole, own = shown_size(self.own_bytes + self.stage_bytes), shown_size(self.own_bytes)
            least = shown_size(self.own_bytes + LEAST_STAGE_BYTES)
            raise UsageError(
                f"{option} of {whole} is for the whole worker, and Atoll itself takes {own} here; "
                f"give at least {least}, better that and what a stage is to have"
            )
        return self


def memory_share(config: WorkerConfig, kind: str, found_bytes: int, own_bytes: int) -> MemoryShare:
    """Return how the memory of one device is shared. ``found_bytes``: for a stage where no limit is given;
    ``own_bytes``: of the device's memory that the worker takes itself. Where less is lent, the rest is
    negative: see ``MemoryShare.checked``."""
    whole = config.memory_bytes
    if kind != "cpu":
        whole = config.gpu_memory_bytes or whole
    stage = whole - own_bytes if whole else found_bytes
    planned = min(stage, config.stage_bytes) if config.stage_bytes else stage
    return MemoryShare(own_bytes, stage, planned, limited=whole > 0)


def main_share(config: WorkerConfig, device: MemoryShare, own_bytes: int) -> MemoryShare:
    """Return how main memory is shared beside a GPU's: by a limit of its own, else a job may add as much of
    it as of the GPU's. ``own_bytes``: of main memory that the worker takes itself."""
    if not (config.memory_bytes and config.gpu_memory_bytes):
        return MemoryShare(own_bytes, device.stage_bytes, device.stage_bytes)
    main = replace(config, gpu_memory_bytes=0, stage_bytes=0)
    return memory_share(main, "cpu", device.stage_bytes, own_bytes)


def held_bytes() -> int:
    """Return the memory that this process holds: private pages and shared memory, no pages of files."""
    try:
        with open("/proc/self/status") as file:
            sizes = dict(line.split(":", 1) for line in file)
        return sum(int(sizes[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    except (OSError, KeyError, ValueError):
        return int(psutil.Process().memory_info().rss)
