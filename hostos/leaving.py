"""The end of a command's process, which nothing that lingers may delay."""

from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Exit with ``code``: at once where a thread of gRPC's or inside a long operation lingers, or where
    torch would have to be taken down first, which takes a second."""
    lost = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # its reader has left, or its disk is full: Python would say so again
            lost = True
    lingers = any(thread is not threading.current_thread() for thread in threading.enumerate())
    if lost or lingers or "torch" in sys.modules:
        os._exit(code)
    sys.exit(code)
