"""Limits: what can be asked of a guest."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from atoll.errors import UsageError
from hostos.units import counted, shown_energy, shown_size, shown_work
from worker.manners.limits import Limits, limits_from


def at(hour: int, minute: int = 0) -> datetime:
    return datetime(2026, 11, 25, hour, minute)


@pytest.mark.parametrize(
    ("hours", "works", "rests"),
    [
        ("", [at(0), at(12)], []),
        ("22:00-08:00", [at(22), at(23, 59), at(0), at(7, 59)], [at(8), at(21, 59)]),
        ("9-12, 14:30-18", [at(9), at(11, 59), at(14, 30), at(17, 59)], [at(12), at(14, 29), at(18), at(8)]),
        ("0-24", [at(0), at(23, 59)], []),
    ],
)
def test_hours_may_pass_midnight(hours: str, works: list[datetime], rests: list[datetime]) -> None:
    limits = Limits(hours=hours)
    assert all(limits.works_at(now) for now in works)
    assert not any(limits.works_at(now) for now in rests)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cpu_percent": 0},
        {"cpu_percent": 101.0},
        {"cpu_percent": "half"},
        {"cpu_percent": True},
        {"upload_mbit": 0.1},
        {"download_mbit": -1},
        {"upload_mbit": float("nan")},
        {"day_bytes": 5},
        {"hours": "25-3"},
        {"hours": "8-8"},
        {"hours": "8:75-9"},
        {"hours": "all day"},
        {"on_battery": "walk"},
        {"when_used": ""},
        {"idle_minutes": 0},
        {"max_celsius": 5},
        {"paused": "yes"},
    ],
)
def test_impossible_limits_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        limits_from(wrong)


def test_what_is_not_set_limits_nothing() -> None:
    assert limits_from({"host": "lab"}) == Limits()
    assert limits_from({"day_bytes": "2GB"}).day_bytes == 2 * 10**9


def test_sizes_are_shown_in_the_largest_unit_that_fits() -> None:
    assert [shown_size(n) for n in (0, 1023, 1 << 10, 3 << 29)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 GiB",
    ]


def test_energy_is_shown_in_hours_of_watts() -> None:
    assert [shown_energy(j) for j in (36, 5400, 9e6)] == ["0.01 Wh", "1.50 Wh", "2.50 kWh"]


def test_short_work_is_not_shown_as_none() -> None:
    assert [shown_work(s) for s in (0.04, 7.25, 1800.0, 5400.0)] == ["0.0 s", "7.2 s", "30.0 min", "1.50 h"]
    assert [counted(n, "thread") for n in (0, 1, 2)] == ["0 threads", "1 thread", "2 threads"]
