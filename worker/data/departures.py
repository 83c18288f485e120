"""The log of what left this machine for federated jobs: appended to, bounded, never sent.

    STATE/departures/PART/    JSON lines (``files.bounded_log``): at_s, job, kind, bytes, what belongs to it
    STATE/departures/         the same, from before there were parts; still read

Each part has a budget of its own on the disk, so however many messages there are, no line of an update or of
numbers about the data goes for them. ``bytes`` are what was handed to the connection: of an update the pieces
of its file, repeated ones too, of a message its serialised form; neither TLS nor HTTP/2 around them.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hostos.files.bounded_log import MAX_BYTES, BoundedLog, read_log

FOLDER = "departures"
UPDATE, UPDATE_BEGINS, MESSAGE, FACTS = "update", "update begins", "message", "facts"
UPDATES, NUMBERS, MESSAGES = "updates", "numbers", "messages"
PARTS = (UPDATES, NUMBERS, MESSAGES)
NUMBERED = frozenset({"update_ready", "client_evaluated"})
"""Messages with numbers that depend on the data: none of them leaves unlogged."""


class DepartureLog:
    """The log of one state folder; from any thread of one process."""

    def __init__(
        self, state_dir: Path, clock: Callable[[], float] = time.time, max_bytes: int = MAX_BYTES
    ) -> None:
        folder = state_dir / FOLDER
        self._parts, self._clock = {part: BoundedLog(folder / part, max_bytes) for part in PARTS}, clock

    def note(self, job: str, kind: str, nbytes: int, **facts: Any) -> None:
        """Append a line. StorageError when the disk refuses: then nothing should leave."""
        line = {"at_s": self._clock(), "job": job, "kind": kind, "bytes": nbytes, **facts}
        self._parts[_part(kind, str(facts.get("message", "")))].append(line)


def _part(kind: str, message: str) -> str:
    if kind in (UPDATE, UPDATE_BEGINS):
        return UPDATES
    return NUMBERS if kind == MESSAGE and message in NUMBERED else MESSAGES


def read_departures(state_dir: Path) -> Iterator[dict[str, Any]]:
    """The lines that are kept, the oldest first; damaged ones are passed over."""
    folder = state_dir / FOLDER
    logs = (_lines(place) for place in (folder, *(folder / part for part in PARTS)))
    return heapq.merge(*logs, key=lambda line: line["at_s"])


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for line in read_log(folder):
        if isinstance(line.get("bytes"), int) and isinstance(line.get("at_s"), int | float):
            yield {"job": "", "kind": "", **line}
