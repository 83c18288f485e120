"""`atoll demo` as a user runs it: real processes, and none of them left however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.interrupts import ROOT, own_session
from tests.parameters import sampled

COMMAND = (sys.executable, "-m", "coordinator.cli", "demo", "--steps", "60", "--keep")


def _options(home: Path) -> dict[str, Any]:
    """Pipes, and an environment without a home that could be written."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "HOME": str(home / "none"), "PYTHONPATH": path}
    return {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}


def _left(kept: Path) -> list[str]:
    """Command lines of processes that know of the demo's folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if any(str(kept) in word for word in words) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(words))
    return found


def test_the_demo_trains_in_two_stages_and_the_plain_module_agrees(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with own_session([*COMMAND, str(kept), "--json"], **_options(tmp_path)) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    found = json.loads(out)
    assert (found["steps"], found["stages"], found["devices"]) == (60, 2, 2)
    assert found["plain_loss"] == pytest.approx(found["trained_loss"], abs=2e-4)
    assert found["plain_loss"] < 0.88 * found["entropy"]
    assert {"job.py", "model.safetensors", "one.log", "coordinator.log"} <= {p.name for p in kept.iterdir()}
    assert "page: http://127.0.0.1:" in err
    assert len(err.splitlines()) < 40
    assert _left(kept) == []


@pytest.mark.slow  # without workers: tests/experiments/test_demo.py
@pytest.mark.parametrize(("number", "code"), sampled(1, [(signal.SIGINT, 130), (signal.SIGTERM, 143)]))
def test_a_demo_that_is_interrupted_leaves_no_process(number: int, code: int, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with own_session([*COMMAND, str(kept)], **_options(tmp_path)) as process:
        assert process.stdout is not None
        assert any("atoll submit" in line for line in process.stdout)
        assert len(_left(kept)) >= 2
        process.send_signal(number)
        _, err = process.communicate()
    assert process.returncode == code
    assert "Traceback" not in err
    assert _left(kept) == []
