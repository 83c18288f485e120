"""Program that reports this machine's device once: one line of JSON, then it ends.

Run by ``worker.machine.facts``, since looking at the device takes torch: with --device, --threads and
--memory as ``WorkerConfig`` has them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

from atoll.errors import AtollError
from worker.config import WorkerConfig
from worker.machine.device import versions
from worker.machine.own_share import held_bytes
from worker.machine.torch_device import GpuEnergy, device_rates, find_device, torch_device


def report(device: str, threads: int, memory_bytes: int) -> dict[str, Any]:
    """What is found, or under "error" why the device cannot be used."""
    try:
        found = find_device(
            WorkerConfig("localhost", device=device, threads=threads, memory_bytes=memory_bytes)
        )
        found = replace(found, own_bytes=found.own_bytes or held_bytes())
        rates = device_rates(torch_device(found))
    except (AtollError, RuntimeError, MemoryError) as error:
        return {"error": str(error)}
    counts_energy = GpuEnergy(device, found).joules() > 0.0
    known = {"rates": asdict(rates), "versions": versions(), "counts_energy": counts_energy}
    return {"device": asdict(found), **known}


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
