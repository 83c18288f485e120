"""Everything on this machine that a job of any kind runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from protos.blob_transfer import BlobPort
    from strategies.layout import Array
    from worker.blobs import BlobCache
    from worker.config import WorkerConfig
    from worker.machine.cpu import CpuMeter
    from worker.machine.device import Device
    from worker.spans import Spans
    from worker.stage.feed import Fetch
    from worker.stage.run import Progress
    from worker.transport.network import PeerNetwork


@dataclass(frozen=True)
class WorkerContext:
    """Resources that stages, participations and apps share.

    ``open_data(name)``: the arrays of a registered data set by field, samples along the first axis, perhaps
    memory-mapped.
    """

    worker: str
    device: Device
    config: WorkerConfig
    network: PeerNetwork
    cache: BlobCache
    blobs: BlobPort
    fetch_of: Callable[[str], Fetch]  # job -> its micro-batches
    open_data: Callable[[str], Mapping[str, Array]]
    spans: Spans
    progress: Progress
    cpu: CpuMeter
