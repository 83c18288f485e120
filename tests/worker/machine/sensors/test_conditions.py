"""What a machine tells of its battery, temperature and use, by files as Linux has them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from worker.machine.sensors.conditions import MachineConditions

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's own files")
NOW_S = 1_000_000.0


def machine(
    folder: Path, files: dict[str, str], seat: str = "", terminals: tuple[str, ...] = ()
) -> MachineConditions:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return MachineConditions(
        folder / "supplies",
        folder / "zones",
        folder / "dev",
        lambda _: seat,
        lambda: terminals,
        lambda: NOW_S,
    )


def supply(name: str, **facts: str) -> dict[str, str]:
    return {f"supplies/{name}/{fact}": text for fact, text in facts.items()}


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, None),
        (supply("AC", type="Mains", online="1"), False),
        (supply("AC", type="Mains", online="0") | supply("B", type="Battery", status="Discharging"), True),
        (supply("AC", type="Mains", online="1") | supply("B", type="Battery", status="Charging"), False),
        (supply("B", type="Battery", status="Discharging"), True),
        (supply("B", type="Battery", status="Unknown"), None),
        (supply("mouse", type="Battery", status="Discharging", scope="Device"), None),
    ],
)
def test_a_battery_is_used_where_no_mains_supply_has_power(
    tmp_path: Path, files: dict[str, str], told: bool | None
) -> None:
    assert machine(tmp_path, files).on_battery() is told


def test_the_hottest_plausible_sensor_counts(tmp_path: Path) -> None:
    assert machine(tmp_path, {}).celsius() is None
    zones = {f"zones/thermal_zone{n}/temp": t for n, t in enumerate(("45000", "0", "-273000", "61500", "x"))}
    assert machine(tmp_path, zones | {"zones/cooling_device0/temp": "99000"}).celsius() == 61.5


def test_use_is_told_by_the_seat_and_by_terminals(tmp_path: Path) -> None:
    assert machine(tmp_path, {}).idle_s() is None
    idle = f"IdleHint=yes\nIdleSinceHint={int((NOW_S - 300) * 1e6)}\n"
    assert machine(tmp_path, {}, idle).idle_s() == pytest.approx(300.0)
    assert machine(tmp_path, {}, "IdleHint=no\nIdleSinceHint=0\n").idle_s() == 0.0
    found = machine(tmp_path, {"dev/pts/0": "", "dev/tty1": ""}, idle, ("pts/0", "tty1", "../x", "pts/9"))
    for name, ago_s in (("pts/0", 90), ("tty1", 4000)):
        os.utime(tmp_path / "dev" / name, (NOW_S - ago_s, NOW_S - ago_s))
    assert found.idle_s() == pytest.approx(90.0)


def test_this_machine_is_asked_without_an_error() -> None:
    here = MachineConditions()
    assert here.on_battery() in (True, False, None)
    assert here.celsius() is None or 1.0 < here.celsius() < 150.0  # type: ignore[operator]
    assert here.idle_s() is None or here.idle_s() >= 0.0  # type: ignore[operator]
