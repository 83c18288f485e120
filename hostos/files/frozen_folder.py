"""Folders of files that are known by their hashes: looked at before use, read-only, removed whole."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

CACHE = "__pycache__"
_CHUNK_BYTES = 1 << 20


def difference(folder: Path, files: Mapping[str, tuple[int, str]]) -> str:
    """Return how the folder differs from ``files`` (path -> size in bytes and SHA-256), "" where it does not.

    Caches of compiled files are removed first: Python would run one unchecked.
    """
    try:
        found = set()
        if folder.is_symlink():
            return "a link stands"
        for path in _entries(folder):
            name = path.relative_to(folder).as_posix()
            if name not in files:
                return f"{name[:80]!r} appeared"
            if not _same(path, *files[name]):
                return f"{name[:80]!r} was changed"
            found.add(name)
    except OSError as error:
        return f"something cannot be read ({error.strerror})"
    lacking = sorted(files.keys() - found)
    return f"{lacking[0][:80]!r} vanished" if lacking else ""


def protect(folder: Path) -> None:
    """Make the files read-only against mistakes; a change by their owner is found by ``difference``."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            (Path(root) / name).chmod(0o400)
        Path(root).chmod(0o500)


def remove(folder: Path) -> None:
    """Remove a folder, or a link in its place, where there is one. OSError."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        _remove(folder)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file. OSError."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            found.update(piece)
    return found.hexdigest()


def _entries(folder: Path) -> Iterator[Path]:
    """Everything below that is no plain folder; caches are removed on the way."""
    for entry in list(os.scandir(folder)):
        path = Path(entry.path)
        if not entry.is_dir(follow_symlinks=False):
            yield path
        elif entry.name == CACHE:
            _remove(path)
        else:
            yield from _entries(path)


def _same(path: Path, size: int, wanted: str) -> bool:
    """True for a plain file of these bytes; a file of another size is not read."""
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_size == size and digest(path) == wanted


def _remove(folder: Path) -> None:
    above = stat.S_IMODE(folder.parent.stat().st_mode)
    for place in (folder.parent, *(Path(root) for root, _, _ in os.walk(folder))):
        place.chmod(0o700)
    try:
        shutil.rmtree(folder)
    finally:
        folder.parent.chmod(above)
