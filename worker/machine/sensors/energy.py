"""Joules that this machine takes while it works for a job, where its system counts them.

Linux counts what each processor package takes (powercap, RAPL), since 2020 for root alone on most kernels. A
package belongs to the whole machine, so a job is charged with its computing's share of the processors' busy
time. A GPU's driver counts what the GPU takes, which is charged as a whole. Nothing is estimated: without a
counter there are no joules.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ZONES = Path("/sys/class/powercap")
MICRO = 1e-6
MOST_PACKAGE_W = 2000.0  # more is a counter that began anew, as after a suspend
LEAST_BUSY_S = 0.1  # of all cores: the system counts in hundredths of a second


class Packages:
    """The processor packages that this process may read. A counter wraps, at 200 W after twenty minutes, so
    it is to be read more often."""

    def __init__(self, zones: Path = ZONES, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._read_s = clock, clock()
        self.refused: Path | None = None
        """A counter that only root may read."""
        self._zones: dict[Path, tuple[int, int]] = {}  # by counter: last value and range in microjoules
        self._joules = 0.0
        for zone in sorted(zones.glob("intel-rapl:*")):  # AMD's have the same name
            counter = zone / "energy_uj"
            try:
                if zone.joinpath("name").read_text(encoding="ascii").startswith("package"):
                    found = int(counter.read_text(encoding="ascii"))
                    self._zones[counter] = found, int((zone / "max_energy_range_uj").read_text("ascii"))
            except PermissionError:
                self.refused = counter
            except (OSError, ValueError):
                continue

    def __len__(self) -> int:
        return len(self._zones)

    def joules(self) -> float:
        """Return what all of them have taken since the start."""
        before_s, self._read_s = self._read_s, self._clock()
        most_uj = MOST_PACKAGE_W / MICRO * (self._read_s - before_s)
        for counter, (before, span) in self._zones.items():
            try:
                now = int(counter.read_text(encoding="ascii"))
            except (OSError, ValueError):
                continue
            self._zones[counter] = now, span
            taken = now - before if now >= before else now - before + span
            if 0 <= taken <= most_uj:
                self._joules += taken * MICRO
        return self._joules


def busy_s() -> float:
    """Return the seconds that all processors together have worked since the machine started."""
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "system", "nice", "irq", "softirq")))


class EnergyMeter:
    """Joules of the work for one job; thread-safe. ``own_s``: CPU seconds of what computes, ``gpu_j``: the
    counter of its GPUs, 0 where there is none or it is not known yet."""

    def __init__(self, packages: Packages | None = None, busy_s: Callable[[], float] = busy_s) -> None:
        self._packages = Packages() if packages is None else packages
        self._busy_s = busy_s
        self._lock = threading.Lock()
        self._since = (0.0, 0.0, 0.0)  # joules, busy and own seconds
        self._gpu_j = 0.0

    def begin(self, own_s: Callable[[], float], gpu_j: float) -> None:
        """Count from here on."""
        with self._lock:
            self._gpu_j = gpu_j
            if self._packages:
                self._since = self._packages.joules(), self._busy_s(), own_s()

    def look(self) -> None:
        """Read counters before they wrap."""
        with self._lock:
            if self._packages:
                self._packages.joules()

    def taken(self, own_s: Callable[[], float], gpu_j: float) -> float:
        """Return the joules since the last call, or since ``begin``. What is too short to be shared out stays
        for the next call."""
        with self._lock:
            return self._of_packages(own_s) + self._of_gpus(gpu_j)

    def _of_packages(self, own_s: Callable[[], float]) -> float:
        if not self._packages:
            return 0.0
        joules, busy_s, before_s = self._since
        worked_s = self._busy_s() - busy_s
        if worked_s < LEAST_BUSY_S:
            return 0.0
        self._since = self._packages.joules(), busy_s + worked_s, own_s()
        share = min(1.0, max(0.0, (self._since[2] - before_s) / worked_s))
        return share * (self._since[0] - joules)

    def _of_gpus(self, gpu_j: float) -> float:
        if not math.isfinite(gpu_j) or gpu_j <= 0.0:
            return 0.0
        before, self._gpu_j = self._gpu_j, gpu_j
        return max(0.0, gpu_j - before) if before > 0.0 else 0.0
