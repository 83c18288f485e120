"""Whether a guest may work now, and why not: limits held against what the machine tells. No clock here."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from hostos.units import shown_size
from worker.manners.limits import Limits

COOLER_CELSIUS = 5.0  # below the limit before a guest that grew too hot goes on


class Conditions(Protocol):
    """This machine's battery, temperature and use; None: it does not tell."""

    def on_battery(self) -> bool | None: ...

    def celsius(self) -> float | None: ...

    def idle_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """``paused``: why a guest must not work now, "" where it may. ``unknown``: what limits ask for and this
    machine does not tell; those limits are not held, and nothing is guessed."""

    paused: str = ""
    unknown: tuple[str, ...] = ()


def judge(limits: Limits, conditions: Conditions, now: datetime, day_bytes: int, before: Verdict) -> Verdict:
    """Return whether a guest may work at the local time ``now`` after ``day_bytes`` of today's traffic.

    ``before``: the verdict of a moment ago. Only what a limit asks for is looked at.
    """
    reasons: list[str] = []
    unknown: list[str] = []
    if limits.paused:
        reasons.append("by its owner")
    if not limits.works_at(now):
        reasons.append(f"outside its hours, {limits.hours}")
    if 0 < limits.day_bytes <= day_bytes:
        reasons.append(f"{shown_size(day_bytes)} of today's {shown_size(limits.day_bytes)} are used")
    if limits.on_battery == "pause":
        _look(conditions.on_battery(), "on battery", "the battery", reasons, unknown)
    if limits.when_used == "pause":
        idle_s = conditions.idle_s()
        used = None if idle_s is None else idle_s < 60.0 * limits.idle_minutes
        _look(used, "this machine is used", "whether this machine is used", reasons, unknown)
    if limits.max_celsius:
        celsius = conditions.celsius()
        grew_hot = any(reason.startswith(_HOT) for reason in before.paused.split("; "))
        most = limits.max_celsius - (COOLER_CELSIUS if grew_hot else 0.0)
        hot = None if celsius is None else celsius >= most
        _look(hot, f"{_HOT} {limits.max_celsius:g} C", "the temperature", reasons, unknown)
    return Verdict("; ".join(reasons), tuple(unknown))


_HOT = "hotter than"


def _look(found: bool | None, reason: str, what: str, reasons: list[str], unknown: list[str]) -> None:
    if found is None:
        unknown.append(what)
    elif found:
        reasons.append(reason)
