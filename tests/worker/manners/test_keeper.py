"""What changes in the settings file or at the machine holds at the next look, and is noted for commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.worker.manners.test_verdict import Told
from worker.config import change_settings
from worker.manners.applied import read_applied
from worker.manners.keeper import CONDITIONS_EVERY, COUNTED_EVERY, Keeper, Manners
from worker.manners.limits import Limits
from worker.manners.settings_file import SETTINGS_FILE, stamp


@dataclass
class World:
    """A keeper over a folder, at noon, on a machine that tells what a test says."""

    folder: Path
    told: Told = field(default_factory=Told)
    bytes_today: int = 0
    heard: list[Manners] = field(default_factory=list)
    keeper: Keeper = field(init=False)

    def __post_init__(self) -> None:
        def memory_of(settings: Mapping[str, Any]) -> tuple[int, int]:
            return int(settings.get("memory_bytes", 0)), 0

        self.keeper = Keeper(
            self.folder,
            self.told,
            self.heard.append,
            lambda: ("2026-11-25", self.bytes_today),
            memory_of,
            lambda: datetime(2026, 11, 25, 12),
        )

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.keeper.look()


def test_a_change_of_the_file_holds_at_the_next_look(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.look(3)
    assert world.heard == []
    change_settings(tmp_path, {"cpu_percent": 40.0, "memory_bytes": 1 << 30})
    world.look()
    assert world.heard == [Manners(Limits(cpu_percent=40.0), 1 << 30)]
    applied = read_applied(tmp_path)
    assert applied is not None
    assert applied.stamp == stamp(tmp_path)
    world.look(3)
    assert len(world.heard) == 1


def test_a_pause_of_the_owner_and_its_end_are_heard_at_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    change_settings(tmp_path, {"paused": True})
    world.look()
    change_settings(tmp_path, {"paused": None})
    world.look()
    assert [manners.paused for manners in world.heard] == ["by its owner", ""]


def test_the_machine_is_looked_at_now_and_then(tmp_path: Path) -> None:
    world = World(tmp_path)
    change_settings(tmp_path, {"on_battery": "pause"})
    world.told.battery = False
    world.look()
    world.told.battery = True
    world.look(CONDITIONS_EVERY)
    world.told.battery = None
    world.look(CONDITIONS_EVERY)
    assert [manners.paused for manners in world.heard] == ["", "on battery", ""]
    applied = read_applied(tmp_path)
    assert applied is not None
    assert applied.unknown == ("the battery",)


def test_a_days_bytes_pause_and_are_noted_now_and_then(tmp_path: Path) -> None:
    world = World(tmp_path)
    change_settings(tmp_path, {"day_bytes": 2 << 20})
    world.look()
    world.bytes_today = 1 << 20
    world.look(COUNTED_EVERY)
    applied = read_applied(tmp_path)
    assert applied is not None
    assert (applied.day, applied.day_bytes, applied.paused) == ("2026-11-25", 1 << 20, "")
    world.bytes_today = 2 << 20
    world.look(CONDITIONS_EVERY)
    assert world.keeper.manners.paused == "2.0 MiB of today's 2.0 MiB are used"
    world.bytes_today = 3 << 20
    world.keeper.stop()
    applied = read_applied(tmp_path)
    assert applied is not None
    assert applied.day_bytes == 3 << 20


def test_a_damaged_file_changes_nothing_and_says_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    change_settings(tmp_path, {"cpu_percent": 40.0})
    world.look()
    for text in ("cpu_percent = ", "cpu_percent = 0"):
        (tmp_path / SETTINGS_FILE).write_text(text)
        world.look()
        assert world.keeper.manners.limits.cpu_percent == 40.0
        applied = read_applied(tmp_path)
        assert applied is not None
        assert applied.error
        assert applied.stamp == stamp(tmp_path)
