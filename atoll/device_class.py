"""DeviceClass: machines that compute the same bits. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Facts that decide in which order a machine adds numbers; within one class results are bit-equal.

    ``device`` is a GPU's model or a CPU's instruction set, ``threads`` those that compute, ``processes`` how
    many compute a stage together: sums over them have an order of their own.
    """

    device: str
    torch: str
    threads: int
    processes: int = 1

    def __str__(self) -> str:
        together = f", {self.processes} processes" if self.processes > 1 else ""
        return (
            f"{self.device}, torch {self.torch}, {self.threads} thread{'s' * (self.threads != 1)}{together}"
        )
