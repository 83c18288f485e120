"""First message to a compute process: who it computes for, with what, and within which limits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from protos import atoll_compute_pb2 as pb
from worker.transport.contract import TransportConfig

if TYPE_CHECKING:
    from worker.config import WorkerConfig


def setup_of(
    config: WorkerConfig, worker: str, scratch: Path, share: float, codec_speeds: bytes
) -> pb.ComputeSetup:
    """Return the setup of a process whose own files lie in ``scratch``; ``share``: of the time that it may
    compute, in (0, 1]."""
    transport = TransportConfig()
    return pb.ComputeSetup(
        worker=worker,
        state_dir=str(config.state_dir.absolute()),
        blob_dir=str(config.blob_dir.absolute()),
        scratch_dir=str(scratch),
        device=config.device,
        threads=config.threads,
        memory_bytes=config.memory_bytes,
        gpu_memory_bytes=config.gpu_memory_bytes,
        compute_share=share,
        feed_ahead_steps=config.feed_ahead_steps,
        feed_bytes=config.feed_bytes,
        kept_bytes=config.kept_bytes,
        min_batch=config.min_batch,
        min_samples=config.min_samples,
        min_steps=config.min_steps,
        min_clients=config.min_clients,
        codec_speeds=codec_speeds,
        max_queued_bytes=transport.max_queued_bytes,
        max_queued_messages=transport.max_messages,
    )
