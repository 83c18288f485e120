"""What a child prints: cleaned, cut, and its last lines kept."""

from __future__ import annotations

import subprocess
import threading
from collections import deque
from collections.abc import Callable
from typing import IO

from protos.text_limits import clean

TAIL_LINES = 40
MAX_LINE_BYTES, MAX_LINE_CHARS = 4000, 1000


def ignore(line: str) -> None:
    """Drop a line."""


class Output:
    """A thread that reads what a process prints, so that it never waits for us."""

    def __init__(self, process: subprocess.Popen[bytes], printed: Callable[[str], None] = ignore) -> None:
        """``process`` was started with its standard output as a pipe; ``printed`` is called with every
        line, in that thread."""
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        self._printed = printed
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._thread = threading.Thread(
            target=self.read, args=(process.stdout,), name="atoll-child-output", daemon=True
        )
        self._thread.start()

    def tail(self, wait_s: float = 1.0) -> list[str]:
        """Return the last lines, after waiting for the output's end for at most ``wait_s``."""
        self._thread.join(wait_s)
        return list(self._tail)

    def read(self, output: IO[bytes]) -> None:
        """Read to the end."""
        with output:
            while line := output.readline(MAX_LINE_BYTES):
                text = clean(line.decode(errors="replace").rstrip(), MAX_LINE_CHARS)
                if text:
                    self._tail.append(text)
                    self._printed(text)
