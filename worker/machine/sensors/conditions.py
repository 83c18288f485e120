"""Battery, temperature and use of this machine, as far as it tells; None stands for what it does not tell."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

SUPPLIES = Path("/sys/class/power_supply")
ZONES = Path("/sys/class/thermal")
DEVICES = Path("/dev")
LOGINCTL = ("loginctl", "show-seat", "seat0", "--property=IdleHint", "--property=IdleSinceHint")
ASK_S = 2.0


def _output(command: tuple[str, ...]) -> str:
    """What a command prints; "" where it is not there, fails, or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _terminals() -> list[str]:
    """Terminals of people who are logged in, below /dev."""
    try:
        return [user.terminal for user in psutil.users() if user.terminal]
    except (OSError, RuntimeError, psutil.Error):
        return []


class MachineConditions:
    """``Conditions`` of this machine. The arguments are where a test has others."""

    def __init__(
        self,
        supplies: Path = SUPPLIES,
        zones: Path = ZONES,
        devices: Path = DEVICES,
        output: Callable[[tuple[str, ...]], str] = _output,
        terminals: Callable[[], Iterable[str]] = _terminals,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._supplies, self._zones, self._devices = supplies, zones, devices
        self._output, self._terminals, self._clock = output, terminals, clock

    def on_battery(self) -> bool | None:
        """Whether it runs on battery: none of its mains supplies has power. None: there is no such supply
        listed, and no battery that says how it does."""
        if not sys.platform.startswith("linux"):
            battery = psutil.sensors_battery()
            return None if battery is None or battery.power_plugged is None else not battery.power_plugged
        kinds = {folder: _text(folder / "type") for folder in _folders(self._supplies)}
        mains = [_text(folder / "online") for folder, kind in kinds.items() if kind in ("Mains", "USB")]
        if "1" in mains:
            return False
        batteries = [
            _text(folder / "status")
            for folder, kind in kinds.items()
            if kind == "Battery" and _text(folder / "scope") != "Device"  # not of a mouse
        ]
        if "Discharging" in batteries:
            return True
        return None if not batteries or "Unknown" in batteries else bool(mains)

    def celsius(self) -> float | None:
        """Temperature of the hottest zone; None where there is no plausible sensor."""
        found = []
        for folder in _folders(self._zones):
            text = _text(folder / "temp").removeprefix("-")
            if folder.name.startswith("thermal_zone") and text.isdigit():
                found.append(int(text) / 1000)
        plausible = [degrees for degrees in found if 1.0 < degrees < 150.0]  # others are no readings
        return max(plausible, default=None)

    def idle_s(self) -> float | None:
        """Seconds since somebody used this machine: by the seat's session manager, and by the terminals of
        those who are logged in. None where neither tells."""
        found = [seconds for seconds in (self._seat_s(), self._terminals_s()) if seconds is not None]
        return min(found, default=None)

    def _seat_s(self) -> float | None:
        lines = self._output(LOGINCTL).splitlines()
        said = dict(line.split("=", 1) for line in lines if "=" in line)
        since = said.get("IdleSinceHint", "")
        if said.get("IdleHint") == "yes" and since.isdigit():
            return max(0.0, self._clock() - int(since) / 1e6)
        return 0.0 if said.get("IdleHint") == "no" else None

    def _terminals_s(self) -> float | None:
        used = []
        for name in self._terminals():
            path = self._devices / name
            if ".." not in Path(name).parts and path.exists():
                used.append(os.stat(path).st_atime)
        return max(0.0, self._clock() - max(used)) if used else None


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
