"""Limits: what a guest may take of this machine, and when. Data and checks only.

Of memory the limit is part of the worker's configuration, since plans are made with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from atoll.errors import UsageError
from hostos.units import parse_size

LEAST_CPU_PERCENT = 1.0
LEAST_MBIT = 1.0
"""On a slower link several messages under way hide the signs of life behind them."""
_HOURS = re.compile(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?")
WORDS = ("run", "pause")


@dataclass(frozen=True, slots=True)
class Limits:
    """Every limit at its default lets a guest take what it can. Local times; rates in Mbit/s."""

    cpu_percent: float = 100.0  # of the time of its compute threads (or the GPU), on average
    upload_mbit: float = 0.0  # to peers and the coordinator together; 0: unlimited
    download_mbit: float = 0.0
    day_bytes: int = 0  # both ways, from midnight to midnight; 0: unlimited
    hours: str = ""  # in which it works, as in "22:00-08:00"; "": all
    on_battery: str = "run"  # run | pause
    when_used: str = "run"  # run | pause: while somebody uses keyboard or mouse
    idle_minutes: float = 3.0  # without input, until nobody uses it
    max_celsius: float = 0.0  # of the hottest sensor; 0: any
    paused: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("cpu_percent", LEAST_CPU_PERCENT, 100.0),
            ("upload_mbit", LEAST_MBIT, 1e6),
            ("download_mbit", LEAST_MBIT, 1e6),
            ("day_bytes", 1 << 20, 1 << 50),
            ("idle_minutes", 0.1, 24 * 60.0),
            ("max_celsius", 20.0, 150.0),
        ):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            off = value == 0 and _DEFAULTS.get(name) == 0
            if not number or not (off or low <= value <= high):
                none = ", or 0 for none" if _DEFAULTS.get(name) == 0 else ""
                raise UsageError(f"{name} = {value!r}; give a number from {low:g} to {high:g}{none}")
        for name in ("on_battery", "when_used"):
            if getattr(self, name) not in WORDS:
                raise UsageError(f"{name} = {getattr(self, name)!r}; give run or pause")
        if not isinstance(self.paused, bool):
            raise UsageError(f"paused = {self.paused!r}; give true or false")
        _spans(self.hours)

    @property
    def cpu_share(self) -> float:
        return self.cpu_percent / 100.0

    def works_at(self, now: datetime) -> bool:
        """Return whether ``now``, a local time, lies in the hours in which it works."""
        spans = _spans(self.hours)
        minute = now.hour * 60 + now.minute
        return not spans or any(_within(minute, begin, end) for begin, end in spans)


_DEFAULTS: dict[str, Any] = {
    "cpu_percent": 100.0, "idle_minutes": 3.0, "upload_mbit": 0, "download_mbit": 0, "day_bytes": 0,
    "max_celsius": 0,
}  # fmt: skip
LIMIT_NAMES = tuple(field.name for field in fields(Limits))


def limits_from(settings: Mapping[str, Any]) -> Limits:
    """Return the limits in the settings file, defaults for the rest. UsageError when one cannot be."""
    found = {name: settings[name] for name in LIMIT_NAMES if name in settings}
    if isinstance(found.get("day_bytes"), str):  # as people write it
        found["day_bytes"] = parse_size(found["day_bytes"])
    return Limits(**found)


def shown_limits(limits: Limits) -> dict[str, Any]:
    """Return those limits that are not at their defaults, by name."""
    usual = Limits()
    return {
        name: getattr(limits, name)
        for name in LIMIT_NAMES
        if name != "paused" and getattr(limits, name) != getattr(usual, name)
    }


def _spans(hours: str) -> list[tuple[int, int]]:
    """'22:00-08:00, 12-13' -> [(1320, 480), (720, 780)], minutes of the day; UsageError otherwise."""
    spans = []
    for part in str(hours).replace(" ", "").split(",") if hours else ():
        match = _HOURS.fullmatch(part)
        begin, end = (
            (int(match[1]) * 60 + int(match[2] or 0), int(match[3]) * 60 + int(match[4] or 0))
            if match
            else (-1, -1)
        )
        if not (0 <= begin < 1440 and 0 < end <= 1440 and begin != end) or (
            match and max(int(match[2] or 0), int(match[4] or 0)) > 59
        ):
            raise UsageError(f"hours = {hours!r}; write for example 22:00-08:00, or 9-12,14-18")
        spans.append((begin, end))
    return spans


def _within(minute: int, begin: int, end: int) -> bool:
    return begin <= minute < end if begin < end else minute >= begin or minute < end
