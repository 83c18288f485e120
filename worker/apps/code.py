"""An accepted app's files on this machine: written once, read-only, and looked at before every start.

What the owner accepted is the hash of a bundle. Each run holds the digests of that bundle's files in
memory, so whatever happens on the disk after the files were unpacked, nothing else is ever run.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from atoll.errors import AccessDenied, StorageError
from protos.app_bundle import AppSpec, opened

CACHE = "__pycache__"
_unpacking = threading.Lock()


@dataclass(frozen=True, slots=True)
class AppCode:
    """``files``: path in the app -> size in bytes and SHA-256, as the accepted bundle has them."""

    hash: str
    folder: Path
    spec: AppSpec
    files: Mapping[str, tuple[int, str]]

    def check(self) -> None:
        """Raise AccessDenied unless the folder holds the accepted files and nothing else.

        Caches of compiled files are removed first: Python would run one unchecked.
        """
        wrong = self._wrong()
        if wrong:
            raise AccessDenied(
                f"app {self.hash[:16]} does not run here: {wrong} in {self.folder} since it was unpacked, so "
                "these are not the files that were accepted; see who did that: the next run unpacks them anew"
            )

    def intact(self) -> bool:
        """True unless ``check`` raises."""
        return not self._wrong()

    def _wrong(self) -> str:
        try:
            found = set()
            if self.folder.is_symlink():
                return "a link stands"
            for path in _entries(self.folder):
                name = path.relative_to(self.folder).as_posix()
                if name not in self.files:
                    return f"{name[:80]!r} appeared"
                if not _same(path, *self.files[name]):
                    return f"{name[:80]!r} was changed"
                found.add(name)
        except OSError as error:
            return f"something cannot be read ({error.strerror})"
        lacking = sorted(self.files.keys() - found)
        return f"{lacking[0][:80]!r} vanished" if lacking else ""


def unpack(data: bytes, expected: str, folder: Path) -> AppCode:
    """A bundle's files in ``folder``, made whole or not at all; files that are there already are checked.

    Raises as ``opened``; StorageError when the disk refuses.
    """
    spec, contents = opened(data, expected)
    files = {name: (len(text), hashlib.sha256(text).hexdigest()) for name, text in contents.items()}
    code = AppCode(expected, folder, spec, files)
    try:
        with _unpacking:
            if not code.intact():
                _write(contents, folder)
            _protect(folder)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror}; free space there") from None
    return code


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


def _same(path: Path, size: int, digest: str) -> bool:
    """True for a plain file of these bytes; a file of another size is not read."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest() == digest


def _write(contents: Mapping[str, bytes], folder: Path) -> None:
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        for name, data in contents.items():
            path = scratch / PurePosixPath(name)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_bytes(data)
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            _remove(folder)
        scratch.replace(folder)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _protect(folder: Path) -> None:
    """Make the files read-only against mistakes; a change by their owner is found by ``check``."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            (Path(root) / name).chmod(0o400)
        Path(root).chmod(0o500)


def remove(folder: Path) -> None:
    """Remove an app's unpacked files, where there are any. Raises StorageError."""
    try:
        with _unpacking:
            if folder.is_symlink():
                folder.unlink()
            elif folder.exists():
                _remove(folder)
    except OSError as error:
        raise StorageError(f"cannot remove {folder}: {error.strerror}; remove it yourself") from None


def _remove(folder: Path) -> None:
    above = stat.S_IMODE(folder.parent.stat().st_mode)
    for place in (folder.parent, *(Path(root) for root, _, _ in os.walk(folder))):
        place.chmod(0o700)
    try:
        shutil.rmtree(folder)
    finally:
        folder.parent.chmod(above)
