"""How the coordinator itself does: event loop, journal, disk and memory, over the last minute."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

KEPT_S = 60.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The worst of the last minute, seconds, and what there is now, bytes; 0: not known."""

    lag_s: float  # by which the event loop came late to what it had to do
    append_s: float  # one write of the journal, until it was on the disk
    disk_free_bytes: int
    memory_bytes: int  # resident, of the coordinator's process


@dataclass(slots=True)
class Worst:
    """The largest of the figures of the last minute, in memory that their number does not change much:
    one that a later one exceeds is forgotten."""

    _seen: deque[tuple[float, float]] = field(default_factory=deque)

    def note(self, value: float, now_s: float) -> None:
        """One more figure."""
        while self._seen and self._seen[-1][1] <= value:
            self._seen.pop()
        self._seen.append((now_s, value))

    def of(self, now_s: float) -> float:
        """The largest; 0 where there was none."""
        while self._seen and self._seen[0][0] < now_s - KEPT_S:
            self._seen.popleft()
        return self._seen[0][1] if self._seen else 0.0


@dataclass(slots=True)
class Health:
    """Takes figures in, and tells them; ``state_dir``: on whose disk the coordinator writes."""

    state_dir: Path
    clock: Callable[[], float]
    lag: Worst = field(default_factory=Worst)
    append: Worst = field(default_factory=Worst)

    def now(self) -> Figures:
        """The figures as they are."""
        now_s, free, memory = self.clock(), 0, 0
        with suppress(OSError):
            free = shutil.disk_usage(self.state_dir).free
        with suppress(psutil.Error):
            memory = int(psutil.Process().memory_info().rss)
        return Figures(self.lag.of(now_s), self.append.of(now_s), free, memory)
