"""Numbers and words for people: bytes, seconds, rates, bars, rows of tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Table

    from protos import atoll_control_pb2 as pb

_BARS = "▁▂▃▄▅▆▇█"
DIM = "dim"


def add_row(table: Table, *cells: str | Text) -> None:
    """Add a row whose texts stand as they are, whoever wrote them: no markup, no emoji codes."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def in_bytes(n_bytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def in_seconds(seconds: float) -> str:
    """0.0123 -> "12.3 ms", 75 -> "1m15s", 7300 -> "2h01m"."""
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def in_bits(bits_per_s: float) -> str:
    """Bits a second in the unit that links are sold in."""
    if bits_per_s >= 1e9:
        return f"{bits_per_s / 1e9:.2f} Gbit/s"
    return f"{bits_per_s / 1e6:.1f} Mbit/s"


def share_bar(share: float, width: int = 10) -> str:
    """0.5 -> "█████·····  50 %"."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return "█" * filled + "·" * (width - filled) + f" {share:4.0%}"


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """The last ``width`` values as a row of bars."""
    shown = [value for value in values if value == value][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


def reason_of(update: pb.JobUpdate) -> str:
    """Why a job stands where it does, and when one that waits is expected to begin."""
    if not update.HasField("starts_s"):
        return update.reason
    day = "%H:%M" if update.starts_s - update.time_s < 43_200.0 else "%Y-%m-%d %H:%M"
    return f"{update.reason}; starts about {time.strftime(day, time.localtime(update.starts_s))}"
