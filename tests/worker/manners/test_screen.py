"""The view of a joined worker on a terminal; elsewhere the log, as before."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from rich.console import Console

from coordinator.config import CoordinatorConfig
from coordinator.server import serve
from tests.interrupts import own_session
from tests.patience import eventually
from worker.manners.activity import Activity, DeviceActivity
from worker.manners.keeper import Manners
from worker.manners.limits import Limits
from worker.manners.screen import Meter, Notes, Use, does, view
from worker.session.state import Phase

BUSY = Activity(
    coordinator="train.example.org:7700",
    devices=(DeviceActivity("w-7f3a2c", "training", "gpt-1", 119),),
    memory="4.0 GiB, of it 383.3 MiB for Atoll itself, 3.6 GiB for a stage",
    threads=2,
    sent_bytes=3 << 20,
    received_bytes=12 << 20,
    today_bytes=40 << 20,
)
USE = Use(cores=1.8, of_cores=16, memory_bytes=412 << 20)


def shown(activity: Activity, last: str = "", width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(view(activity, USE, 0.0, 4380.0, last))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 100, 160])
def test_a_working_machine_shows_for_whom_what_how_much_and_how_to_pause(width: int) -> None:
    lines = shown(BUSY, width=width)
    text = " ".join(" ".join(lines).split())
    for part in (
        "train.example.org:7700, since 19", "(1 h 13 min)", "trains gpt-1, step 120", "1.8 of 16 cores",
        "2 threads", "412.0 MiB; at most 4.0 GiB", "12.0 MiB in, 3.0 MiB out; 40.0 MiB today",
        "`atoll-worker pause`", "Ctrl+C leaves",
    ):  # fmt: skip
        assert part in text
    assert max(len(line) for line in lines) <= width
    assert len(lines) <= 10


def test_limits_and_a_pause_are_shown_with_the_way_back() -> None:
    limits = Limits(cpu_percent=50.0, day_bytes=20 << 30)
    text = " ".join(shown(replace(BUSY, manners=Manners(limits, paused="on battery"))))
    for part in ("at most 50 % of the time", "at most 20.0 GiB", "on battery", "`atoll-worker resume`"):
        assert part in text


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_is_described_in_words(phase: Phase) -> None:
    words = does(DeviceActivity("w-1", str(phase), "gpt-1", 4))
    assert len(words.split()) >= 2
    assert "{" not in words


def test_a_coordinator_that_is_away_is_looked_for_and_what_is_held_is_named() -> None:
    assert (
        does(replace(BUSY.devices[0], connected=False))
        == "looks for the coordinator; keeps its part of gpt-1"
    )


def test_the_log_goes_to_a_file_and_the_last_warning_is_kept(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "log")
    for level, event in (("info", "worker.joined"), ("warning", "session.lost"), ("info", "stage.loaded")):
        with pytest.raises(structlog.DropEvent):
            notes(None, level, {"event": event, "level": level, "reason": "no answer"})
    assert notes.last.endswith("session.lost reason=no answer")
    lines = [json.loads(line) for line in (tmp_path / "log" / "log.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["worker.joined", "session.lost", "stage.loaded"]


def test_what_is_measured_is_of_this_process() -> None:
    meter = Meter()
    assert meter.look().cores == 0.0
    found = meter.look()
    assert found.memory_bytes > 1 << 20
    assert found.cores >= 0.0


@pytest.mark.parametrize(("options", "live"), [([], True), (["--log"], False)])
def test_a_terminal_shows_the_view_or_the_log_and_ctrl_c_leaves(
    options: list[str], live: bool, tmp_path: Path
) -> None:
    with serve(CoordinatorConfig(state_dir=tmp_path / "c", entry_port=0)) as running:
        token = running.started.join_command.split()[3]
        command = [sys.executable, "-m", "worker.cli", "join", "--token", token, "--threads", "1", *options]
        ours, theirs = pty.openpty()
        written = bytearray()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "HOME": str(tmp_path)}
        streams = {"stdin": subprocess.DEVNULL, "stdout": theirs, "stderr": theirs, "env": environment}
        with own_session([*command, "--state-dir", str(tmp_path / "w")], **streams) as process:
            os.close(theirs)
            reader = threading.Thread(target=_read, args=(ours, written), daemon=True)
            reader.start()
            expected = b"waits for work" if live else b"worker.joined"
            eventually(lambda: expected in written or process.poll() is not None)
            process.send_signal(signal.SIGINT)
            assert process.wait() == 0, written
            reader.join()
        os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    assert (f"127.0.0.1:{running.started.entry_port}, since" in text) == live
    assert ("worker.joined" in text) != live
    assert "left; `atoll-worker join` comes back" in text
    assert (tmp_path / "w" / "log").is_dir() == live


def _read(descriptor: int, written: bytearray) -> None:
    try:
        while data := os.read(descriptor, 4096):
            written.extend(data)
    except OSError:
        pass  # nobody holds the other end any more
