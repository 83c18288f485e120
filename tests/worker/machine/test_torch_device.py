"""What a worker finds on its machine."""

from __future__ import annotations

import psutil
import pytest

from worker.config import WorkerConfig
from worker.machine import device, torch_device
from worker.machine.cpu import Usable


@pytest.mark.parametrize(
    ("physical", "usable", "asked", "expected"),
    [(8, 8.0, 0, 8), (8, 1.5, 0, 2), (8, 0.25, 0, 1), (None, 4.0, 0, 1), (8, 0.25, 3, 3)],
)
def test_no_more_threads_than_cores_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch, physical: int | None, usable: float, asked: int, expected: int
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: physical)
    monkeypatch.setattr(device, "usable", lambda: Usable(usable))
    config = WorkerConfig("127.0.0.1", device="cpu", threads=asked)
    assert torch_device.find_device(config).threads == expected
