"""This machine as far as it is known without torch: its device's facts, its memory, its address."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from atoll.errors import UsageError
from atoll.version import __version__
from hostos.allotted import memory_room, usable
from protos import atoll_control_pb2 as control
from worker.machine.own_share import RESERVE_BYTES

RESERVE_SHARE = 0.15  # of free memory, left to the machine's owner where --memory is not given


class DeviceChoice(Protocol):
    """What of a machine is lent: auto | cpu | cuda | cuda:N; threads and bytes, 0 where that is left open."""

    @property
    def device(self) -> str: ...

    @property
    def threads(self) -> int: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def gpu_memory_bytes(self) -> int: ...  # 0: memory_bytes


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
    own_bytes: int = 0  # of the device's memory that this process holds itself, idle
    processes: int = 1  # which compute together; memory is that of all of them
    joint: tuple[float, float] = (
        0.0,
        0.0,
    )  # an all-reduce of theirs: seconds, then bytes a second each sends


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Sustained rates of a few large operations."""

    matmul_gflops: float
    memory_gbps: float  # bytes read and written by a copy, GB/s


def devices_of(device: str) -> tuple[str, ...]:
    """Return the devices of a member, each of which a process computes on: 'cuda:0+cuda:1', 'cpu'."""
    return tuple(part.strip() for part in device.split("+"))


def usable_cores() -> int:
    """Return how many physical cores this process may use: more threads would only wait for each other."""
    cores = math.ceil(usable().cores)
    # Some systems, and /proc without /sys, do not tell physical cores.
    return min(psutil.cpu_count(logical=False) or cores, cores)


def compute_threads(config: DeviceChoice) -> int:
    """Return the threads of a process to compute with: those given, else one a core."""
    processes = sum(device == "cpu" for device in devices_of(config.device))
    return config.threads or max(1, usable_cores() // max(1, processes))


def cpu_device(config: DeviceChoice, instructions: str = "") -> Device:
    """Return this machine's CPU; ``instructions``: as torch uses them. UsageError for more memory than there
    is."""
    free, total = machine_memory()
    limit = memory_limit(config.memory_bytes, free, total, "this machine")
    return Device("cpu", 0, cpu_model(), compute_threads(config), total, limit, instructions)


def versions() -> dict[str, str]:
    """Return the versions of Atoll, torch, Python and the platform, as a bug report should give them."""
    return {
        "atoll": __version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def device_facts(device: Device) -> control.DeviceFacts:
    """Return what the coordinator is to know of a device."""
    known, cores = versions(), usable()
    return control.DeviceFacts(
        kind=device.kind,
        model=device.model,
        threads=device.threads,
        cores=cores.cores,
        quota_period_s=cores.period_s,
        memory_bytes=device.memory_bytes,
        memory_limit_bytes=device.memory_limit_bytes,
        torch_version=known["torch"],
        python_version=known["python"],
        atoll_version=known["atoll"],
        platform=known["platform"],
        instructions=device.instructions,
        own_memory_bytes=device.own_bytes,
        processes=device.processes if device.processes > 1 else 0,
        joint_latency_s=device.joint[0],
        joint_bytes_per_s=device.joint[1],
    )


def own_address(toward: str, port: int) -> str | None:
    """This machine's own address on the way to ``toward``, None where there is no way; no packet is sent."""
    try:
        found = socket.getaddrinfo(toward, port, type=socket.SOCK_DGRAM)
        family, address = found[0][0], found[0][4]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def machine_memory() -> tuple[int, int]:
    """Bytes of memory that are free and that there are, under the limits of control groups."""
    memory, room = psutil.virtual_memory(), memory_room()
    free, total = int(memory.available), int(memory.total)
    if room is None:
        return free, total
    return min(free, room.free), min(total, room.limit)


def memory_limit(wanted: int, free: int, total: int, where: str) -> int:
    """The planner's budget, bytes: ``wanted``, or where that is 0 what is free less a reserve, which has room
    for what the worker grows by.

    UsageError when ``where`` has less.
    """
    if wanted > total:
        raise UsageError(
            f"--memory asks for {wanted / 2**30:.1f} GiB, {where} has {total / 2**30:.1f} GiB; lower it"
        )
    return wanted or max(0, min(int(free * (1.0 - RESERVE_SHARE)), free - RESERVE_BYTES))


def cpu_model() -> str:
    """The processor's name, at most 100 characters."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()[:100]
    except OSError:
        pass
    return (platform.processor() or platform.machine())[:100]
