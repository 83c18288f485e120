"""What a job's stages take of memory over what the model says, by class of device. Pure.

The model (``planning.costs.memory``) counts tensors; a library's workspaces, an allocator's slack and what is
not in the model show only where a stage runs. Measured marks and kills raise a factor with which the job's
later plans count; nothing lowers it, as a stage may not have stored or evaluated yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.device_class import DeviceClass

KILLED_MARGIN = 1.1  # over what a stage was killed at: it wanted more than that
LEAST_RAISE = 1.25  # by each kill, so that plans come to an end of them within a few
MOST = 64.0  # more is nothing that a plan could count with


@dataclass(slots=True)
class LearntMemory:
    """Factors by job and class of device; 1 where nothing was learnt."""

    _factors: dict[tuple[str, DeviceClass], float] = field(default_factory=dict)

    def factor(self, job: str, device: DeviceClass) -> float:
        """Return by how much a plan for ``job`` is to multiply the model's bytes on such a device."""
        return self._factors.get((job, device), 1.0)

    def measured(self, job: str, device: DeviceClass, model_bytes: float, measured_bytes: int) -> None:
        """Take in the most that a stage held, of which the model says ``model_bytes``."""
        if model_bytes > 0:
            self.raised(job, device, measured_bytes / model_bytes)

    def killed(self, job: str, device: DeviceClass, model_bytes: float, killed_bytes: int) -> float:
        """Take in that a stage was killed at ``killed_bytes``; returns the factor from now on."""
        wanted = LEAST_RAISE * self.factor(job, device)
        if model_bytes > 0:
            wanted = max(wanted, KILLED_MARGIN * killed_bytes / model_bytes)
        self.raised(job, device, wanted)
        return self.factor(job, device)

    def raised(self, job: str, device: DeviceClass, factor: float) -> None:
        """Count with at least ``factor``."""
        known = self.factor(job, device)
        if factor > known:
            self._factors[job, device] = min(factor, MOST)

    def forget(self, job: str) -> None:
        """Let go of a job that is over."""
        for key in [key for key in self._factors if key[0] == job]:
            del self._factors[key]
