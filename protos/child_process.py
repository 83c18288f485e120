"""A program of ours in a child process: under a guard, and joined with this process by a pipe.

It and all that it starts end together, and when this process does. The program's first argument is the pipe's
descriptor, which ``pipe_from`` opens there.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from atoll import version
from hostos.app_guard import Guarded
from protos.child_pipe import Pipe

PACKAGES_ROOT = Path(version.__file__).resolve().parent.parent
"""Folder that our packages are imported from: a checkout, or site-packages."""


class ChildProcess:
    """A child; ``process`` is its guard, which ends as the program does."""

    def __init__(
        self,
        program: Sequence[str],
        environment: Mapping[str, str],
        arguments: Sequence[str] = (),
        *,
        stdout: IO[Any] | int | None = None,
        stderr: int | None = None,
        oom_score: int = 0,
    ) -> None:
        """``program``: ``-m MODULE``, or a file; the rest as ``Guarded`` takes it. Raises OSError."""
        ours, theirs = socket.socketpair()
        self.pipe = Pipe(ours)
        with theirs:
            try:
                self._guarded = Guarded(
                    # -P: a file of our packages' name where we were started must not be taken for ours.
                    [sys.executable, "-P", *program, str(theirs.fileno()), *arguments],
                    [theirs.fileno()],
                    environment,
                    stdout=stdout,
                    stderr=stderr,
                    oom_score=oom_score,
                )
            except BaseException:
                self.pipe.close()
                raise
        self.process: subprocess.Popen[bytes] = self._guarded.process

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> int:
        """End it and all it started at once; its exit code. Safe from any thread and more than once."""
        self._guarded.end()
        self.pipe.close()
        return self.process.wait()

    def ending(self) -> str:
        """Wait for its end; how that was, in words."""
        code = self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def with_packages(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which our packages are found first."""
    paths = filter(None, [str(PACKAGES_ROOT), environment.get("PYTHONPATH", "")])
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}
