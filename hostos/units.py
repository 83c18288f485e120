"""Figures as people write them: sizes, energy, time."""

from __future__ import annotations

import re

from atoll.errors import UsageError

MIB, GIB = 2**20, 2**30
DAY_S = 86_400.0
_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str) -> int:
    """'4GiB', '500MB', '123456' -> bytes; UsageError otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None:
        raise UsageError(f"size {text!r}; write for example 4GiB, 500MB or a number of bytes")
    unit = match[2] or ""
    return int(float(match[1]) * {**_UNITS, **_BINARY}[unit])


def shown_size(nbytes: float) -> str:
    """123456789 -> '117.7 MiB'."""
    size, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"


def shown_energy(joules: float) -> str:
    """5400 -> '1.50 Wh', 9e6 -> '2.50 kWh'."""
    hours = joules / 3600.0
    return f"{hours:.2f} Wh" if hours < 1000.0 else f"{hours / 1e3:.2f} kWh"


def shown_work(seconds: float) -> str:
    """7.25 -> '7.2 s', 1800 -> '30.0 min', 5400 -> '1.50 h'."""
    if seconds < 120.0:
        return f"{seconds:.1f} s"
    return f"{seconds / 60.0:.1f} min" if seconds < 3600.0 else f"{seconds / 3600.0:.2f} h"


def counted(number: int, what: str) -> str:
    """1 -> '1 thread', 2 -> '2 threads'."""
    return f"{number} {what}{'s' * (number != 1)}"
