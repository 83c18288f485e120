"""Parts of a CPU core: what a quota lends to short work, and what threads beside the computing one delay.

All that the planner assumes of machines that lend less than whole cores, as a container with
``--cpus 0.3`` does (docs/decisions/018). Machines with whole cores are untouched by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.planning.costs.fleet import Device


@dataclass(frozen=True, slots=True)
class Quota:
    """The part of a core that one thread gets, counted anew each period."""

    cores: float = 1.0  # 0 to 1
    period_s: float = 0.0  # 0: no quota

    def burst_s(self, work_s: float, rested_s: float = inf) -> float:
        """Return by how much sooner work of ``work_s`` ends that begins after a rest of ``rested_s``.

        It runs at a whole core's speed until the period's part is used up.
        """
        return min(rested_s, (1.0 - self.cores) * min(self.period_s, work_s))

    def soonest_s(self, work_s: float) -> float:
        """Return what ``work_s`` takes after any rest."""
        return work_s - self.burst_s(work_s)


WHOLE = Quota()


def quota_of(device: Device) -> Quota:
    """Return the quota of the device's computing thread."""
    return Quota(core_share(device), device.quota_period_s)


def core_share(device: Device) -> float:
    """Return the part of a core that one thread gets; 1 for a device that reported no cores (0)."""
    return min(1.0, device.cores) if device.cores > 0.0 else 1.0


def held_up_s(cpu_s: float, device: Device) -> float:
    """Return the seconds by which ``cpu_s`` of other threads delay the computing one.

    None where a second core takes them, or where the device reported no cores (0).
    """
    cores = device.cores
    return cpu_s / cores * min(1.0, 2.0 - cores) if 0.0 < cores < 2.0 else 0.0
