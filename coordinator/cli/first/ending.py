"""Processes that end when the command that started them does, also where that was killed.

A watcher in a session of its own holds one end of a pipe. The command sends it the number of each process
that it starts; when the pipe closes, the watcher ends those that are left. As a program: the watcher.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Self

import psutil

from coordinator.cli.processes import LEAVE_S, start_here


class EndedTogether:
    """Starts processes on this machine that do not outlive this one. Use it in ``with``."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", __name__]
        self._watcher = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._watcher.stdin is not None  # noqa: S101 - it was started with a pipe
        with suppress(BrokenPipeError):
            self._watcher.stdin.close()
        self._watcher.wait()

    def start(self, host: str, arguments: Sequence[str], **streams: Any) -> subprocess.Popen[str]:
        """Start this Python with ``arguments``; the watcher knows of it from then on."""
        process = start_here(host, arguments, **streams)
        assert self._watcher.stdin is not None  # noqa: S101 - it was started with a pipe
        with suppress(BrokenPipeError):
            self._watcher.stdin.write(f"{process.pid}\n")
            self._watcher.stdin.flush()
        return process


def watch(lines: Iterable[str]) -> None:
    """Take in numbers of processes, one a line; at the end of ``lines`` end those that are left."""
    known: list[psutil.Process] = []
    for line in lines:
        with suppress(psutil.Error, ValueError):
            known.append(psutil.Process(int(line)))  # by its start too: a number may become another's
    left = [process for process in known if process.is_running()]
    for process in left:
        with suppress(psutil.Error):
            process.terminate()
    for process in psutil.wait_procs(left, timeout=LEAVE_S)[1]:
        with suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    watch(sys.stdin)
