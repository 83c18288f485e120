"""Processes that a watcher ends with the command that started them."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil

from coordinator.cli.first.ending import EndedTogether, watch
from coordinator.cli.processes import start_here
from tests.interrupts import ROOT
from tests.patience import eventually

if TYPE_CHECKING:
    import pytest

SLEEP = ["-c", "import time; print('up', flush=True); time.sleep(10_000)"]
PARENT = """
import sys, time
from coordinator.cli.first.ending import EndedTogether
together = EndedTogether()
child = together.start("", ["-c", "import time; time.sleep(10_000)"])
print(child.pid, flush=True)
time.sleep(10_000)
"""


def test_a_parent_that_is_killed_takes_its_processes_with_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_the_watcher_ends_what_heeds_no_signal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.cli.first.ending.LEAVE_S", 0.1)
    stubborn = f"import signal; signal.signal({int(signal.SIGTERM)}, signal.SIG_IGN); " + SLEEP[1]
    with start_here("", ["-c", stubborn], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        watch([f"{process.pid}\n", "no number\n", "999999999\n"])
        assert process.wait() == -signal.SIGKILL


def test_what_has_ended_by_itself_is_no_concern_of_the_watcher() -> None:
    with EndedTogether() as together:
        process = together.start("", ["-c", ""])
        assert process.wait() == 0
