"""How long the CPU cores of this process are at work, with what."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hostos.allotted import usable

REST_S = 1.0
"""A shorter rest does not tell what the process takes at rest."""


@dataclass(slots=True)
class Taken:
    """Seconds at work; set on exit."""

    seconds: float = 0.0


class CpuMeter:
    """CPU time of all threads, less what they take at rest: watching connections, heartbeats. Not
    thread-safe: one thread rests, loads and computes. ``threads`` is how many the computing itself
    keeps busy on these cores, 0 where it is done elsewhere."""

    def __init__(
        self,
        cores: float = math.inf,
        threads: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
        thread_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._cores, self._clock, self._cpu_clock = cores, clock, cpu_clock
        self._thread_clock = thread_clock
        self._one_computes = threads == 1
        self.computed_s = 0.0
        """Seconds of ``computing`` so far."""
        self.rested_s = 0.0
        """Seconds of rests between ops so far, within ``computing``."""
        self._share_at_rest = math.inf
        self._since: tuple[float, float, float] | None = None  # (s, CPU s, computed s) of the last call

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Nothing is asked of this process meanwhile; the least share so far is what rest takes, as
        others may measure links to it."""
        begun_s, used_s = self._clock(), self._cpu_clock()
        yield
        lasted_s = self._clock() - begun_s
        if lasted_s >= REST_S:
            self._share_at_rest = min(self._share_at_rest, (self._cpu_clock() - used_s) / lasted_s)

    def forget(self) -> None:
        """Do not count what came since the last ``beside_s``."""
        self._since = None

    def at_work_s(self) -> float:
        """A clock for the thread that computes: it goes as if no other thread ran, since on a part of a core
        those that handle messages take theirs of the same part. Only differences mean anything."""
        if self._one_computes and self._cores < 1.0:
            # Faster than the clock on the wall where a quota lets short work run at a whole core's speed:
            # what lasts takes this long (docs/decisions/018).
            return self._thread_clock() / self._cores + self.rested_s
        return self._clock()

    @contextmanager
    def computing(self) -> Iterator[Taken]:
        """Measure what computes inside, by ``at_work_s``."""
        taken = Taken()
        begun_s = self.at_work_s()
        yield taken
        taken.seconds = self.at_work_s() - begun_s
        self.computed_s += taken.seconds

    def beside_s(self) -> float:
        """Seconds that the cores need for what was done beside computing since the last call; 0 at the
        first."""
        now = (self._clock(), self._cpu_clock(), self.computed_s - self.rested_s)
        before, self._since = self._since, now
        if before is None:
            return 0.0
        at_rest = 0.0 if math.isinf(self._share_at_rest) else self._share_at_rest
        used_s = self._since[1] - before[1] - at_rest * (self._since[0] - before[0])
        return max(0.0, used_s / self._cores - (self._since[2] - before[2]))


def beside_computing() -> Callable[[], float]:
    """Return what says how many seconds of computing this process has taken since the last call, where
    another computes on the same part of a core; 0 where there is a core for each."""
    cores = usable().cores
    return CpuMeter(cores).beside_s if cores < 1.0 else lambda: 0.0
