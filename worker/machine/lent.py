"""Devices that one machine lends, each with its part of what the machine's owner allows.

``--devices`` is a list with commas of ``cuda:N`` and ``cpu``, each at most once; ``cpu*N`` stands for N parts
of the CPU, ``all`` for every GPU that this process may use, or the CPU where there is none. With ``+``
between them, devices of one kind are one member: ``cuda:0+cuda:1``, ``cpu+cpu``; ``all+`` is every GPU as
one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import UsageError
from protos.devices import MAX_DEVICES
from worker.machine.device import devices_of, machine_memory, memory_limit, usable_cores

if TYPE_CHECKING:
    from worker.config import WorkerConfig

ALL, TOGETHER = "all", "all+"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_ONE = re.compile(r"(cpu|cuda:\d{1,3})(?:\*(\d{1,2}))?")
_GPU = re.compile(r"(?P<index>\d+)|(?P<card>GPU-[\w-]+)|(?P<part>MIG-[\w/-]+)")


def gpus_here(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """GPUs that the driver shows, without those that CUDA_VISIBLE_DEVICES takes from this process.

    As CUDA reads it: indices or UUIDs, up to the first name that is of another kind or of no card; none where
    a name comes twice. Of parts of cards (MIG) a process has one.
    """
    there = sum(1 for path in devices.glob("nvidia[0-9]*") if path.name[len("nvidia") :].isdigit())
    if VISIBLE not in environment:
        return there
    found: list[re.Match[str]] = []
    for name in environment[VISIBLE].split(","):
        match = _GPU.fullmatch(name.strip())
        if match is None or (found and match.lastgroup != found[0].lastgroup):
            break
        if match.lastgroup == "index" and int(match[0]) >= there:
            break
        if match[0] in [before[0] for before in found]:
            return 0
        found.append(match)
    return min(len(found), 1 if found and found[0].lastgroup == "part" else there)


def parse_devices(text: str, gpus: Callable[[], int] = gpus_here) -> tuple[str, ...]:
    """'cuda:0,cuda:1', 'cuda:0+cuda:1', 'cpu*2', 'all' -> the members, in order. UsageError otherwise."""
    if text.strip() in (ALL, TOGETHER):
        every = [f"cuda:{number}" for number in range(min(gpus(), MAX_DEVICES))] or ["cpu"]
        return tuple(every) if text.strip() == ALL else ("+".join(every),)
    found: list[str] = []
    for part in text.split(","):
        member = _member(part.strip())
        taken = {device for each in found for device in devices_of(each)}
        if not member or taken & {device for each in member for device in devices_of(each)}:
            raise UsageError(
                f"--devices {text[:80]!r}: {part.strip()[:40]!r}; give all, or a list such as "
                "cuda:0,cuda:1 or cpu*2, each device once, with + between those of one member; "
                "only the CPU can be parted"
            )
        found += member
    count = sum(len(devices_of(member)) for member in found)
    if count > MAX_DEVICES:
        raise UsageError(f"--devices {text[:80]!r}: {count} devices; at most {MAX_DEVICES}")
    return tuple(found)


def _member(part: str) -> list[str]:
    """'cuda:0' -> ['cuda:0'], 'cpu*2' -> ['cpu', 'cpu'], 'cpu+cpu' -> ['cpu+cpu']; [] for anything else."""
    names = devices_of(part)
    if len(names) > 1:
        gpus = all(name.startswith("cuda:") for name in names) and len(set(names)) == len(names)
        known = all(_ONE.fullmatch(name) and "*" not in name for name in names)
        return ["+".join(names)] if known and (gpus or set(names) == {"cpu"}) else []
    match = _ONE.fullmatch(part)
    count = int(match[2] or 1) if match is not None else 0
    if match is None or not count or (count > 1 and match[1] != "cpu"):
        return []
    return [match[1]] * count


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
    parts = sum(devices_of(member).count("cpu") for member in devices)
    count = len(devices)
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
        own = devices_of(devices[number]).count("cpu")
        if not own:
            return replace(part, gpu_memory_bytes=config.gpu_memory_bytes or config.memory_bytes)
        return replace(
            part,
            memory_bytes=part.memory_bytes or free_bytes * own // parts,
            threads=config.threads or max(1, cores // parts),
        )

    return tuple(map(device, range(count)))
