"""Version of a state folder, in a file of its own: an Atoll that does not know it leaves the folder alone.

A folder in use without that file is of version 1: it was written before there was one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import StorageError
from hostos.files.private_files import write_private
from hostos.files.refusals import disk

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

VERSION_FILE = "version"
FIRST_VERSION = 1
MAX_FILE_BYTES = 16


def claim_version(folder: Path, current: int, known: Collection[str], oldest: int | None = None) -> None:
    """Write ``current`` into a folder that has no version; refuse one of another version, unless it is from
    ``oldest`` on and so can be read as it is: ``raise_version`` claims that one.

    A folder that holds one of the ``known`` names is in use. StorageError names the remedy; the folder is
    then as it was.
    """
    path = folder / VERSION_FILE
    found = _read(path)
    if found is None:
        in_use = any((folder / name).exists() for name in known)
        found = FIRST_VERSION if in_use else current
        if found == current:
            write_private(path, b"%d\n" % current)
    if not (current if oldest is None else oldest) <= found <= current:
        remedy = "update Atoll" if found > current else "finish its jobs with the Atoll that wrote it"
        raise StorageError(
            f"{folder} is of version {found} and this Atoll reads version {current}: {remedy}, or choose "
            "another --state-dir"
        )


def raise_version(folder: Path, current: int) -> None:
    """Write ``current`` into a folder of an earlier version, under the lock of whoever goes on in it."""
    if _read(folder / VERSION_FILE) != current:
        write_private(folder / VERSION_FILE, b"%d\n" % current)


def _read(path: Path) -> int | None:
    """The version that the file holds; None where there is no file."""
    with disk(f"read {path}", "choose another --state-dir"):
        try:
            with path.open("rb") as file:
                text = file.read(MAX_FILE_BYTES).strip()
        except FileNotFoundError:
            return None
    if not text.isdigit():
        raise StorageError(f"{path} is damaged, it holds no version; restore it from a backup")
    return int(text)
