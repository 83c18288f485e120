"""Weights that this machine's owner added: a checkpoint's tensors as blobs on its disk, which nothing evicts.

    STATE/weights/NAME.json     folder, and the hash and size of each tensor's blob
    STATE/blobs/HASH            a tensor's blob, where those that jobs bring lie as well

A job that names the same tensors finds them here. The manifest is written before the blobs are, and says that
it is not whole until they are: an addition that broke off goes on where it ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from atoll.errors import StorageError, UsageError
from atoll.federated import checked_name
from atoll.messages.from_worker import MAX_HELD_WEIGHTS
from hostos.files.folder_lock import FolderLock, Holder
from hostos.files.locked_json import read_object
from hostos.files.private_files import private_folder, sync_folder, write_private
from hostos.units import shown_size
from protos.tensor_files import checkpoint_files, tensors_of
from worker.config import make_state_dir
from worker.data.registry import KEPT_FREE_BYTES

if TYPE_CHECKING:
    from protos.tensor_files import FileTensor

FOLDER, BLOBS, LOCK = "weights", "blobs", "lock"
MAX_MANIFEST_BYTES = 8 << 20
_HASH = re.compile(r"[0-9a-f]{64}")

Progress = Callable[[int, int], None]  # bytes done, of all


@dataclass(frozen=True)
class Weights:
    """A checkpoint that was added; not ``whole``: not all of its blobs were written."""

    name: str
    folder: str
    blobs: Mapping[str, int] = field(repr=False)  # hash -> bytes
    whole: bool = True

    @property
    def n_bytes(self) -> int:
        return sum(self.blobs.values())


def add_weights(
    state_dir: Path,
    source: Path,
    name: str = "",
    begun: Callable[[], object] = lambda: None,
    progress: Progress = lambda done, total: None,
) -> Weights:
    """Have the tensors of a checkpoint's safetensors as blobs, under ``name`` or that of the folder.

    Each is hashed, and written where it is not there yet. ``begun`` is called once it is known which they
    are, before the first is written. Raises UsageError for what is no checkpoint or too much of it,
    StorageError where the disk has no room.
    """
    source = source.expanduser()
    name = checked_name("name of weights", name or source.resolve().name)
    make_state_dir(state_dir)
    lock = FolderLock(state_dir / FOLDER / LOCK, _busy)
    try:
        private_folder(state_dir / FOLDER)
        private_folder(state_dir / BLOBS)
        tensors = [tensor for path in checkpoint_files(source) for tensor in tensors_of(path)]
        others = {blob for held in list_weights(state_dir) if held.name != name for blob in held.blobs}
        counted = _Counted(progress, 2 * sum(tensor.blob_bytes for tensor in tensors))
        found = {_hashed(tensor, counted): tensor for tensor in tensors}
        if len(others | found.keys()) > MAX_HELD_WEIGHTS:
            raise UsageError(
                f"{len(found)} tensors beside {len(others - found.keys())} others; a worker holds at most "
                f"{MAX_HELD_WEIGHTS}: see `atoll-worker model list`, and remove what is not needed"
            )
        sizes = {blob: tensor.blob_bytes for blob, tensor in found.items()}
        weights = Weights(name, str(source.resolve()), sizes, whole=False)
        _check_room(state_dir, weights)
        before = _read(state_dir / FOLDER / f"{name}.json")
        _write(state_dir, weights)
        begun()
        for blob, tensor in found.items():
            _have(state_dir / BLOBS / blob, tensor, counted)
        sync_folder(state_dir / BLOBS)
        weights = Weights(name, weights.folder, sizes)
        _write(state_dir, weights)
        if before is not None:
            _drop(state_dir, before.blobs.keys())
        return weights
    except OSError as error:
        raise StorageError(f"cannot add {source}: {error}; free space, or check the disk") from None
    finally:
        lock.release()


def list_weights(state_dir: Path) -> list[Weights]:
    """Return what was added, by name; a manifest that is damaged is left out."""
    paths = sorted((state_dir / FOLDER).glob("*.json"))
    return [found for path in paths if (found := _read(path)) is not None]


def remove_weights(state_dir: Path, name: str) -> int:
    """Delete weights and the blobs that no others share; returns the bytes freed. UsageError where there are
    none of this name."""
    lock = FolderLock(state_dir / FOLDER / LOCK, _busy)
    try:
        path = state_dir / FOLDER / f"{checked_name('name of weights', name)}.json"
        found = _read(path)
        if found is None:
            known = ", ".join(held.name for held in list_weights(state_dir)) or "none"
            raise UsageError(f"no weights {name!r} were added; there are: {known}")
        path.unlink(missing_ok=True)
        return _drop(state_dir, found.blobs.keys())
    except OSError as error:
        raise StorageError(f"cannot remove {name}: {error.strerror}; check its disk") from None
    finally:
        lock.release()


def kept_blobs(state_dir: Path) -> frozenset[str]:
    """Return the blobs that nothing may evict, those of an addition under way too."""
    return frozenset(blob for held in list_weights(state_dir) for blob in held.blobs)


def held_hashes(state_dir: Path) -> bytes:
    """Return the hashes of blobs of whole weights, 32 bytes each, ascending: what the coordinator hears."""
    whole = [held for held in list_weights(state_dir) if held.whole]
    sizes = {blob: size for held in whole for blob, size in held.blobs.items()}
    here = sorted(blob for blob, size in sizes.items() if _size(state_dir / BLOBS / blob) == size)
    return bytes.fromhex("".join(here[:MAX_HELD_WEIGHTS]))


class Pins(Protocol):
    """Keeps blobs whatever else comes."""

    def pin(self, names: Iterable[str]) -> None: ...


class Claimed:
    """What the coordinator has heard of the weights that are here."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir, self._last = state_dir, b""

    def told_anew(self, cache: Pins) -> bytes | None:
        """Have the weights kept, and return what the coordinator is to hear; None: nothing, as it has heard
        of none and there are none."""
        cache.pin(kept_blobs(self._state_dir))
        last, self._last = self._last, held_hashes(self._state_dir)
        return self._last if self._last or last else None


class _Counted:
    """Bytes of the addition's two passes, as its progress."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, n_bytes: int) -> None:
        self._done += n_bytes
        self._progress(self._done, self._total)


def _busy(holder: Holder) -> str:
    return f"process {holder.process or '?'} adds or removes weights here now; wait for its end"


def _hashed(tensor: FileTensor, counted: _Counted) -> str:
    digest = hashlib.sha256()
    for piece in tensor.pieces():
        digest.update(piece)
        counted.add(len(piece))
    return digest.hexdigest()


def _check_room(state_dir: Path, weights: Weights) -> None:
    blobs = state_dir / BLOBS
    lacking = sum(size for blob, size in weights.blobs.items() if _size(blobs / blob) != size)
    free = shutil.disk_usage(blobs).free
    if lacking > free - KEPT_FREE_BYTES:
        raise StorageError(
            f"{weights.name} takes {shown_size(lacking)} more; the disk of {blobs} has {shown_size(free)} "
            f"free, of which {shown_size(KEPT_FREE_BYTES)} stay so: free space, for example by "
            "`atoll-worker model remove NAME`, or give another --state-dir"
        )


def _have(path: Path, tensor: FileTensor, counted: _Counted) -> None:
    """Write a tensor's blob, named by its hash, unless it is there."""
    if _size(path) == tensor.blob_bytes:
        counted.add(tensor.blob_bytes)
        return
    scratch, digest = path.with_suffix(".add"), hashlib.sha256()
    try:
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for piece in tensor.pieces():
                file.write(piece)
                digest.update(piece)
                counted.add(len(piece))
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != path.name:
            raise UsageError(f"{tensor.path} changed while it was read; add it again once it is whole")
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _drop(state_dir: Path, blobs: Iterable[str]) -> int:
    """Delete those of ``blobs`` that no weights name; returns the bytes freed."""
    freed = 0
    for blob in frozenset(blobs) - kept_blobs(state_dir):
        path = state_dir / BLOBS / blob
        freed += max(0, _size(path))
        path.unlink(missing_ok=True)
        path.with_suffix(".add").unlink(missing_ok=True)
    return freed


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _write(state_dir: Path, weights: Weights) -> None:
    facts = {"folder": weights.folder, "whole": weights.whole, "blobs": dict(weights.blobs)}
    write_private(state_dir / FOLDER / f"{weights.name}.json", json.dumps(facts).encode())


def _read(path: Path) -> Weights | None:
    found = read_object(path, MAX_MANIFEST_BYTES)
    blobs = found.get("blobs")
    if not isinstance(blobs, dict) or len(blobs) > MAX_HELD_WEIGHTS:
        return None
    if not all(_HASH.fullmatch(blob) and type(size) is int and size > 0 for blob, size in blobs.items()):
        return None
    return Weights(path.stem, str(found.get("folder", "")), blobs, found.get("whole") is True)
