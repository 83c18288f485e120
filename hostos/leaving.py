"""The end of a command's process, which nothing that lingers may delay."""

from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Exit with ``code``: at once where a thread of gRPC's or inside a long operation lingers, or where
    torch would have to be taken down first, which takes a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "torch" in sys.modules or any(t is not threading.current_thread() for t in threading.enumerate()):
        os._exit(code)
    sys.exit(code)
