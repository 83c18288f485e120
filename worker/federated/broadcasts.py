"""A job's broadcasts on this machine: fetched once, kept dense under the full form's hash.

The model that is evaluated after a round is the one that the next round starts from, so it comes
down once; a delta comes down where the model before is still here. The last two are kept.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import BadFrame
from compressors.container import is_coded, most_file_bytes, read_dense, write_dense
from compressors.model_file import read_delta, read_model
from hostos.files.refusals import disk

if TYPE_CHECKING:
    from atoll.messages.to_worker import Model
    from compressors.container import Metas
    from worker.blobs import BlobStore
    from worker.cancel import Cancel

log = structlog.get_logger()

KEPT_MODELS = 2  # the one in use and the one before, which deltas start from


@dataclass(frozen=True)
class Fetched:
    """A broadcast's arrays, mapped, and what bringing it here took; 0 bytes when it was at hand, or at a
    worker of the same site."""

    arrays: dict[str, Any]
    bytes: int
    seconds: float


class Models:
    """The models of one job below ``folder``."""

    def __init__(
        self,
        folder: Path,
        blobs: BlobStore,
        expected: Metas,
        progress: Callable[[], None] = lambda: None,
        *,
        lends: bool = False,
    ) -> None:
        """``lends``: to workers of the same site."""
        self._lends = lends
        self._folder, self._blobs, self._expected = folder, blobs, expected
        self._progress = progress
        self._arrived = 0
        with disk(f"write {folder}", "choose another --state-dir"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def fetch(self, ref: Model, cancel: Cancel) -> Fetched:
        """The broadcast's arrays. BadFrame when it is not what the rule sends down, ConnectionFailed,
        StorageError, Cancelled."""
        path, self._arrived, began_s = self._path(ref.full.hash), 0, time.perf_counter()
        if not path.is_file():
            self._bring(ref, path, cancel)
        arrays = read_dense(path, self._expected)
        seconds = time.perf_counter() - began_s if self._arrived else 0.0
        self._trim(ref.full.hash)
        return Fetched(arrays, self._arrived, seconds)

    def clear(self) -> None:
        """Forget every model."""
        for path in self._folder.iterdir():
            path.unlink(missing_ok=True)

    def _bring(self, ref: Model, path: Path, cancel: Cancel) -> None:
        base = self._path(ref.base) if ref.base else None
        if ref.delta is not None and base is not None and base.is_file():
            try:
                blob = self._download(ref.delta.hash, ref.holder, cancel)
                known = read_dense(base, self._expected)
                write_dense(path, read_delta(blob, self._expected, known, ref.base))
            except BadFrame as error:
                log.warning("model.delta_refused", reason=str(error))
            else:
                return
        blob = self._download(ref.full.hash, ref.holder, cancel)
        if is_coded(blob):
            write_dense(path, read_model(blob, self._expected))
        else:
            part = path.with_suffix(".part")
            shutil.copyfile(blob, part)  # the store's own is not ours to move
            part.replace(path)

    def _download(self, blob: str, holder: str, cancel: Cancel) -> Path:
        def progress(nbytes: int) -> None:
            self._arrived += nbytes
            self._progress()

        wanted = {blob: most_file_bytes(self._expected)}
        if self._lends:
            self._blobs.lend(blob, cancel)
        if holder:
            self._blobs.fetch_near(holder, wanted, cancel, lambda _: self._progress())
        self._blobs.fetch(wanted, cancel, progress)
        return self._blobs.path(blob)

    def _path(self, name: str) -> Path:
        return self._folder / Path(name).name

    def _trim(self, current: str) -> None:
        self._path(current).touch()
        newest = sorted(self._folder.iterdir(), key=lambda p: p.stat().st_mtime_ns, reverse=True)
        for path in newest[KEPT_MODELS:]:
            path.unlink(missing_ok=True)
