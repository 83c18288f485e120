"""`atoll chaos` as a user runs it: a fleet of its own, disturbed in each way that needs no network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.chaos.members import Member
from tests.interrupts import ROOT
from tests.patience import eventually

SMALL = ("--stages", "2", "--backups", "2", "--steps", "400", "--every", "2")

pytestmark = pytest.mark.slow


def started(*options: str) -> subprocess.Popen[str]:
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "coordinator.cli", "chaos", *SMALL, *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_every_promise_holds_on_a_fleet_of_its_own(tmp_path: Path) -> None:
    kinds = "kill,crash,freeze,hang,restart,disk"
    process = started("--minutes", "1", "--seed", "3", "--kinds", kinds, "--keep", str(tmp_path), "--json")
    out, err = process.communicate()
    found = json.loads(out)
    broken = [promise for promise in found["promises"] if promise["held"] is False]
    assert (process.returncode, broken) == (0, []), err
    assert found["held"] is True
    assert len({deed["kind"] for deed in found["deeds"]}) >= 3
    assert all(Member(name, tmp_path / name).process() is None for name in ("coordinator", "host0", "host3"))


def test_a_run_that_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    process = started("--minutes", "1", "--keep", str(tmp_path))
    members = [Member(name, tmp_path / name) for name in ("coordinator", "host0", "host1")]
    eventually(lambda: all(member.process() is not None for member in members))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    eventually(lambda: all(member.process() is None for member in members))
