"""The log of what left this machine for federated jobs: appended to, bounded, never sent.

    STATE/departures/log.jsonl      a JSON object a line: at_s, job, kind, bytes, what belongs to the kind
    STATE/departures/log.1.jsonl    the lines before those, and so on

``bytes`` are what was handed to the connection: of an update the pieces of its file, repeated ones too, of a
message its serialised form; neither TLS nor HTTP/2 around them.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from atoll.errors import StorageError
from protos.private_files import private_folder

FOLDER = "departures"
MAX_BYTES = 4 << 20  # of one file
FILES = 8
MAX_LINE_CHARS = 4000

UPDATE, UPDATE_BEGINS, MESSAGE, FACTS = "update", "update begins", "message", "facts"


class DepartureLog:
    """The log of one state folder; from any thread of one process."""

    def __init__(
        self, state_dir: Path, clock: Callable[[], float] = time.time, max_bytes: int = MAX_BYTES
    ) -> None:
        self._folder, self._clock, self._max_bytes = state_dir / FOLDER, clock, max_bytes
        self._lock = threading.Lock()

    def note(self, job: str, kind: str, nbytes: int, **facts: Any) -> None:
        """Append a line. StorageError when the disk refuses: then nothing should leave."""
        line = json.dumps({"at_s": self._clock(), "job": job, "kind": kind, "bytes": nbytes, **facts})
        data = line[:MAX_LINE_CHARS].encode() + b"\n"
        path = _path(self._folder, 0)
        try:
            with self._lock:
                private_folder(self._folder)
                if path.exists() and path.stat().st_size + len(data) > self._max_bytes:
                    self._rotate()
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                with os.fdopen(descriptor, "ab") as file:
                    file.write(data)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}; free space there") from None

    def _rotate(self) -> None:
        _path(self._folder, FILES - 1).unlink(missing_ok=True)
        for at in range(FILES - 2, -1, -1):
            if _path(self._folder, at).exists():
                _path(self._folder, at).replace(_path(self._folder, at + 1))


def read_departures(state_dir: Path) -> Iterator[dict[str, Any]]:
    """The lines that are kept, the oldest first; damaged ones are passed over."""
    for at in range(FILES - 1, -1, -1):
        path = _path(state_dir / FOLDER, at)
        if not path.is_file():
            continue
        with path.open(errors="replace") as file:
            for line in file:
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(found, dict) and isinstance(found.get("bytes"), int):
                    yield found


def _path(folder: Path, at: int) -> Path:
    return folder / ("log.jsonl" if at == 0 else f"log.{at}.jsonl")
