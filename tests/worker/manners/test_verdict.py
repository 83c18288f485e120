"""Whether a guest may work: every reason by itself, and what a machine does not tell."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import pytest

from worker.manners.limits import Limits
from worker.manners.verdict import Verdict, judge

NOON = datetime(2026, 11, 25, 12)


@dataclass
class Told:
    """A machine that tells what a test says."""

    battery: bool | None = None
    degrees: float | None = None
    idle: float | None = None

    def on_battery(self) -> bool | None:
        return self.battery

    def celsius(self) -> float | None:
        return self.degrees

    def idle_s(self) -> float | None:
        return self.idle


@pytest.mark.parametrize(
    ("limits", "pauses", "works", "word"),
    [
        (Limits(on_battery="pause"), Told(battery=True), Told(battery=False), "on battery"),
        (Limits(when_used="pause", idle_minutes=2), Told(idle=119.0), Told(idle=120.0), "is used"),
        (Limits(max_celsius=80.0), Told(degrees=80.0), Told(degrees=79.9), "hotter than 80 C"),
    ],
)
def test_a_condition_pauses_only_where_a_limit_asks_for_it(
    limits: Limits, pauses: Told, works: Told, word: str
) -> None:
    assert word in judge(limits, pauses, NOON, 0, Verdict()).paused
    assert judge(limits, works, NOON, 0, Verdict()) == Verdict()
    assert judge(Limits(), pauses, NOON, 0, Verdict()) == Verdict()


def test_what_a_machine_does_not_tell_is_said_and_pauses_nothing() -> None:
    limits = Limits(on_battery="pause", when_used="pause", max_celsius=80.0)
    found = judge(limits, Told(), NOON, 0, Verdict())
    assert found.paused == ""
    assert found.unknown == ("the battery", "whether this machine is used", "the temperature")


def test_who_grew_too_hot_cools_down_before_it_goes_on() -> None:
    limits = Limits(max_celsius=80.0)
    hot = judge(limits, Told(degrees=81.0), NOON, 0, Verdict())
    still = judge(limits, Told(degrees=77.0), NOON, 0, hot)
    assert still == hot
    assert judge(limits, Told(degrees=74.0), NOON, 0, still) == Verdict()
    assert judge(limits, Told(degrees=77.0), NOON, 0, Verdict()) == Verdict()


def test_hours_bytes_and_the_owner_give_their_reasons_together() -> None:
    limits = Limits(hours="22-8", day_bytes=1 << 30, paused=True)
    words = judge(limits, Told(), NOON, 1 << 30, Verdict()).paused
    assert words == "by its owner; outside its hours, 22-8; 1.0 GiB of today's 1.0 GiB are used"
    assert judge(limits, Told(), NOON, 0, Verdict()).paused == "by its owner; outside its hours, 22-8"
