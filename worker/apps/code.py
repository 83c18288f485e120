"""An accepted app's files on this machine: written once, read-only, and looked at before every start.

What the owner accepted is the hash of a bundle. Each run holds the digests of that bundle's files in
memory, so whatever happens on the disk after the files were unpacked, nothing else is ever run.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from atoll.errors import AccessDenied
from hostos.files import frozen_folder
from hostos.files.frozen_folder import difference, protect
from hostos.files.refusals import disk
from protos.app_bundle import AppSpec, opened

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
        wrong = difference(self.folder, self.files)
        if wrong:
            raise AccessDenied(
                f"app {self.hash[:16]} does not run here: {wrong} in {self.folder} since it was unpacked, so "
                "these are not the files that were accepted; see who did that; the next run unpacks them"
            )


def unpack(data: bytes, expected: str, folder: Path) -> AppCode:
    """A bundle's files in ``folder``, made whole or not at all; files that are there already are checked.

    Raises as ``opened``; StorageError when the disk refuses.
    """
    spec, contents = opened(data, expected)
    files = {name: (len(text), hashlib.sha256(text).hexdigest()) for name, text in contents.items()}
    code = AppCode(expected, folder, spec, files)
    with disk(f"write {folder}", "free space there"), _unpacking:
        if difference(folder, files):
            _write(contents, folder)
        protect(folder)
    return code


def _write(contents: Mapping[str, bytes], folder: Path) -> None:
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        for name, data in contents.items():
            path = scratch / PurePosixPath(name)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_bytes(data)
        frozen_folder.remove(folder)
        scratch.replace(folder)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def remove(folder: Path) -> None:
    """Remove an app's unpacked files, where there are any. Raises StorageError."""
    with disk(f"remove {folder}", "remove it yourself"), _unpacking:
        frozen_folder.remove(folder)
