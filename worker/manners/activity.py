"""What a worker does at this moment, for those who watch it. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.manners.keeper import Manners


@dataclass(frozen=True, slots=True)
class DeviceActivity:
    """One device: what its session is at, for which job; ``step``: of a federated job the round.
    ``connected`` False: the coordinator is being looked for."""

    name: str
    phase: str
    job: str
    step: int
    connected: bool = True


@dataclass(frozen=True, slots=True)
class Activity:
    """A worker's machine."""

    coordinator: str
    devices: tuple[DeviceActivity, ...]
    memory: str  # of the first device, in words
    threads: int
    sent_bytes: int  # since it started
    received_bytes: int
    today_bytes: int  # both ways
    manners: Manners = field(default_factory=Manners)
