"""What is promised within 2 s: after Ctrl+C a process is gone and leaves none behind; a pause frees it.

Only moments in which the machine had a core to spare count, so that no other work can break the promise.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
PROMISED_S = 2.0
ALLOWANCE = 2.5  # for a machine that is slow
SPARE_CORES = 0.5  # idle in a moment that counts
LOOK_EVERY_S = 0.05


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
    process.send_signal(number)
    spare_s = 0.0
    for moment_s in _spare_moments():
        left = session_of(process.pid) if process.poll() is not None else [psutil.Process(process.pid)]
        if not left:
            break
        spare_s += moment_s
        assert spare_s < PROMISED_S * ALLOWANCE, left
    return process.wait()


def spare_s_until(done: Callable[[], bool]) -> float:
    """Seconds that it takes until ``done``, of those moments in which the machine had a core to spare."""
    spare_s = 0.0
    for moment_s in _spare_moments():
        if done():
            break
        spare_s += moment_s
    return spare_s


def _spare_moments() -> Iterator[float]:
    """Seconds since the last look, 0 where the machine was busy all that time."""
    then_s, idle_then_s = time.monotonic(), psutil.cpu_times().idle
    yield 0.0
    while True:
        time.sleep(LOOK_EVERY_S)
        now_s, idle_s = time.monotonic(), psutil.cpu_times().idle
        spare = (idle_s - idle_then_s) / (now_s - then_s)
        yield now_s - then_s if spare > SPARE_CORES else 0.0
        then_s, idle_then_s = now_s, idle_s


def session_of(leader: int) -> list[psutil.Process]:
    """What still runs in the session that ``leader`` began."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            # The dead that nobody has waited for run no more.
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
