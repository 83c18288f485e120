"""A JSON object in a file that a command and a daemon change in turns; nobody but their user reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hostos.files.file_locks import lock
from hostos.files.private_files import private_folder, write_private
from hostos.files.refusals import disk

if TYPE_CHECKING:
    from pathlib import Path


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the object in a file; one that is missing, damaged or larger than ``max_bytes`` is empty."""
    try:
        return sound_object(path, max_bytes)
    except (OSError, ValueError):
        return {}


def sound_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the object in a file. Raises OSError, and ValueError for one that is damaged or too large."""
    if path.stat().st_size > max_bytes:
        raise ValueError(f"more than {max_bytes} bytes")
    try:
        found = json.loads(path.read_text())
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


@contextmanager
def changing(path: Path, max_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the object to change, and write it back unless the block raises; whoever else changes it waits.

    Raises StorageError when the disk refuses.
    """
    private_folder(path.parent)
    with disk(f"write {path}", "free space there"):
        opened = (path.parent / "lock").open("w")
    with opened:
        lock(opened)
        found = read_object(path, max_bytes)
        yield found
        write_private(path, json.dumps(found, indent=1).encode() + b"\n")
