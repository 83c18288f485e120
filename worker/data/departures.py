"""The log of what left this machine for federated jobs: appended to, bounded, never sent.

    STATE/departures/    JSON lines (``protos.bounded_log``): at_s, job, kind, bytes, what belongs to the kind

``bytes`` are what was handed to the connection: of an update the pieces of its file, repeated ones too, of a
message its serialised form; neither TLS nor HTTP/2 around them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from protos.bounded_log import MAX_BYTES, BoundedLog, read_log

FOLDER = "departures"
UPDATE, UPDATE_BEGINS, MESSAGE, FACTS = "update", "update begins", "message", "facts"


class DepartureLog:
    """The log of one state folder; from any thread of one process."""

    def __init__(
        self, state_dir: Path, clock: Callable[[], float] = time.time, max_bytes: int = MAX_BYTES
    ) -> None:
        self._log, self._clock = BoundedLog(state_dir / FOLDER, max_bytes), clock

    def note(self, job: str, kind: str, nbytes: int, **facts: Any) -> None:
        """Append a line. StorageError when the disk refuses: then nothing should leave."""
        self._log.append({"at_s": self._clock(), "job": job, "kind": kind, "bytes": nbytes, **facts})


def read_departures(state_dir: Path) -> Iterator[dict[str, Any]]:
    """The lines that are kept, the oldest first; damaged ones are passed over."""
    return (line for line in read_log(state_dir / FOLDER) if isinstance(line.get("bytes"), int))
