"""Devices that one machine lends, each with its part of what the machine's owner allows.

``--devices`` is a list with commas of ``cuda:N`` and ``cpu``, each at most once; ``cpu*N`` stands for N parts
of the CPU, ``all`` for every GPU that the driver shows, or the CPU where there is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import UsageError
from protos.devices import MAX_DEVICES
from worker.machine.device import machine_memory, memory_limit, usable_cores

if TYPE_CHECKING:
    from worker.config import WorkerConfig

ALL = "all"
_ONE = re.compile(r"(cpu|cuda:\d{1,3})(?:\*(\d{1,2}))?")


def gpus_here() -> int:
    """GPUs that the driver shows."""
    return sum(1 for path in Path("/dev").glob("nvidia[0-9]*") if path.name[len("nvidia") :].isdigit())


def parse_devices(text: str, gpus: Callable[[], int] = gpus_here) -> tuple[str, ...]:
    """'cuda:0,cuda:1', 'cpu*2', 'all' -> the devices, in order. UsageError otherwise."""
    if text.strip() == ALL:
        return tuple(f"cuda:{number}" for number in range(min(gpus(), MAX_DEVICES))) or ("cpu",)
    found: list[str] = []
    for part in text.split(","):
        match = _ONE.fullmatch(part.strip())
        count = int(match[2] or 1) if match is not None else 0
        if match is None or not count or (count > 1 and match[1] != "cpu") or match[1] in found:
            raise UsageError(
                f"--devices {text[:80]!r}: {part.strip()[:40]!r}; give all, or a list such as "
                "cuda:0,cuda:1 or cpu*2, each device once; only the CPU can be parted"
            )
        found += [match[1]] * count
    if len(found) > MAX_DEVICES:
        raise UsageError(f"--devices {text[:80]!r}: {len(found)} devices; at most {MAX_DEVICES}")
    return tuple(found)


def lent_devices(config: WorkerConfig, free_bytes: int | None = None) -> tuple[WorkerConfig, ...]:
    """The configuration of each device; of one device alone, ``config`` itself.

    Limits on GPU memory and threads hold for each device. Main memory, the disk for send logs and copies and,
    where none were named, threads are shared out equally. Apps and registered data belong to the first.
    ``free_bytes``: main memory that the CPU's parts share where no limit is given; None: what is free now.
    UsageError for devices that cannot be, and limits too small to share.
    """
    if not config.devices:
        return (config,)
    devices = parse_devices(config.devices)
    if len(devices) == 1:
        return (replace(config, device=devices[0], devices=""),)
    parts, count = devices.count("cpu"), len(devices)
    if free_bytes is None:
        free_bytes = memory_limit(0, *machine_memory(), "this machine")
    cores = usable_cores()

    def device(number: int) -> WorkerConfig:
        part = replace(
            config,
            device=devices[number],
            devices="",
            number=number,
            name=f"{config.shown_name[:56]}/{number}",
            parts=count,
            memory_bytes=config.memory_bytes // count,
            send_log_bytes=config.send_log_bytes // count,
            copy_bytes=config.copy_bytes // count,
        )
        if number:
            part = replace(part, allow_apps=False, accept_apps=())
        if devices[number] != "cpu":
            return replace(part, gpu_memory_bytes=config.gpu_memory_bytes or config.memory_bytes)
        return replace(
            part,
            memory_bytes=part.memory_bytes or free_bytes // parts,
            threads=config.threads or max(1, cores // parts),
        )

    return tuple(map(device, range(count)))
