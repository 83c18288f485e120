"""A log of JSON lines that is appended to, bounded and readable by its user alone.

FOLDER/log.jsonl      one object a line
FOLDER/log.1.jsonl    the lines before those, and so on
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hostos.files.private_files import private_folder
from hostos.files.refusals import disk

MAX_BYTES = 4 << 20  # of one file
FILES = 8
MAX_LINE_CHARS = 4000
_APPENDING = threading.Lock()  # of all logs of this process: several may be of one folder, and rotate it
TEXT_CHARS, LIST_ITEMS = (300, 60, 12), 8  # kept of a line that is too long, by turns


class BoundedLog:
    """The log in one folder; from any thread of one process."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self._folder, self._max_bytes = folder, max_bytes

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line. StorageError when the disk refuses."""
        data = _line(line).encode() + b"\n"
        path = _path(self._folder, 0)
        with disk(f"write {path}", "free space there"), _APPENDING:
            private_folder(self._folder)
            if path.exists() and path.stat().st_size + len(data) > self._max_bytes:
                self._rotate()
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "ab") as file:
                file.write(data)

    def _rotate(self) -> None:
        _path(self._folder, FILES - 1).unlink(missing_ok=True)
        for at in range(FILES - 2, -1, -1):
            if _path(self._folder, at).exists():
                _path(self._folder, at).replace(_path(self._folder, at + 1))


def _line(line: Mapping[str, Any]) -> str:
    """A line that can be read again, however long its texts and lists are: they are cut, never the line."""
    text = json.dumps(line)
    for most in TEXT_CHARS:
        if len(text) <= MAX_LINE_CHARS:
            return text
        text = json.dumps({key: _cut(value, most) for key, value in line.items()} | {"cut": True})
    return text


def _cut(value: Any, most: int) -> Any:
    if isinstance(value, str):
        return value[:most]
    return [_cut(item, most) for item in value[:LIST_ITEMS]] if isinstance(value, list | tuple) else value


def read_log(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines that are kept, the oldest first; damaged ones are passed over."""
    for at in range(FILES - 1, -1, -1):
        path = _path(folder, at)
        if not path.is_file():
            continue
        with path.open(errors="replace") as file:
            for line in file:
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(found, dict):
                    yield found


def _path(folder: Path, at: int) -> Path:
    return folder / ("log.jsonl" if at == 0 else f"log.{at}.jsonl")
