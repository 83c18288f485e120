"""Facts of this machine's device, asked of a short-lived process that loads torch in our place."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll import version
from atoll.errors import AtollError, BadFrame, UsageError
from protos.text_limits import clean
from worker.machine.device import Device, DeviceRates

if TYPE_CHECKING:
    from worker.config import WorkerConfig

PROGRAM = (sys.executable, "-P", "-m", "worker.machine.report")
WITHIN_S = 120.0  # importing torch takes 2 s on a core of its own, many times that on a part of one
MAX_BYTES = 64 << 10  # of all that it prints
MAX_TEXT_CHARS, MAX_REASON_CHARS = 200, 1000
MAX_INTEGER, MAX_RATE = 1 << 60, 1e12


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device, how fast it is, the versions of Atoll, torch, Python and the platform, and whether the device
    counts the energy that it takes."""

    device: Device
    rates: DeviceRates
    versions: dict[str, str]
    counts_energy: bool = False


def ask_facts(
    config: WorkerConfig, program: Sequence[str] = PROGRAM, within_s: float = WITHIN_S
) -> DeviceFacts:
    """Facts of the device that ``config`` lends.

    UsageError when it is not there or cannot be used; AtollError when the process ends without an answer,
    prints too much or takes longer than ``within_s``; BadFrame when its answer is none.
    """
    command = [*program, config.device, str(config.threads), str(config.memory_bytes)]
    printed, how = _run(command, within_s)
    lines = [line for line in printed.decode(errors="replace").splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("{"):
            return _facts(line)
    last = f": {clean(lines[-1], MAX_REASON_CHARS)}" if lines else ""
    raise AtollError(f"cannot inspect the device: the process that inspects it {how}{last}")


def _run(command: Sequence[str], within_s: float) -> tuple[bytes, str]:
    """Everything that the process prints, and how it ended."""
    root = str(Path(version.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    late = threading.Event()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(within_s, end)
        timer.start()
        try:
            assert process.stdout is not None  # noqa: S101 - a pipe was asked for
            printed = process.stdout.read(MAX_BYTES + 1)
            if len(printed) > MAX_BYTES:
                process.kill()
                return b"", f"printed more than {MAX_BYTES >> 10} KiB"
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()  # also when we are interrupted
    if late.is_set():
        return printed, f"took longer than {within_s:.0f} s"
    return (
        printed,
        f"ended with signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}",
    )


def _facts(line: str) -> DeviceFacts:
    """Facts from a line of JSON. UsageError for the error that it reports, BadFrame for anything else."""
    try:
        found = json.loads(line)
        if "error" in found:
            raise UsageError(_text(found["error"], MAX_REASON_CHARS))
        device, rates, versions = found["device"], found["rates"], found["versions"]
        if device["kind"] not in ("cpu", "cuda") or not isinstance(versions, dict):
            raise ValueError(f"a device of kind {device['kind']!r}")
        return DeviceFacts(
            Device(
                kind=device["kind"],
                index=_integer(device["index"]),
                model=_text(device["model"]),
                threads=_integer(device["threads"]),
                memory_bytes=_integer(device["memory_bytes"]),
                memory_limit_bytes=_integer(device["memory_limit_bytes"]),
                instructions=_text(device["instructions"]),
                own_bytes=_integer(device.get("own_bytes", 0)),
            ),
            DeviceRates(_rate(rates["matmul_gflops"]), _rate(rates["memory_gbps"])),
            {name: _text(versions[name]) for name in ("atoll", "torch", "python", "platform")},
            found.get("counts_energy") is True,
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = clean(f"{type(error).__name__} {error}", MAX_TEXT_CHARS)
        raise BadFrame(f"facts of the device that cannot be read: {reason}") from None


def _text(value: Any, most: int = MAX_TEXT_CHARS) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} for a text")
    return clean(value, most)


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise ValueError("no count")
    return int(value)


def _rate(value: Any) -> float:
    if type(value) not in (int, float) or not (math.isfinite(value) and 0.0 <= value <= MAX_RATE):
        raise ValueError("no rate")
    return float(value)
