"""Folders and files of one user alone: keys, tokens, journals, blobs, data."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from atoll.errors import StorageError
from hostos.files.refusals import disk, refusal

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def state_folder(folder: Path, known: Collection[str]) -> None:
    """Make a state folder with mode 0700, or close an existing one to other users.

    An existing folder that is open to others is closed when it is empty or holds one of the ``known``
    names of an earlier start: a mistyped ``--state-dir /`` must not lock everybody out. Raises
    StorageError when it holds other things alone, belongs to somebody else, cannot be closed, or has a name
    that is no text, which no message between processes can carry.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise StorageError(
            f"the state folder {str(folder)!r} has bytes in its path that are no text in this shell's "
            f"encoding, {sys.getfilesystemencoding()}; set LC_ALL=C.UTF-8, or choose another folder, "
            "--state-dir"
        ) from None
    mode, names = 0, list[str]()
    with disk(f"use {folder}", "choose another --state-dir"), suppress(FileNotFoundError):
        mode = stat.S_IMODE(folder.stat().st_mode)
        names = os.listdir(folder) if mode & _OTHERS else []
    if names and not any(name in known for name in names):
        raise StorageError(
            f"{folder} (mode {mode:04o}) is open to other users and holds other things "
            f"({min(names)[:60]!r}); choose a folder of its own, --state-dir {folder / 'atoll'}, or close it "
            "yourself by chmod 700"
        )
    private_folder(folder)


def private_folder(folder: Path) -> None:
    """Make a folder with mode 0700, or close an existing one to other users.

    Raises StorageError when the disk refuses, or the folder is open and belongs to somebody else.
    """
    with disk(f"create {folder}", "choose another --state-dir"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    if not found.st_mode & _OTHERS:
        return
    try:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)
        left_open = bool(folder.stat().st_mode & _OTHERS)
    except OSError:
        left_open = True
    if left_open:
        raise StorageError(
            f"{folder} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}, owner "
            f"{found.st_uid}) and this process (user {os.geteuid()}) cannot close it; have its owner chmod "
            f"700 it, or choose a folder of its own, --state-dir {folder / 'atoll'}"
        )


def private_file(path: Path) -> None:
    """Make an empty file with mode 0600, or close an existing one of ours to other users.

    OSError when the disk refuses.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        found = os.fstat(descriptor)
        if found.st_mode & _OTHERS and found.st_uid == os.geteuid():
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & ~_OTHERS)
    finally:
        os.close(descriptor)


def write_private(path: Path, data: bytes) -> None:
    """Replace ``path`` atomically; nobody else can read it at any moment.

    StorageError when the disk refuses.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise refusal(error, f"write {path}", "free space, or choose another --state-dir") from None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a rename is, once its folder is on the disk. OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
