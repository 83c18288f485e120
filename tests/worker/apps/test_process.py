"""What an app's child gets of its worker, and that nothing it starts outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from hostos.app_guard import Guarded
from protos import atoll_apps_pb2 as pb
from protos.text_limits import LINE_CHARS, LINES_CHARS
from tests.patience import HUNG_S, eventually
from worker.apps.context import AppContext
from worker.apps.process import AppProcess, _environment
from worker.apps.store import AppStore


def test_an_app_sees_no_credentials_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_TOKEN", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = _environment(2)
    assert "secret" not in found.values()
    assert (found["PATH"], found["CUDA_VISIBLE_DEVICES"]) == ("/bin", "1")


def test_an_app_sees_what_its_worker_lets_it_and_that_it_is_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA_DIR", "OTHER", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    found = _environment(2, ["DATA_DIR", "NOT_SET"])
    assert {"DATA_DIR", "HF_HUB_OFFLINE"} <= found.keys()
    assert not {"OTHER", "NOT_SET"} & found.keys()


def test_what_an_app_prints_is_cleaned_and_cannot_fill_the_log(tmp_path: Path) -> None:
    worker: Any = SimpleNamespace()
    context = AppContext(worker, AppStore(tmp_path), lambda name: True, lambda message: None, lambda: 1)
    with capture_logs() as logged:
        for number in range(20_000):
            context.printed("5", f"{number} " + "x" * 900)
    spent = sum(len(line["line"]) + LINE_CHARS for line in logged)
    assert 0.9 * LINES_CHARS < spent < 1.1 * LINES_CHARS
    context.printing.take(1e9, 0.0)  # much later
    with capture_logs() as logged:
        context.printed("5", "later")
    [line] = logged
    assert line["left_out_before"] > 19_000
    lines: list[str] = []
    process = AppProcess(pb.ChildSetup(client="no:such"), 1, lines.append)
    process.kill()
    process._output._tail.clear()
    lines.clear()
    read, write = os.pipe()
    os.write(write, b"\x1b[2J\x1b]0;title\x07ok\r\n" + b"y" * 9000 + b"\n\xff\n")
    os.close(write)
    process._output.read(os.fdopen(read, "rb"))
    assert lines[0] == " [2J ]0;title ok"
    assert [len(line) for line in lines[1:]] == [1000, 1000, 1000, 1]
    assert list(process._output._tail) == lines


SPAWNING = """
import os, sys, time
heard, tell = os.pipe()

def said(name):
    os.write(1, f"{{name}} {{os.getpid()}}\\n".encode())
    os.write(tell, b".")

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        said("far")
        time.sleep(600)
    os._exit(0)
if os.fork() == 0:
    said("near")
    time.sleep(600)
said("app")
for _ in range(3):
    os.read(heard, 1)
{then}
"""


def guarded(then: str) -> tuple[Guarded, dict[str, int]]:
    """A process that started a child and one that left its session and its parent, by name."""
    made = Guarded(
        [sys.executable, "-c", SPAWNING.format(then=then)], [], dict(os.environ), stdout=subprocess.PIPE
    )
    output = made.process.stdout
    assert output is not None
    with output:
        found = dict(output.readline().split() for _ in range(3))
    return made, {name.decode(): int(number) for name, number in found.items()}


def gone(processes: dict[str, int]) -> bool:
    """True, as soon as none of them lives any more."""

    def lives(process: int) -> bool:
        try:
            return "zombie" not in Path(f"/proc/{process}/status").read_text()
        except OSError:
            return False

    eventually(lambda: not any(map(lives, processes.values())))
    return True


def test_all_that_an_app_started_ends_with_it_wherever_it_went() -> None:
    made, processes = guarded("time.sleep(600)")
    assert made.process.poll() is None
    made.end()
    made.end()
    assert gone(processes)
    assert made.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("then", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 11)", -11), ("os.abort()", -6)]
)
def test_what_an_app_leaves_behind_ends_and_its_guard_ends_as_the_app_did(then: str, code: int) -> None:
    made, processes = guarded(then)
    assert made.process.wait(HUNG_S) == code
    assert gone(processes)
    made.end()


def test_an_app_whose_guard_is_killed_dies_and_the_rest_when_it_is_ended() -> None:
    made, processes = guarded("time.sleep(600)")
    far = processes.pop("far")  # it has left the session, and with its guard it lost its keeper
    made.process.kill()
    made.process.wait()
    assert gone({"app": processes["app"]})
    made.end()
    assert gone(processes)
    os.kill(far, signal.SIGKILL)


def test_a_command_that_is_not_there_is_an_end_like_any_other() -> None:
    made = Guarded(["/nonexistent/python"], [], {})
    assert made.process.wait(HUNG_S) == 127
    made.end()
