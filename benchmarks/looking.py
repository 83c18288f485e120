"""Answers each line of its standard input with the fleet's state, as `atoll status --json` shows it.

A lab's benchmark looks ten times a second until something has come about. A command for each look takes
more than a second of the machine that is being measured.

  python -m benchmarks.looking STATE_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from atoll.errors import AtollError
from coordinator.client.client import connect
from protos.coding import plain


def state(folder: Path) -> str:
    """Return the state on one line; null where nobody answers."""
    try:
        with connect(state_dir=folder) as client:
            return json.dumps(plain(client.status()))
    except AtollError:
        return "null"


if __name__ == "__main__":
    for _ in sys.stdin:
        print(state(Path(sys.argv[1])), flush=True)
