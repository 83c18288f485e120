"""A memory limit is the whole worker's: its own part is taken off first."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pynvml
import pytest
import torch

from atoll.errors import UsageError
from worker.config import WorkerConfig
from worker.machine import torch_device
from worker.machine.device import Device
from worker.machine.own_share import (
    LEAST_STAGE_BYTES,
    MemoryShare,
    held_bytes,
    main_share,
    memory_share,
)

MIB = 1 << 20


def config(memory: int = 0, gpu: int = 0, stage: int = 0) -> WorkerConfig:
    return WorkerConfig("h", memory_bytes=memory * MIB, gpu_memory_bytes=gpu * MIB, stage_bytes=stage * MIB)


def test_of_a_limit_a_stage_may_have_what_the_worker_itself_leaves() -> None:
    share = memory_share(config(500), "cpu", 16 << 30, 180 * MIB)
    assert (share.stage_bytes, share.planned_bytes) == (320 * MIB, 320 * MIB)
    assert str(share) == "500.0 MiB, of it 180.0 MiB for Atoll itself, 320.0 MiB for a stage"
    assert share.checked() is share


def test_without_a_limit_a_stage_may_have_what_was_found_free() -> None:
    share = memory_share(config(), "cpu", 1000 * MIB, 180 * MIB)
    assert (share.stage_bytes, share.limited) == (1000 * MIB, False)
    assert memory_share(config(), "cpu", MIB, 180 * MIB).checked().stage_bytes == MIB


def test_a_limit_that_is_too_small_for_the_worker_itself_is_refused_with_the_least_that_is_not() -> None:
    with pytest.raises(UsageError, match=r"of 100\.0 MiB .* takes 180\.0 MiB .* at least 196\.0 MiB"):
        memory_share(config(100), "cpu", 16 << 30, 180 * MIB).checked()
    least = 180 + LEAST_STAGE_BYTES // MIB
    assert memory_share(config(least), "cpu", 16 << 30, 180 * MIB).checked().stage_bytes == LEAST_STAGE_BYTES


def test_the_planners_figure_of_a_stage_may_be_less_and_bounds_nothing() -> None:
    share = memory_share(config(500, stage=10), "cpu", 16 << 30, 180 * MIB)
    assert (share.stage_bytes, share.planned_bytes) == (320 * MIB, 10 * MIB)
    assert str(share).endswith("320.0 MiB for a stage, of which plans count on 10.0 MiB")
    assert memory_share(config(stage=10), "cpu", 16 << 30, 180 * MIB).stage_bytes == 16 << 30


def test_on_a_gpu_its_context_is_the_workers_own_part() -> None:
    share = memory_share(config(4096), "cuda", 16 << 30, 500 * MIB)
    assert share.stage_bytes == (4096 - 500) * MIB
    assert memory_share(config(1000, gpu=6000), "cuda", 16 << 30, 500 * MIB).stage_bytes == 5500 * MIB


def test_main_memory_of_a_gpus_worker_is_bounded_beside_it() -> None:

    def beside(config: WorkerConfig) -> MemoryShare:
        return main_share(config, memory_share(config, "cuda", 0, 500 * MIB), 200 * MIB)

    assert beside(config(4096)).checked().stage_bytes == (4096 - 500) * MIB
    assert beside(config(1000, gpu=6000)).checked().stage_bytes == 800 * MIB
    with pytest.raises(UsageError, match="at least 216"):
        beside(config(100, gpu=6000)).checked()


def test_what_this_process_holds_is_counted() -> None:
    before = held_bytes()
    with mmap.mmap(-1, 32 * MIB) as more:  # never memory that was freed before and is held already
        more.write(b"x" * MIB * 32)
        assert 28 * MIB < held_bytes() - before < 96 * MIB


def gpu(monkeypatch: pytest.MonkeyPatch, used_after: int, error: type[Exception] | None = None) -> Device:
    """The GPU of a machine whose driver counts so many bytes once the context is there."""
    counts = iter([1000 * MIB, used_after])

    def info(handle: object) -> SimpleNamespace:
        if error is not None:
            raise error
        return SimpleNamespace(used=next(counts))

    for name, value in (
        ("is_available", True), ("device_count", 1), ("mem_get_info", (20 << 30, 24 << 30)),
        ("get_device_name", "GPU"), ("get_device_properties", SimpleNamespace(uuid="0")),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", info)
    monkeypatch.setattr(torch_device, "_first_product", lambda place: None)
    return torch_device.find_device(WorkerConfig("h", device="cuda", memory_bytes=4 << 30))


def test_a_gpus_context_is_what_the_driver_counts_more_once_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = gpu(monkeypatch, used_after=1500 * MIB)
    assert (device.own_bytes, device.memory_limit_bytes) == (500 * MIB, (4 << 30) - 500 * MIB)


@pytest.mark.parametrize("error", [None, pynvml.NVMLError_Unknown])
def test_a_context_that_cannot_be_measured_is_taken_for_a_usual_one(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    """Another process may free memory meanwhile."""
    device = gpu(monkeypatch, used_after=900 * MIB, error=error)
    assert device.own_bytes == torch_device.CONTEXT_BYTES
