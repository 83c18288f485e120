"""What a worker finds on its machine."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pynvml
import pytest
import torch

from hostos.allotted import Room, Usable
from worker.config import WorkerConfig
from worker.machine import device, torch_device
from worker.machine.device import Device


@pytest.mark.parametrize(
    ("physical", "usable", "asked", "expected"),
    [(8, 8.0, 0, 8), (8, 1.5, 0, 2), (8, 0.25, 0, 1), (None, 4.0, 0, 4), (8, 0.25, 3, 3)],
)
def test_no_more_threads_than_cores_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch, physical: int | None, usable: float, asked: int, expected: int
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: physical)
    monkeypatch.setattr(device, "usable", lambda: Usable(usable))
    config = WorkerConfig("127.0.0.1", device="cpu", threads=asked)
    assert torch_device.find_device(config).threads == expected


def test_a_worker_offers_what_is_free_under_the_limit_of_its_control_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = SimpleNamespace(total=64 << 30, available=60 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    for room, free in (
        (None, 60 << 30),
        (Room(2 << 30, 1 << 30), 1 << 30),
        (Room(64 << 30, 63 << 30), 60 << 30),
    ):
        monkeypatch.setattr(device, "memory_room", lambda room=room: room)
        assert device.machine_memory() == (free, room.limit if room else 64 << 30)


@pytest.mark.parametrize(("free", "offered"), [(1000, 850), (400, 304), (96, 0), (10, 0)])
def test_what_a_worker_grows_by_is_never_offered(free: int, offered: int) -> None:
    found = device.memory_limit(0, free << 20, 2000 << 20, "this machine")
    assert found == pytest.approx(offered << 20)


def gpus(monkeypatch: pytest.MonkeyPatch, counters: dict[str, int | Exception]) -> torch_device.GpuEnergy:
    """Two GPUs whose driver counts these millijoules."""

    def counted(handle: str) -> int:
        found = counters[handle]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"u{index}"))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", counted)
    return torch_device.GpuEnergy("cuda:0+cuda:1", Device("cuda", 0, "GPU", 1, 1, 1))


def test_a_members_gpus_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    counters: dict[str, int | Exception] = {"GPU-u0": 5_000, "GPU-u1": 2_500}
    energy = gpus(monkeypatch, counters)
    assert energy.joules() == 7.5
    counters["GPU-u1"] = pynvml.NVMLError_GpuIsLost()
    assert energy.joules() == 0.0
    counters["GPU-u1"] = 9_000
    assert energy.joules() == 0.0, "a counter that failed is not asked again"


def test_a_gpu_that_counts_nothing_has_no_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus(monkeypatch, {"GPU-u0": pynvml.NVMLError_NotSupported()}).joules() == 0.0
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: (_ for _ in ()).throw(pynvml.NVMLError_LibraryNotFound()))
    assert torch_device.GpuEnergy("cuda", Device("cuda", 0, "GPU", 1, 1, 1)).joules() == 0.0
    assert torch_device.GpuEnergy("cpu", Device("cpu", 0, "CPU", 1, 1, 1)).joules() == 0.0
