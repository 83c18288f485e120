"""This machine's device as torch has it: found, prepared, measured."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import psutil
import pynvml
import torch

from atoll.errors import UsageError
from worker.machine.device import (
    Device,
    DeviceChoice,
    DeviceRates,
    compute_threads,
    cpu_device,
    devices_of,
    memory_limit,
)

CPU_MATMUL = 512
CUDA_MATMUL = 4096
COPY_BYTES = 64 << 20
RATE_SECONDS = 0.3
CONTEXT_BYTES, MOST_CONTEXT_BYTES = 512 << 20, 4 << 30  # of a GPU, where it cannot be measured; at most


def find_device(config: DeviceChoice) -> Device:
    """The device that ``--device`` names; auto takes a GPU where there is one.

    UsageError when it is not there.
    """
    wanted, *others = devices_of(config.device)
    if others:
        return _joint_device(config)
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return cpu_device(config, torch.backends.cpu.get_cpu_capability())
    if not torch.cuda.is_available():
        raise UsageError(f"--device {wanted}: torch {torch.__version__} sees no GPU here; use --device cpu")
    index = int(wanted.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise UsageError(f"--device {wanted}: this machine has {torch.cuda.device_count()} GPUs")
    own = _context_bytes(index)
    free, total = torch.cuda.mem_get_info(index)
    lent = config.gpu_memory_bytes or config.memory_bytes
    limit = memory_limit(lent, free, total, f"GPU {index}")
    if lent:  # the context is part of what its owner lends
        limit = max(0, limit - own)
    name = torch.cuda.get_device_name(index)
    return Device("cuda", index, name, compute_threads(config), total, limit, own_bytes=own)


def _joint_device(config: DeviceChoice) -> Device:
    """The first device of a member of several, with the memory of all of them."""
    names = devices_of(config.device)
    if names[0] == "cpu":  # what is lent of it is for all
        found = cpu_device(config, torch.backends.cpu.get_cpu_capability())
        return replace(found, processes=len(names))
    each = [find_device(_Of(name, config)) for name in names]
    models = {device.model for device in each}
    if len(models) > 1:
        raise UsageError(f"--devices {config.device}: {', '.join(sorted(models))}; join devices of one model")
    least = min(device.memory_limit_bytes for device in each)
    own = max(device.own_bytes for device in each)
    count = len(names)
    first = replace(each[0], memory_bytes=count * each[0].memory_bytes, memory_limit_bytes=count * least)
    return replace(first, own_bytes=count * own, processes=count)


def remaining(config: DeviceChoice) -> str:
    """Return the devices of a member of several GPUs that work. UsageError where none does."""
    names, found, why_not = devices_of(config.device), [], ""
    if len(names) == 1 or names[0] == "cpu":
        return config.device
    for name in names:
        try:
            find_device(_Of(name, config))
            found.append(name)
        except (UsageError, RuntimeError) as error:  # a GPU that failed answers its driver with an error
            why_not = f"{name}: {error}"
    if not found:
        raise UsageError(why_not)
    return "+".join(found)


@dataclass(frozen=True)
class _Of:
    """``DeviceChoice`` of one device of several."""

    device: str
    config: DeviceChoice

    @property
    def threads(self) -> int:
        return self.config.threads

    @property
    def memory_bytes(self) -> int:
        return self.config.memory_bytes

    @property
    def gpu_memory_bytes(self) -> int:
        return self.config.gpu_memory_bytes


def _context_bytes(index: int) -> int:
    """Bytes of a GPU's memory that this process takes before it holds a tensor: its context, with what a
    matrix product loads. What others take or free meanwhile counts, too."""

    def used() -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        before = used()
        _first_product(torch.device("cuda", index))
        found = used() - before
    except pynvml.NVMLError:
        found = 0
    return found if 0 < found < MOST_CONTEXT_BYTES else CONTEXT_BYTES


def _first_product(place: torch.device) -> None:
    """Multiply two matrices, and keep nothing of it but what the libraries have loaded."""
    torch.mm(torch.ones(16, 16, device=place), torch.ones(16, 16, device=place))
    torch.cuda.synchronize(place)
    torch.cuda.empty_cache()


def torch_device(device: Device) -> torch.device:
    """Torch's name of the device."""
    return torch.device("cpu") if device.kind == "cpu" else torch.device("cuda", device.index)


def prepare(device: Device, config: DeviceChoice) -> None:
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
        if config.gpu_memory_bytes or config.memory_bytes:
            share = min(1.0, device.memory_limit_bytes / device.memory_bytes)
            torch.cuda.set_per_process_memory_fraction(share, device.index)


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


class GpuEnergy:
    """Energy counters of the GPUs among a member's devices, as their driver keeps them."""

    def __init__(self, names: str, device: Device) -> None:
        """``names``: as in ``--device``; ``device``: the first of them."""
        self._handles: list[Any] = []
        if device.kind != "cuda":
            return
        with contextlib.suppress(pynvml.NVMLError, RuntimeError, ValueError):
            pynvml.nvmlInit()
            for name in devices_of(names):
                number = name.partition(":")[2]
                uuid = torch.cuda.get_device_properties(int(number) if number else device.index).uuid
                self._handles.append(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))

    def joules(self) -> float:
        """Return what they have taken since their driver was loaded; 0 where it does not count that, as
        before Volta or for a part of a GPU."""
        try:
            return sum(float(pynvml.nvmlDeviceGetTotalEnergyConsumption(h)) for h in self._handles) / 1e3
        except pynvml.NVMLError:
            self._handles.clear()
            return 0.0


def used_memory_bytes(device: Device) -> int:
    """Bytes that this process holds now on its device; of several devices each is taken to hold as much."""
    if device.kind == "cuda":
        return device.processes * int(torch.cuda.memory_reserved(device.index))
    return int(psutil.Process().memory_info().rss)


def peak_memory_bytes(device: Device) -> int:
    """The most bytes that the device's allocator has held since ``restart_peak``; 0 on a CPU."""
    if device.kind != "cuda":
        return 0
    return device.processes * int(torch.cuda.max_memory_reserved(device.index))


def restart_peak(device: Device) -> None:
    """Give back what the device's allocator holds and does not need, and count from there."""
    if device.kind == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device.index)


def short_of_memory(error: Exception) -> bool:
    """Return whether an op failed as it got no memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


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
