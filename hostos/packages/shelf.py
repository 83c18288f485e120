"""Environments of apps on one machine: a folder a list of packages, bounded in number and bytes.

    SHELF/lock         one process changes the shelf at a time
    SHELF/KEY/wheels   as they were fetched; they prove what ``site`` must hold
    SHELF/KEY/site     unpacked, read-only; a process of the app appends it to its path
    SHELF/KEY/used     locked by each run that has it open; its time is that of the last use

A folder at the end of ``sys.path`` and no virtual environment: nothing in it takes the place of a module of
this installation, Python runs no ``.pth`` file of it, and there is no program in it to start.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from atoll.errors import AccessDenied, BadFrame, StorageError
from hostos.files.file_locks import lock
from hostos.files.frozen_folder import difference, protect, remove
from hostos.files.private_files import private_folder
from hostos.packages.fetching import NotFetched, fetch, size_of
from hostos.packages.pinned import Pinned, key
from hostos.packages.wheels import chosen, shadowing, unpack

MAX_ENVIRONMENTS = 16
_TURN_S = 0.1


class Environment:
    """An app's packages, held open: nobody removes them before ``close``."""

    def __init__(self, folder: Path, files: dict[str, tuple[int, str]], used: IO[str]) -> None:
        self.site = folder / "site"
        self._files, self._used = files, used

    def check(self) -> None:
        """Raise AccessDenied unless the folder holds what the wheels hold, and nothing else."""
        if wrong := difference(self.site, self._files):
            raise AccessDenied(
                f"an app's packages are not what was installed: {wrong} in {self.site}; see who did that: "
                "the next run installs them again"
            )

    def close(self) -> None:
        """Let them be removed once there is no room for them."""
        self._used.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()


class Shelf:
    """The environments below one folder. ``source`` as ``checked_source`` returns it."""

    def __init__(self, root: Path, source: str, most_bytes: int) -> None:
        self._root, self._source, self._most_bytes = root, source, most_bytes

    def open(self, packages: Sequence[Pinned], stop: Callable[[], bool] = lambda: False) -> Environment:
        """The environment with these packages, installed where it is not there yet.

        Raises NotFetched, BadFrame for wheels that are refused, StorageError, UsageError.
        """
        private_folder(self._root)
        with (self._root / "lock").open("a") as turn:
            while not _locked(turn):
                if stop():
                    raise NotFetched("the run ended")
                time.sleep(_TURN_S)
            try:
                folder = self._root / key(packages)
                opened = self._opened(folder, packages)
                if opened is None:
                    self._install(folder, packages, stop)
                    opened = self._opened(folder, packages)
                if opened is None:
                    raise StorageError(f"{folder} changed while it was read; try again")
                self._make_room(folder, opened)
                return opened
            except OSError as error:
                raise StorageError(f"{self._root}: {error.strerror}; free space there") from None

    def _opened(self, folder: Path, packages: Sequence[Pinned]) -> Environment | None:
        """What is there already; None where it is not, or is not what it was."""
        if not folder.is_dir():
            return None
        try:
            files = unpack(chosen(folder / "wheels", packages), self._most_bytes)
        except (BadFrame, OSError):
            return None
        if difference(folder / "site", files):
            return None
        used = (folder / "used").open("a")
        lock(used, shared=True)
        os.utime(folder / "used")
        return Environment(folder, files, used)

    def _install(self, folder: Path, packages: Sequence[Pinned], stop: Callable[[], bool]) -> None:
        for abandoned in self._root.glob(".*.new"):  # by a process that was killed
            remove(abandoned)
        scratch = self._root / f".{secrets.token_hex(4)}.new"
        scratch.mkdir(mode=0o700)
        try:
            wheels = chosen(fetch(packages, self._source, scratch, self._most_bytes, stop), packages)
            left = self._most_bytes - sum(path.stat().st_size for path in wheels)
            (scratch / "site").mkdir(mode=0o700)
            files = unpack(wheels, left, scratch / "site")
            if name := shadowing(files):
                raise BadFrame(
                    f"the app's packages hold a module {name!r}, which this Python or its installation has "
                    "already; nothing that is installed is replaced"
                )
            protect(scratch / "site")
            remove(scratch / "home")
            (scratch / "used").touch(mode=0o600)
            remove(folder)
            scratch.replace(folder)
        finally:
            remove(scratch)

    def _make_room(self, kept: Path, opened: Environment) -> None:
        """Remove what was not used for longest, until the rest is within the bounds."""
        sizes = {path: size_of(path) for path in self._root.iterdir() if path.is_dir()}
        for folder in sorted(sizes, key=_last_used):
            if sum(sizes.values()) <= self._most_bytes and len(sizes) <= MAX_ENVIRONMENTS:
                return
            if folder != kept and _remove_unused(folder):
                del sizes[folder]
        if sum(sizes.values()) > self._most_bytes or len(sizes) > MAX_ENVIRONMENTS:
            opened.close()
            _remove_unused(kept)
            raise StorageError(
                f"packages of the apps that run take more than {self._most_bytes} bytes or "
                f"{MAX_ENVIRONMENTS} environments; end one, or raise --app-packages-bytes"
            )


def _locked(file: IO[str], *, shared: bool = False) -> bool:
    try:
        lock(file, shared=shared, wait=False)
    except BlockingIOError:
        return False
    return True


def _last_used(folder: Path) -> float:
    try:
        return (folder / "used").stat().st_mtime
    except OSError:
        return 0.0


def _remove_unused(folder: Path) -> bool:
    """Remove an environment; false where a run has it open."""
    with suppress(FileNotFoundError), (folder / "used").open("a") as used:
        if not _locked(used):
            return False
    remove(folder)
    return True
