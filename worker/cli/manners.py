"""`atoll-worker limits`, `config`, `pause` and `resume`: what a guest may take of this machine, and when."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from atoll.errors import UsageError
from hostos.command_line import AsJson, err, out, print_json
from hostos.units import parse_size, shown_size
from worker.cli.options import StateDir
from worker.cli.running import running_process
from worker.config import WorkerConfig, change_settings, default_state_dir
from worker.manners.applied import Applied, read_applied
from worker.manners.explained import EXPLAINED
from worker.manners.limits import LIMIT_NAMES, Limits, limits_from
from worker.manners.settings_file import SETTINGS_FILE, read_settings, stamp

TAKEN_UP_S = 5.0  # a daemon looks a few times a second
LOOK_S = 0.05
MEMORY = ("memory_bytes", "gpu_memory_bytes")


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `atoll-worker` command."""
    app.command(
        epilog="Examples: atoll-worker limits; atoll-worker limits --cpu 50 --upload-mbit 5 "
        "--when-used pause; atoll-worker limits --reset"
    )(limits)
    app.command(epilog="Example: atoll-worker config --json")(config)
    app.command(epilog="Example: atoll-worker pause")(pause)
    app.command(epilog="Example: atoll-worker resume")(resume)


def limits(
    cpu: Annotated[
        float | None,
        typer.Option(metavar="PERCENT", help="Percentage of its compute time, or the GPU's; 1 to 100."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Total memory that it may take; 0: 85 % of what is free for a stage."
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="GPU memory that it may take; 0: the same as --memory.")
    ] = None,
    upload_mbit: Annotated[
        float | None, typer.Option(metavar="M", help="Maximum rate of everything it sends; 0: unlimited.")
    ] = None,
    download_mbit: Annotated[
        float | None, typer.Option(metavar="M", help="Maximum rate of everything it receives; 0: unlimited.")
    ] = None,
    per_day: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes per day, both directions; then it pauses. 0: unlimited."),
    ] = None,
    hours: Annotated[
        str | None,
        typer.Option(metavar="H", help="Local hours in which it works, e.g. 22:00-08:00; '': always."),
    ] = None,
    on_battery: Annotated[
        str | None, typer.Option(metavar="run|pause", help="What it does on battery; default run.")
    ] = None,
    when_used: Annotated[
        str | None,
        typer.Option(metavar="run|pause", help="What it does while someone uses this machine; default run."),
    ] = None,
    idle_minutes: Annotated[
        float | None,
        typer.Option(metavar="MIN", help="Minutes without input until this machine is unused; default 3."),
    ] = None,
    max_celsius: Annotated[
        float | None,
        typer.Option(metavar="C", help="Temperature of the hottest sensor at which it pauses; 0: never."),
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="First reset all limits to their defaults.")] = False,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """Show or set what this machine's worker may use, and when. A running worker obeys a change at once."""
    folder = state_dir or default_state_dir()
    given: dict[str, Any] = {
        "cpu_percent": cpu,
        "memory_bytes": None if memory is None else parse_size(memory),
        "gpu_memory_bytes": None if gpu_memory is None else parse_size(gpu_memory),
        "upload_mbit": upload_mbit,
        "download_mbit": download_mbit,
        "day_bytes": None if per_day is None else parse_size(per_day),
        "hours": hours,
        "on_battery": on_battery,
        "when_used": when_used,
        "idle_minutes": idle_minutes,
        "max_celsius": max_celsius,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if reset:
        names = {*LIMIT_NAMES, *MEMORY} - {"paused"}
        changes = {**dict.fromkeys(names), **changes}
    applied = _change(folder, changes) if changes else read_applied(folder)
    _show_limits(folder, applied, json)
    return 0


def pause(state_dir: StateDir = None, json: AsJson = False) -> int:
    """Pause this machine's worker: it leaves its job, frees memory and GPU, and stays a member of the fleet.

    It stays paused, even after restarts, until `atoll-worker resume`.
    """
    return _set_paused(state_dir, json, paused=True)


def resume(state_dir: StateDir = None, json: AsJson = False) -> int:
    """Let a paused worker work again, within its limits."""
    return _set_paused(state_dir, json, paused=False)


def config(state_dir: StateDir = None, json: AsJson = False) -> int:
    """Show every setting of this machine's worker: its value, where that comes from, and what it means."""
    folder = state_dir or default_state_dir()
    settings = read_settings(folder)
    file = folder / SETTINGS_FILE
    defaults = {**asdict(WorkerConfig(host="-", state_dir=folder)), **asdict(Limits()), "host": ""}
    values = {name: settings.get(name, defaults[name]) for name in EXPLAINED}
    sources = {name: "settings" if name in settings else "default" for name in EXPLAINED}
    unknown = sorted(settings.keys() - {*EXPLAINED, "insecure"})
    if json:
        rows = [
            {"name": n, "value": values[n], "from": sources[n], "meaning": text}
            for n, text in EXPLAINED.items()
        ]
        print_json({"file": str(file), "settings": rows, "unknown": unknown})
        return 0
    out.print(f"{file}{'' if file.exists() else ' (not there yet)'}", soft_wrap=True, markup=False)
    table = Table("setting", "value", "from", "meaning", box=None)
    for name, text in EXPLAINED.items():
        table.add_row(name, _shown(name, values[name]), sources[name], text)
    out.print(table)
    if unknown:
        err.print(f"not a setting, and ignored: {', '.join(unknown)}", soft_wrap=True, markup=False)
    return 0


def _set_paused(state_dir: Path | None, json: bool, *, paused: bool) -> int:
    folder = state_dir or default_state_dir()
    applied = _change(folder, {"paused": True if paused else None})
    process = running_process(folder)
    reason = applied.paused if applied is not None else ""
    if json:
        print_json({"process": process, "paused": reason or paused, "taken_up": applied is not None})
    elif applied is not None and reason:
        out.print(f"process {process} is paused: {reason}", markup=False)
    elif applied is not None:
        out.print(f"process {process} works")
    else:
        out.print(
            f"no worker runs from {folder}; it will start {'paused' if paused else 'working'}", markup=False
        )
    return 0


def _change(folder: Path, changes: dict[str, Any]) -> Applied | None:
    """Write the settings; returns what the running daemon made of them, None where none runs."""
    merged = {**read_settings(folder), **changes}
    merged = {name: value for name, value in merged.items() if value is not None}
    limits_from(merged)  # whose figures are checked where they are made
    WorkerConfig(host="-", **{name: merged[name] for name in MEMORY if isinstance(merged.get(name), int)})
    change_settings(folder, changes)
    wanted = stamp(folder)
    until_s = time.monotonic() + TAKEN_UP_S
    while running_process(folder) is not None:
        applied = read_applied(folder)
        if applied is not None and applied.stamp == wanted:
            if applied.error:
                raise UsageError(applied.error)
            return applied
        if time.monotonic() > until_s:
            raise UsageError(
                f"the worker of {folder} has not taken it up within {TAKEN_UP_S:g} s; does it still join? "
                "The setting is kept"
            )
        time.sleep(LOOK_S)
    return None


def _show_limits(folder: Path, applied: Applied | None, json: bool) -> None:
    settings = read_settings(folder)
    found = limits_from(settings)
    values = {**asdict(found), **{name: settings.get(name, 0) for name in MEMORY}}
    running = running_process(folder) is not None
    applied = applied if running else None
    if json:
        more = (
            {"paused": applied.paused, "unknown": applied.unknown, "day_bytes": applied.day_bytes}
            if applied
            else None
        )
        print_json({"limits": values, "now": more})
        return
    table = Table("limit", "value", "meaning", box=None)
    for name in EXPLAINED:
        if name in values and name != "paused":
            table.add_row(name, _shown(name, values[name]), EXPLAINED[name])
    out.print(table)
    if applied is None:
        out.print("no worker runs" + ("; it will start paused" if found.paused else ""))
        return
    word = f"paused, {applied.paused}" if applied.paused else "working"
    out.print(f"now: {word}; {shown_size(applied.day_bytes)} sent and received today", markup=False)
    for what in applied.unknown:
        err.print(f"cannot be told on this machine, so that limit is not held: {what}", soft_wrap=True)


def _shown(name: str, value: object) -> str:
    if value in ("", [], ()):
        return "-"
    if name.endswith("_bytes") and isinstance(value, int):
        return shown_size(value) if value else "0"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
