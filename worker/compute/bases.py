"""The files of the newest stored state, kept on this disk: the next state is sent as what changed.

A delta goes only where it is shorter and the line is what storing waits for. What the store has whole is
always the base, so nothing at rest depends on a chain of deltas (decision 083).
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import structlog

from compressors.deltas import MOST_BYTES_PER_S, encode, fitting
from worker.blobs import BlobFile, DeltaFile
from worker.cancel import Cancel
from worker.stage.tensor_blobs import drop_deltas

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """When states are sent as deltas."""

    most_bytes_per_s: float = MOST_BYTES_PER_S
    """That storing had last."""
    most_share: float = 0.9
    """Of a whole file that a delta may take: what is longer is not worth the store's work."""


@dataclass(slots=True)
class Bases:
    """Files of the state that was stored last, by tensor; used by one thread at a time."""

    scratch: Path
    clock: Callable[[], float] = time.monotonic
    rule: DeltaRule = DeltaRule()
    _job: str = ""
    _files: dict[str, BlobFile] = field(default_factory=dict)
    _bytes_per_s: float = 0.0  # of the last time that anything was sent

    def coded(self, job: str, files: Mapping[str, BlobFile], cancel: Cancel) -> dict[str, BlobFile]:
        """Return the files, each with its delta against the one before where that is shorter. Raises
        Cancelled; a disk that has no room for deltas does without."""
        found = dict(files)
        if job != self._job or self._bytes_per_s > self.rule.most_bytes_per_s:
            return found
        for name, file in files.items():
            base = self._files.get(name)
            if base is None or base.hash == file.hash:
                continue
            cancel.check()
            path = self.scratch / f"{secrets.token_hex(4)}.delta"
            try:
                delta = self._delta(base, file, path, cancel)
            except OSError as error:
                log.info("state.no_delta", tensor=name, reason=str(error))
                delta = None
            except BaseException:
                path.unlink(missing_ok=True)
                drop_deltas(found)
                raise
            if delta is None:
                path.unlink(missing_ok=True)
            else:
                found[name] = replace(file, delta=delta)
        return found

    def _delta(self, base: BlobFile, new: BlobFile, path: Path, cancel: Cancel) -> DeltaFile | None:
        if base.size != new.size or not base.size:
            return None
        before, after = (np.memmap(file.path, np.uint8, "r") for file in (base, new))
        if not fitting(before, after):
            return None
        digest, size, most = hashlib.sha256(), 0, self.rule.most_share * new.size
        with path.open("wb") as file:
            for piece in encode(before, after, (base.hash, new.hash)):
                cancel.check()
                size += len(piece)
                if size > most:
                    return None
                digest.update(piece)
                file.write(piece)
        return DeltaFile(path, digest.hexdigest(), size, base.hash)

    def taker(self, job: str) -> Callable[[Mapping[str, BlobFile], int], None]:
        """Return what is to be called with files and the bytes that travelled, once the store has them; they
        take the place of those before. It is about to send now."""
        return partial(self._stored, job, self.clock())

    def _stored(self, job: str, begun_s: float, files: Mapping[str, BlobFile], n_bytes: int) -> None:
        took_s = self.clock() - begun_s
        if n_bytes and took_s > 0:
            self._bytes_per_s = n_bytes / took_s
        kept = {file.path for file in files.values()}
        for old in self._files.values():
            if old.path not in kept:
                old.path.unlink(missing_ok=True)
        self._job = job
        self._files = {name: replace(file, delta=None) for name, file in files.items()}

    def forget(self) -> None:
        """No state of a job is stored here any more."""
        for file in self._files.values():
            with suppress(OSError):
                file.path.unlink(missing_ok=True)
        self._job, self._files, self._bytes_per_s = "", {}, 0.0
