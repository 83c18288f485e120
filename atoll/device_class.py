"""DeviceClass: machines that compute the same bits. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Facts that decide in which order a machine adds numbers; within one class results are bit-equal.

    ``device`` is a GPU's model or a CPU's instruction set, ``threads`` those that compute.
    """

    device: str
    torch: str
    threads: int

    def __str__(self) -> str:
        return f"{self.device}, torch {self.torch}, {self.threads} thread{'s' * (self.threads != 1)}"
