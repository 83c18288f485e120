"""The view of `atoll-worker join` on a terminal: what this machine does for others, in a few quiet lines.

The log goes into a file meanwhile; of it the last warning is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import structlog
from rich.live import Live
from rich.table import Table
from rich.text import Text

from atoll.errors import StorageError
from hostos.command_line import err
from hostos.files.bounded_log import BoundedLog
from hostos.units import counted, shown_size

if TYPE_CHECKING:
    from pathlib import Path

    from worker.manners.activity import Activity, DeviceActivity

LOG_FOLDER = "log"
EVERY_S = 1.0
DIM = "dim"
QUIET = frozenset({"debug", "info"})
MAX_WORDS = 300  # of a log line that is shown
DOES = {
    "connecting": "looks for the coordinator",
    "idle": "waits for work",
    "paused": "is paused",
    "loading": "loads a part of {job}",
    "ready": "waits for the others of {job}",
    "standing by": "stands by for {job}",
    "joining": "loads {job}",
    "enrolled": "waits for a round of {job}",
    "training round": "trains round {step} of {job} on its own data",
    "evaluating round": "evaluates round {step} of {job} on its own data",
    "evaluating": "evaluates {job}",
    "failed": "could not go on with {job}, and waits for another plan",
    "draining": "is leaving",
    "gone": "has left",
}


@dataclass(frozen=True, slots=True)
class Use:
    """What the worker's processes take of the machine now."""

    cores: float
    of_cores: int
    memory_bytes: int


class Notes:
    """structlog's last processor: every event goes to ``folder``, the last warning is kept to be shown."""

    def __init__(self, folder: Path) -> None:
        self._log = BoundedLog(folder)
        self.last = ""

    def __call__(self, _: object, level: str, fields: MutableMapping[str, Any]) -> str:
        """Raises structlog's DropEvent: nothing is printed."""
        with suppress(StorageError):  # a full disk costs lines, never the worker
            self._log.append({key: str(value) for key, value in fields.items()})
        if level not in QUIET:
            words = [
                f"{key}={value}"
                for key, value in fields.items()
                if key not in ("event", "timestamp", "level")
            ]
            at = time.strftime("%H:%M:%S")
            self.last = f"{at} {fields.get('event', '')} {' '.join(words)}"[:MAX_WORDS]
        raise structlog.DropEvent


class Meter:
    """Measures what this process and its children take."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._then_s, self._spent_s = time.monotonic(), 0.0

    def look(self) -> Use:
        """The use since the last look; cores 0 at the first."""
        spent_s, memory = 0.0, 0
        for process in (self._own, *self._own.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                spent_s += times.user + times.system
                memory += process.memory_info().rss
        now_s = time.monotonic()
        passed_s = max(1e-3, now_s - self._then_s)
        cores = max(0.0, spent_s - self._spent_s) / passed_s if self._spent_s else 0.0
        self._then_s, self._spent_s = now_s, spent_s
        return Use(cores, psutil.cpu_count() or 1, memory)


@contextmanager
def shown_live(activity: Callable[[], Activity | None], notes: Notes) -> Iterator[None]:
    """Show what the worker does until the block ends; the last view stays on the terminal."""
    meter, began_s, kept = Meter(), time.time(), Text("joins ...", style=DIM)

    def now() -> Any:
        found = activity()
        return kept if found is None else view(found, meter.look(), began_s, time.time(), notes.last)

    with Live(get_renderable=now, console=err, refresh_per_second=1 / EVERY_S):
        yield


def view(activity: Activity, use: Use, began_s: float, now_s: float, last: str) -> Table:
    """The screen; times are Unix times."""
    limits, manners = activity.manners.limits, activity.manners
    table = Table.grid(padding=(0, 2))
    table.add_column(style=DIM, no_wrap=True)
    table.add_column(overflow="fold")
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(began_s))
    table.add_row("for", f"{activity.coordinator}, since {since} ({_spell(now_s - began_s)})")
    for device in activity.devices:
        table.add_row("worker", Text.assemble(f"{device.name} ", (does(device), "bold")))
    share = f", at most {limits.cpu_percent:g} % of the time" if limits.cpu_percent < 100 else ""
    threads = counted(activity.threads, "thread")
    table.add_row("takes", f"{use.cores:.1f} of {use.of_cores} cores ({threads}{share})")
    table.add_row("memory", f"{shown_size(use.memory_bytes)}; at most {activity.memory}")
    today = f"{shown_size(activity.today_bytes)} today"
    today += f", at most {shown_size(limits.day_bytes)}" if limits.day_bytes else ""
    way = f"{shown_size(activity.received_bytes)} in, {shown_size(activity.sent_bytes)} out; {today}"
    table.add_row("traffic", way)
    if manners.paused:
        table.add_row("paused", Text(manners.paused, style="yellow"))
    if last:
        table.add_row("noted", Text(last, style="yellow"))
    move = "`atoll-worker resume` goes on" if manners.paused else "`atoll-worker pause` frees the machine"
    table.add_row("you", Text(f"{move}, `atoll-worker limits` bounds it, Ctrl+C leaves", style=DIM))
    return table


def does(device: DeviceActivity) -> str:
    """What a device does, in words."""
    if not device.connected and device.phase not in ("draining", "gone", "paused"):
        return "looks for the coordinator" + (f"; keeps its part of {device.job}" if device.job else "")
    words = DOES.get(device.phase, "trains {job}, step {step}")
    return words.format(job=device.job, step=device.step + 1)


def _spell(seconds: float) -> str:
    minutes = int(max(0.0, seconds) // 60)
    hours, days = minutes // 60, minutes // 1440
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
