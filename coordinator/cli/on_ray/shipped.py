"""A folder as values of Ray's object store: read once where it is, written once on each node."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from atoll.errors import StorageError

CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ShippedFile:
    """A file's name below its folder, and references to its bytes in order."""

    name: str
    chunks: tuple[Any, ...]


def shipped(folder: Path, put: Callable[[bytes], Any]) -> tuple[ShippedFile, ...]:
    """Return the files of a folder, their bytes stored by ``put``. StorageError where one cannot be read."""
    found = []
    try:
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            with path.open("rb") as file:
                chunks = tuple(map(put, iter(partial(file.read, CHUNK_BYTES), b"")))
            found.append(ShippedFile(path.relative_to(folder).as_posix(), chunks))
    except OSError as error:
        raise StorageError(f"cannot read {folder}: {error.strerror}") from None
    return tuple(found)


def unpacked(files: tuple[ShippedFile, ...], folder: Path, get: Callable[[Any], bytes]) -> None:
    """Write the files to ``folder`` unless it is there: whole, or not at all. StorageError when the disk
    refuses."""
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="unpacking-", dir=folder.parent))
        try:
            for each in files:
                path = made / each.name
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with path.open("xb") as file:
                    for chunk in each.chunks:
                        file.write(get(chunk))
            with suppress(FileExistsError, OSError):  # another host of this node was faster
                made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        if not folder.is_dir():
            raise StorageError(f"cannot rename {made} to {folder}; check what is there")
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror}; free some space") from None


def linked(source: Path, target: Path) -> None:
    """Copy a folder whose files nobody writes: they are shared with it where the disk allows that.
    StorageError when the disk refuses."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copy2(one, other)

    try:
        shutil.copytree(source, target, copy_function=link)
    except (OSError, shutil.Error) as error:
        raise StorageError(f"cannot copy {source} to {target}: {error}; free some space") from None
