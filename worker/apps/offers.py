"""Apps that were offered here and not accepted: each its bundle as it came, one inert file, bounded.

    STATE/apps/offered/HASH.bundle   read by `atoll-worker apps show`, never unpacked, never imported

An app's files are written out once its owner accepted it (``worker.apps.code``), and not before.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from atoll.errors import UsageError
from hostos.files.private_files import private_folder, write_private
from hostos.files.refusals import disk
from protos.app_bundle import opened

FOLDER, SUFFIX = "offered", ".bundle"
MAX_OFFERS = 16
MAX_BYTES = 64 << 20  # of all of them; the oldest are over first
KEPT_S = 7 * 86_400.0


class Offers:
    """The bundles that wait for their owner's word in one ``apps`` folder."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = root / FOLDER, clock

    def keep(self, name: str, data: bytes) -> None:
        """Keep a bundle to be read, and room for it. Raises StorageError."""
        private_folder(self._folder)
        write_private(self._path(name), data)
        self.sweep(keep=name)

    def read(self, name: str) -> bytes | None:
        """The bundle of this hash; None where it is not kept, or is another one by now."""
        try:
            data = self._path(name).read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == name else None

    def files(self, name: str) -> dict[str, bytes]:
        """A kept app's files by their path, in memory. UsageError where it is not kept, BadFrame."""
        data = self.read(name)
        if data is None:
            raise UsageError(
                f"the files of app {name[:16]} are not here; they come when it is offered again, and stay "
                f"{KEPT_S / 86_400:g} days"
            )
        return opened(data, name)[1]

    def drop(self, name: str) -> None:
        """Remove a bundle: it was accepted, and is unpacked, or refused. Raises StorageError."""
        with disk(f"remove {self._path(name)}"):
            self._path(name).unlink(missing_ok=True)

    def sweep(self, keep: str = "") -> None:
        """Remove what is over: the oldest, and those that nobody accepted in time."""
        now_s, total = self._clock(), 0
        kept = self._path(keep) if keep else None
        newest = sorted(self._aged(), key=lambda entry: (entry[2] == kept, entry[0]), reverse=True)
        for at, (made_s, size, path) in enumerate(newest):
            total += size
            expired = abs(now_s - made_s) > KEPT_S and path != kept
            if expired or (at and (at >= MAX_OFFERS or total > MAX_BYTES)):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _aged(self) -> list[tuple[float, int, Path]]:
        found = []
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                with contextlib.suppress(OSError):
                    facts = path.lstat()
                    found.append((facts.st_mtime, facts.st_size, path))
        return found

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"
