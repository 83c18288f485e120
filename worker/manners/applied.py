"""What the running daemon made of the settings file, in a small file for the commands that wait for it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hostos.files.locked_json import sound_object
from hostos.files.private_files import write_private

APPLIED_FILE = "applied.json"
MAX_FILE_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Applied:
    """``stamp`` of the settings file that holds; ``error``: why it does not, and the one before does."""

    stamp: tuple[int, int, int]
    paused: str = ""  # why, "": it works
    unknown: tuple[str, ...] = ()  # conditions that a limit asks for and this machine does not tell
    day: str = ""  # ISO 8601
    day_bytes: int = 0  # sent and received on it so far
    error: str = ""


def write_applied(folder: Path, applied: Applied) -> None:
    """Replace the file. StorageError when the disk refuses."""
    write_private(folder / APPLIED_FILE, json.dumps(asdict(applied)).encode())


def read_applied(folder: Path) -> Applied | None:
    """Return what was written last, None where nothing readable was."""
    path = folder / APPLIED_FILE
    try:
        found = sound_object(path, MAX_FILE_BYTES)
        numbers = [int(number) for number in found["stamp"]]
        stamp = (numbers[0], numbers[1], numbers[2])
        unknown = tuple(str(what) for what in found["unknown"])
        day, nbytes = str(found["day"]), int(found["day_bytes"])
        return Applied(stamp, str(found["paused"]), unknown, day, nbytes, str(found["error"]))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
