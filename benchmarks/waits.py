"""Waiting for processes: until they are there or have ended, however slow or busy the machine is."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any

LOOK_EVERY_S = 0.1
HUNG_S = 3600.0  # of something that cannot be seen to go on; no machine is judged by it


def came_about(done: Callable[[], bool], needed: Iterable[subprocess.Popen[Any]]) -> bool:
    """Return True once ``done`` holds, False when a ``needed`` process has ended before it did."""
    needed = list(needed)
    while not done():
        if any(process.poll() is not None for process in needed):
            return done()
        time.sleep(LOOK_EVERY_S)
    return True
