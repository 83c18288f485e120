"""`atoll-worker install`: the worker as a service of this user, started by the system's own manager."""

from __future__ import annotations

import os
import platform
import plistlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from atoll.errors import UsageError
from hostos.command_line import AsJson, err, out, print_json
from hostos.files.private_files import write_private
from hostos.files.refusals import disk
from worker.cli.options import StateDir
from worker.config import default_state_dir, make_config

NAME = "atoll-worker"
LABEL = "org.atoll.worker"
# Errors that another start does not cure: wrong usage, no access, another protocol.
NO_RESTART = (2, 6, 7)
ASK_S = 20.0
WINDOWS = "docs/tutorials/volunteer.md shows a task for Windows' scheduler"


def register(app: typer.Typer) -> None:
    """Add this module's command to the `atoll-worker` command."""
    app.command(
        epilog="Examples: atoll-worker install --dry-run; atoll-worker install; atoll-worker install --remove"
    )(install)


@dataclass(frozen=True, slots=True)
class Service:
    """A service's file, and the commands that begin and end it."""

    path: Path
    text: str
    begin: tuple[tuple[str, ...], ...]
    end: tuple[tuple[str, ...], ...]
    hint: str = ""


def systemd_unit(state_dir: Path, home: Path) -> Service:
    """Return the unit for the user's systemd: restarted when it fails, not when it was asked to leave."""
    command = " ".join(_quoted(word) for word in _command(state_dir))
    text = f"""[Unit]
Description=Atoll worker: lends this machine, within its owner's limits
After=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={command}
Restart=on-failure
RestartSec=5
RestartPreventExitStatus={" ".join(map(str, NO_RESTART))}
KillSignal=SIGTERM
TimeoutStopSec=10
Nice=10
CPUWeight=20
IOSchedulingClass=idle
UMask=0077

[Install]
WantedBy=default.target
"""
    unit = f"{NAME}.service"
    return Service(
        home / ".config" / "systemd" / "user" / unit,
        text,
        (("systemctl", "--user", "daemon-reload"), ("systemctl", "--user", "enable", "--now", unit)),
        (("systemctl", "--user", "disable", "--now", unit),),
        "It runs while you are logged in; `loginctl enable-linger` lets it run before, too.",
    )


def launchd_agent(state_dir: Path, home: Path, user: int) -> Service:
    """Return the agent for the user's launchd: background work, started at login, restarted when it fails."""
    log = str(state_dir / "worker.log")
    found = {
        "Label": LABEL,
        "ProgramArguments": list(_command(state_dir)),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ProcessType": "Background",
        "LowPriorityIO": True,
        "Nice": 10,
        "Umask": 0o077,
        "StandardErrorPath": log,
    }
    path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    return Service(
        path,
        plistlib.dumps(found).decode(),
        (("launchctl", "bootstrap", f"gui/{user}", str(path)),),
        (("launchctl", "bootout", f"gui/{user}/{LABEL}"),),
        f"Its log is {log}.",
    )


def install(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the file and the commands; change nothing.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Stop the service and remove its file.")] = False,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """Run this machine's worker as a service of this user, now and after each login.

    The machine has joined before, so the service needs no token. It is a systemd unit on Linux and a launchd
    agent on macOS; on Windows see the tutorial.
    """
    folder = (state_dir or default_state_dir()).expanduser().absolute()
    service = _service(folder)
    if not remove:
        make_config({"state_dir": folder}, {})  # joined before, with settings that can be
        if not (folder / "identity").is_dir():
            raise UsageError(f"no identity in {folder}; join once with a token, then install")
    commands = service.end if remove else service.begin
    failed = "" if dry_run else _carry_out(service, remove=remove)
    if json:
        shown = [" ".join(command) for command in commands]
        print_json({"path": str(service.path), "text": service.text, "commands": shown, "failed": failed})
        return 1 if failed else 0
    if dry_run:
        _show(service, commands, remove=remove)
    elif failed:
        err.print(f"{failed}; run it yourself where your session's service manager answers", soft_wrap=True)
    else:
        word = "removed" if remove else "installed and started"
        out.print(f"{word}: {service.path}", soft_wrap=True, markup=False)
        if service.hint and not remove:
            out.print(service.hint, soft_wrap=True, markup=False)
    return 1 if failed else 0


def _show(service: Service, commands: tuple[tuple[str, ...], ...], *, remove: bool) -> None:
    out.print(f"{'remove' if remove else 'write'} {service.path}", soft_wrap=True, markup=False)
    if not remove:
        sys.stdout.write(service.text)
    for command in commands:
        out.print(f"run {' '.join(command)}", soft_wrap=True, markup=False)


def _service(folder: Path) -> Service:
    """The service of this system. UsageError where there is none."""
    system = platform.system()
    if system == "Linux":
        return systemd_unit(folder, Path.home())
    if system == "Darwin":
        return launchd_agent(folder, Path.home(), os.getuid())
    raise UsageError(f"no service manager is known for {system}; {WINDOWS}")


def _carry_out(service: Service, *, remove: bool) -> str:
    """Write or remove the file and run the commands; returns which failed, and why. StorageError when the
    disk refuses."""
    failed = ""
    if not remove:
        with disk(f"create {service.path.parent}"):
            service.path.parent.mkdir(parents=True, exist_ok=True)
        write_private(service.path, service.text.encode())
    for command in service.end if remove else service.begin:
        failed = failed or _failure(command)
    if remove:
        service.path.unlink(missing_ok=True)
    return failed


def _failure(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{' '.join(command)} did not run: {error}"
    if done.returncode:
        return f"{' '.join(command)} failed: {done.stderr.strip()[:300]}"
    return ""


def _command(state_dir: Path) -> tuple[str, ...]:
    """What starts the worker. -P: a module in whatever folder it is started in is none of ours."""
    return (sys.executable, "-P", "-m", "worker.cli", "join", "--state-dir", str(state_dir))


def _quoted(word: str) -> str:
    """A word of ExecStart: systemd expands %, $ and backslashes."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if any(c.isspace() or c in "\"'\\;" for c in word) else escaped
