"""Everything that a job of any kind computes with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from worker.links.ports import Network
from worker.manners.duty import DutyCycle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from atoll.federated import Floors
    from protos import atoll_control_pb2 as pb
    from strategies.layout import Array
    from worker.blobs import BlobStore
    from worker.cancel import Cancel
    from worker.data.population import Population
    from worker.links.ports import Arrival
    from worker.machine.cpu import CpuMeter
    from worker.machine.device import Device
    from worker.pipe.status import ComputeStatus
    from worker.spans import Spans
    from worker.stage.assignment import Assignment
    from worker.stage.batches import Fetch
    from worker.stage.reports import Progress
    from worker.stage.stage import Stage
    from worker.transport.frames import MessageKey


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """Settings of the worker that concern computing; sizes in bytes."""

    state_dir: Path
    device: str
    threads: int
    memory_bytes: int
    feed_ahead_steps: int
    feed_bytes: int
    kept_bytes: int
    floors: Floors
    gpu_memory_bytes: int = 0  # 0: memory_bytes


class JobNetwork(Network, Protocol):
    """Links to the neighbours of a plan's stage."""

    def announce(self, arrivals: list[tuple[Arrival, int]]) -> None:
        """Take these messages from now on, each of at most so many payload bytes."""

    def record(
        self,
        peer: str,
        key: MessageKey,
        header: bytes,
        payload: bytes | bytearray | memoryview,
        timeout_s: float | None = None,
    ) -> None:
        """Have a message in the send log that ``peer`` is not sent. PeerLost, TimeoutError."""

    def connect(self, job: str, plan_version: int, cancel: Cancel) -> None:
        """Be connected to every neighbour. PeerLost names the one that is not; Cancelled."""


class JointStages(Protocol):
    """Stages that the processes of a member compute together."""

    def stage(
        self, message: pb.Assign, assignment: Assignment, tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> Stage:
        """Return the assignment's stage, which all processes load."""

    def drop(self) -> None:
        """Have nobody hold the last stage any more."""


@dataclass(frozen=True)
class ComputeContext:
    """Resources that stages and participations share.

    ``open_data(name)``: the arrays of a registered data set by field, samples along the first axis, perhaps
    memory-mapped. ``open_population(name)``: the clients that it was parted among. ``scratch``: a folder for
    files that are to be stored.
    """

    worker: str
    device: Device
    config: ComputeSettings
    network: JobNetwork
    blobs: BlobStore
    fetch_of: Callable[[str, range | None], Fetch]  # (job, which of a step; None: all) -> its micro-batches
    open_data: Callable[[str], Mapping[str, Array]]
    open_population: Callable[[str], Population | None]
    scratch: Path
    spans: Spans
    progress: Progress
    cpu: CpuMeter
    status: ComputeStatus
    duty: DutyCycle = field(default_factory=DutyCycle)
    mesh: JointStages | None = None  # of a member of several devices
