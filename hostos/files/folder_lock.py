"""Lock of a state folder, held by one process; its file names the process and where that answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import UsageError
from hostos.files.file_locks import lock
from hostos.files.refusals import disk

MAX_FILE_BYTES = 512
REMEDY = "choose another --state-dir"


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of a lock, as far as its file names it: nothing yet where the lock has only just been taken."""

    process: int | None = None
    address: str = ""  # where it answers, where it says so


class FolderLock:
    """An exclusive lock on ``path``, from the constructor to ``release`` or the end of the process.

    The kernel drops it with the process, so nothing is left behind by a kill. Programs that this process
    starts do not inherit it.
    """

    def __init__(self, path: Path, refusal: Callable[[Holder], str]) -> None:
        """Create the folder where it is missing, and take the lock.

        Raises UsageError with what ``refusal`` says of the holder when another process has it, and
        StorageError when the folder cannot be written or its file system has no locks.
        """
        self._path = path
        with disk(f"lock {path}", REMEDY):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with disk(f"lock {path}", REMEDY):
                try:
                    lock(self._descriptor, wait=False)
                except BlockingIOError:
                    raise UsageError(refusal(_read(path))) from None
                self.note("")
        except BaseException:
            os.close(self._descriptor)
            raise

    def note(self, address: str) -> None:
        """Say in the file which process this is and where it answers. StorageError when the disk refuses."""
        text = f"{os.getpid()} {address}".strip().encode()
        with disk(f"lock {self._path}", REMEDY):
            os.pwrite(self._descriptor, text, 0)
            os.ftruncate(self._descriptor, len(text))

    def release(self) -> None:
        """Let the next process in; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):  # what is written there means nothing without the lock
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


def holder_of(path: Path) -> Holder | None:
    """Holder of the lock, None when it is free."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        lock(descriptor, shared=True, wait=False)
    except OSError:
        return _read(path)
    finally:
        os.close(descriptor)
    return None


def _read(path: Path) -> Holder:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES).decode("ascii", "replace")
    except OSError:
        return Holder()
    process, _, address = text.strip().partition(" ")
    if not process.isdigit() or len(process) >= 12:
        return Holder()
    return Holder(int(process), address if address.isprintable() else "")
