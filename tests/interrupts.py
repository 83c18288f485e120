"""Ctrl+C, and the promise that follows it: the process is gone within 2 s and leaves none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
PROMISED_S = 2.0
ALLOWANCE = 2.5  # for a machine that has other work


@contextmanager
def own_session(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A command in a session of its own; what is left of that session afterwards is killed."""
    # A shell starts background jobs with SIGINT ignored, which is inherited: a terminal's jobs heed it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **options)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        with process:
            try:
                yield process
            finally:
                process.kill()
    finally:
        for left in session_of(process.pid):
            with suppress(psutil.Error):
                left.kill()


def interrupted(process: subprocess.Popen[Any], number: signal.Signals = signal.SIGINT) -> int:
    """The exit code after a signal; fails unless process and session are gone as promised."""
    deadline_s = time.monotonic() + PROMISED_S * ALLOWANCE
    process.send_signal(number)
    code = process.wait(deadline_s - time.monotonic())
    while left := session_of(process.pid):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)
    return code


def session_of(leader: int) -> list[psutil.Process]:
    """What still runs in the session that ``leader`` began."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            # The dead that nobody has waited for run no more.
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
