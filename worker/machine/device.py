"""This machine: device facts for the planner, a few rates for people."""

from __future__ import annotations

import math
import platform
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

import atoll
from atoll.errors import UsageError
from worker.machine.cpu import usable

if TYPE_CHECKING:
    from worker.config import WorkerConfig

RESERVE_SHARE = 0.15  # of free memory, left to the machine's owner where --memory is not given
CPU_MATMUL = 512
CUDA_MATMUL = 4096
COPY_BYTES = 64 << 20
RATE_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Device:
    """Facts of this worker's device that the planner uses."""

    kind: str  # cpu | cuda
    index: int
    model: str
    threads: int
    memory_bytes: int  # physically there
    memory_limit_bytes: int  # the planner's budget
    instructions: str = ""  # of the CPU, as torch uses them: results depend on them

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", self.index)


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Sustained rates of a few large operations."""

    matmul_gflops: float
    memory_gbps: float  # bytes read and written by a copy, GB/s


def find_device(config: WorkerConfig) -> Device:
    """The device that ``--device`` names; auto takes a GPU where there is one.

    UsageError when it is not there.
    """
    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    # On a part of a machine more threads than cores only wait for each other.
    threads = config.threads or min(psutil.cpu_count(logical=False) or 1, math.ceil(usable().cores))
    if wanted == "cpu":
        return _cpu(config, threads)
    if not torch.cuda.is_available():
        raise UsageError(f"--device {wanted}: torch {torch.__version__} sees no GPU here; use --device cpu")
    index = int(wanted.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise UsageError(f"--device {wanted}: this machine has {torch.cuda.device_count()} GPUs")
    free, total = torch.cuda.mem_get_info(index)
    limit = _limit(config.memory_bytes, free, total, f"GPU {index}")
    return Device("cuda", index, torch.cuda.get_device_name(index), threads, total, limit)


def prepare(device: Device, config: WorkerConfig) -> None:
    """Set this process's threads and determinism; on a GPU also its share of the memory."""
    torch.set_num_threads(device.threads)
    # As torch.use_deterministic_algorithms(True, warn_only=True), which imports the inductor first: 0.7 s of
    # processor time, three seconds before a quarter of a core has joined.
    torch.set_deterministic_debug_mode("warn")
    # Results never read uninitialised memory; filling it would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.kind == "cuda":
        torch.backends.cudnn.benchmark = False
        torch.cuda.set_device(device.index)
        if config.memory_bytes:
            share = min(1.0, device.memory_limit_bytes / device.memory_bytes)
            torch.cuda.set_per_process_memory_fraction(share, device.index)


def versions() -> dict[str, str]:
    """Versions of Atoll, torch, Python and the platform, as a bug report should give them."""
    return {
        "atoll": atoll.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def device_rates(
    device: torch.device, seconds: float = RATE_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> DeviceRates:
    """A float32 matrix product and a copy, each for about ``seconds``."""
    size = CPU_MATMUL if device.type == "cpu" else CUDA_MATMUL
    left, right = torch.ones(size, size, device=device), torch.ones(size, size, device=device)
    out = torch.empty(size, size, device=device)
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    product_s = _median_s(lambda: torch.mm(left, right, out=out), device, seconds, clock)
    copy_s = _median_s(lambda: target.copy_(source), device, seconds, clock)
    return DeviceRates(2 * size**3 / product_s / 1e9, 2 * COPY_BYTES / copy_s / 1e9)


def outbound_host(toward: str, port: int) -> str:
    """This machine's own address on the way to ``toward``; no packet is sent."""
    family = socket.AF_INET6 if ":" in toward else socket.AF_INET
    try:
        found = socket.getaddrinfo(toward, port, type=socket.SOCK_DGRAM)
        family, address = found[0][0], found[0][4]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def used_memory_bytes(device: Device) -> int:
    """Bytes that this process holds now on its device."""
    if device.kind == "cuda":
        return int(torch.cuda.memory_reserved(device.index))
    return int(psutil.Process().memory_info().rss)


def _cpu(config: WorkerConfig, threads: int) -> Device:
    memory = psutil.virtual_memory()
    total = min(int(memory.total), _cgroup_limit() or int(memory.total))
    free = min(int(memory.available), total)
    limit = _limit(config.memory_bytes, free, total, "this machine")
    return Device("cpu", 0, _cpu_model(), threads, total, limit, torch.backends.cpu.get_cpu_capability())


def _limit(wanted: int, free: int, total: int, where: str) -> int:
    if wanted > total:
        raise UsageError(
            f"--memory asks for {wanted / 2**30:.1f} GiB, {where} has {total / 2**30:.1f} GiB; lower it"
        )
    return wanted or int(free * (1.0 - RESERVE_SHARE))


def _cgroup_limit() -> int | None:
    """A container's own memory limit, bytes."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:
            return int(text)
    return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()[:100]
    except OSError:
        pass
    return (platform.processor() or platform.machine())[:100]


def _median_s(
    run: Callable[[], object], device: torch.device, seconds: float, clock: Callable[[], float]
) -> float:
    """Median seconds of one call, warmed up."""

    def timed() -> float:
        started_s = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return max(clock() - started_s, 1e-9)

    timed()
    deadline_s = clock() + seconds
    times = [timed()]
    while clock() < deadline_s and len(times) < 1000:
        times.append(timed())
    return statistics.median(times)
