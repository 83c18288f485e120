"""Several devices of one machine: how they are named, and what each has of the machine's limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import UsageError
from protos.devices import MAX_DEVICES
from worker.config import WorkerConfig, make_config, remember
from worker.machine.device import compute_threads
from worker.machine.lent import gpus_here, lent_devices, parse_devices

GIB = 1 << 30


def lent(tmp_path: Path, **settings: object) -> tuple[WorkerConfig, ...]:
    return lent_devices(make_config({"host": "h", "state_dir": tmp_path, **settings}, {}), 8 * GIB)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("all", ("cuda:0", "cuda:1", "cuda:2")),
        ("cuda:0, cuda:3", ("cuda:0", "cuda:3")),
        ("cpu*2", ("cpu", "cpu")),
        ("cuda:1,cpu*2", ("cuda:1", "cpu", "cpu")),
        ("cpu", ("cpu",)),
        ("cuda:0+cuda:1", ("cuda:0+cuda:1",)),
        ("cuda:0 + cuda:1, cuda:2", ("cuda:0+cuda:1", "cuda:2")),
        ("cpu+cpu", ("cpu+cpu",)),
        ("all+", ("cuda:0+cuda:1+cuda:2",)),
    ],
)
def test_a_list_names_devices_and_all_the_gpus_there_are(text: str, devices: tuple[str, ...]) -> None:
    assert parse_devices(text, lambda: 3) == devices


def test_where_there_is_no_gpu_all_is_the_cpu() -> None:
    assert parse_devices("all", lambda: 0) == ("cpu",)


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("2", 1),
        ("0,1", 2),
        (" 3, 1 ", 2),
        ("0,-1,1", 1),
        ("0,4,1", 1),
        ("1,1", 0),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 1),
        ("GPU-8932f937,GPU-1c5a", 2),
        ("GPU-8932f937,0", 1),
        ("MIG-5c1d/1/0,MIG-5c1d/2/0", 1),
    ],
)
def test_gpus_are_those_that_cuda_shows_this_process(tmp_path: Path, visible: str | None, count: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia0x"):
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus_here(environment, tmp_path) == count
    every = parse_devices("all+", lambda: gpus_here(environment, tmp_path))
    assert every == ("+".join(f"cuda:{number}" for number in range(count)) or "cpu",)


def test_visible_gpus_of_a_machine_without_any_are_none(tmp_path: Path) -> None:
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 0
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, tmp_path) == 0


@pytest.mark.parametrize(
    "text", ["", "gpu", "cuda", "cuda:0*2", "cpu,cpu", "cuda:0,cuda:0", "cpu*0", "cpu;cpu", "all,cpu",
     "cpu+cuda:0", "cuda:0+cuda:0", "cuda:0+cuda:1,cuda:1", "cpu+cpu,cpu", "cpu*2+cpu", "cuda:0+"],
)  # fmt: skip
def test_a_list_that_names_no_devices_or_one_twice_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cuda:0,cuda:1 or cpu"):
        parse_devices(text)


def test_one_machine_lends_at_most_sixteen_devices() -> None:
    assert len(parse_devices(f"cpu*{MAX_DEVICES}")) == MAX_DEVICES
    with pytest.raises(UsageError, match="17 devices; at most 16"):
        parse_devices(f"cuda:0,cpu*{MAX_DEVICES}")


def test_a_member_of_several_processes_has_the_machines_memory_and_its_cores_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.machine.device.usable_cores", lambda: 6)
    (site,) = lent(tmp_path, devices="cpu+cpu", memory_bytes=GIB)
    assert (site.device, site.memory_bytes, site.number) == ("cpu+cpu", GIB, 0)
    assert compute_threads(site) == 3
    joint, other = lent(tmp_path, devices="cuda:0+cuda:1,cuda:2", memory_bytes=2 * GIB)
    assert (joint.device, joint.gpu_memory_bytes) == ("cuda:0+cuda:1", 2 * GIB)
    assert (other.device, other.number) == ("cuda:2", 1)


def test_one_device_keeps_the_machines_configuration(tmp_path: Path) -> None:
    (alone,) = lent(tmp_path, device="cpu", name="box", memory_bytes=GIB)
    assert (alone.name, alone.number, alone.memory_bytes, alone.device_dir) == ("box", 0, GIB, tmp_path)
    (listed,) = lent(tmp_path, devices="cpu", name="box")
    assert (listed.name, listed.device, listed.devices) == ("box", "cpu", "")


def test_parts_of_the_cpu_share_memory_threads_and_disk(tmp_path: Path) -> None:
    first, second = lent(tmp_path, devices="cpu*2", name="box", send_log_bytes=GIB, allow_apps=True)
    assert (first.name, second.name) == ("box/0", "box/1")
    assert first.memory_bytes == second.memory_bytes == 4 * GIB
    assert first.threads == second.threads >= 1
    assert first.send_log_bytes + second.send_log_bytes == GIB
    assert first.send_log_dir != second.send_log_dir
    assert (first.allow_apps, second.allow_apps) == (True, False)
    limited = lent(tmp_path, devices="cpu*2", memory_bytes=GIB, threads=3)
    assert [(part.memory_bytes, part.threads) for part in limited] == [(GIB // 2, 3)] * 2


def test_a_gpu_keeps_its_own_limit_beside_its_part_of_main_memory(tmp_path: Path) -> None:
    gpu, cpu = lent(tmp_path, devices="cuda:0,cpu", memory_bytes=4 * GIB, gpu_memory_bytes=6 * GIB)
    assert (gpu.device, gpu.gpu_memory_bytes, gpu.memory_bytes) == ("cuda:0", 6 * GIB, 2 * GIB)
    assert (cpu.device, cpu.memory_bytes) == ("cpu", 2 * GIB)
    gpu, _ = lent(tmp_path, devices="cuda:0,cuda:1", memory_bytes=4 * GIB)
    assert gpu.gpu_memory_bytes == 4 * GIB  # as --memory bounds one GPU


def test_what_was_chosen_last_is_remembered_one_device_or_several(tmp_path: Path) -> None:
    remember(make_config({"host": "h", "devices": "cpu*2", "state_dir": tmp_path}, {}))
    again = make_config({"state_dir": tmp_path}, {})
    assert (again.devices, again.number) == ("cpu*2", 0)
    one = make_config({"state_dir": tmp_path, "device": "cpu"}, {})
    assert (one.device, one.devices) == ("cpu", "")
    with pytest.raises(UsageError, match="--device and --devices"):
        make_config({"state_dir": tmp_path, "device": "cpu", "devices": "cpu*2"}, {})
