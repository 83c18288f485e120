"""Tensors between a stage and the blob store: safetensors files.

A tensor's blob holds the key "value" and, in a checkpoint, its optimizer state.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from atoll.errors import BadFrame, StorageError
from atoll.execute import DTYPES
from atoll.stage_memory import STORING_BYTES
from worker.blobs import STATE_KEYS, BlobFile, BlobStore
from worker.cancel import Cancel

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.opdag import StateMeta

PIECE_BYTES = 4 << 20  # of a tensor, hashed and written at one time
UNWRITTEN_BYTES = STORING_BYTES - PIECE_BYTES
"""Bytes of files that wait for the disk; each wait for it takes some milliseconds."""
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


class Fetched(Protocol):
    """Blobs that are on this machine's disk."""

    def path(self, name: str) -> Path:
        """Where a blob lies; read it, and leave it as it is."""


def load(store: Fetched, name: str, blob: str, state: StateMeta) -> dict[str, Tensor]:
    """The tensors of one blob, checked against the declared shape and dtype.

    BadFrame names what differs; the file stays memory-mapped, so the caller copies.
    """
    try:
        tensors = load_file(store.path(blob))
    except (SafetensorError, OSError) as error:
        raise BadFrame(f"blob {blob[:12]} of {name} is not a safetensors file: {error}") from None
    value = tensors.get("value")
    if value is None or len(tensors) > 1 + STATE_KEYS:
        raise BadFrame(f"blob {blob[:12]} of {name} holds {sorted(tensors)[:5]}, expected 'value'")
    if tuple(value.shape) != state.meta.shape or value.dtype is not DTYPES[state.meta.dtype]:
        raise BadFrame(
            f"{name} is {value.dtype} {tuple(value.shape)}, the model has "
            f"{state.meta.dtype} {state.meta.shape}"
        )
    return tensors


class _Pages:
    """Bound on the memory of files that were written and are not on the disk.

    Such pages belong to whoever wrote them, up to the whole state of a stage; a control group counts them.
    """

    def __init__(self) -> None:
        self._files: dict[Path, None] = {}  # in order
        self._held = 0

    def wrote(self, path: Path, n_bytes: int) -> None:
        """Take in that so many bytes were written; once it is too much, have all of it on the disk."""
        self._files[path] = None
        self._held += n_bytes
        if self._held < UNWRITTEN_BYTES or not hasattr(os, "posix_fadvise"):
            return
        for written in self._files:
            descriptor = os.open(written, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
        self._files, self._held = {}, 0


def write_tensors(
    tensors: Mapping[str, Mapping[str, Tensor]], scratch: Path, cancel: Cancel
) -> dict[str, BlobFile]:
    """Write a stage's tensors to files in ``scratch``, piece by piece: no second copy of them is made.

    Raises StorageError (a full disk) and Cancelled, after which no file is left.
    """
    files: dict[str, BlobFile] = {}
    prefix, pages = secrets.token_hex(4), _Pages()
    path = scratch
    try:
        for number, (name, found) in enumerate(sorted(tensors.items())):
            path = scratch / f"{prefix}.{number}"
            files[name] = BlobFile(path, "", 0)  # removed if this fails
            files[name] = _written(path, found, pages, cancel)
    except BaseException as error:
        remove(files)
        if isinstance(error, OSError):
            raise StorageError(f"cannot write {path}: {error.strerror}; free space") from None
        raise
    return files


def _written(path: Path, tensors: Mapping[str, Tensor], pages: _Pages, cancel: Cancel) -> BlobFile:
    """Write one blob, as ``safetensors`` does: by falling element size, then by name."""
    keys = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header, at = {}, 0
    for key in keys:
        shape, n_bytes = list(tensors[key].shape), tensors[key].nbytes
        header[key] = {
            "dtype": _NAMES[tensors[key].dtype],
            "shape": shape,
            "data_offsets": [at, at + n_bytes],
        }
        at += n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        head = memoryview(len(text).to_bytes(8, "little") + text)
        for piece in itertools.chain((head,), _pieces(tensors, keys)):
            cancel.check()
            left = piece
            while left:
                left = left[file.write(left) :]
            digest.update(piece)
            size += len(piece)
            pages.wrote(path, len(piece))
    return BlobFile(path, digest.hexdigest(), size)


def _pieces(tensors: Mapping[str, Tensor], keys: Iterable[str]) -> Iterator[memoryview]:
    for key in keys:
        flat = tensors[key].detach().contiguous().reshape(-1)
        for piece in torch.split(flat, max(1, PIECE_BYTES // flat.element_size())) if flat.numel() else ():
            yield memoryview(piece.cpu().view(torch.uint8).numpy())  # type: ignore[arg-type]


def remove(files: Mapping[str, BlobFile]) -> None:
    """Delete what ``write_tensors`` wrote, and deltas of it."""
    for file in files.values():
        file.path.unlink(missing_ok=True)
    drop_deltas(files)


def drop_deltas(files: Mapping[str, BlobFile]) -> None:
    """Delete the deltas of files alone."""
    for file in files.values():
        if file.delta is not None:
            file.delta.path.unlink(missing_ok=True)


def store_files(
    store: BlobStore,
    files: Mapping[str, BlobFile],
    cancel: Cancel,
    taken: Callable[[Mapping[str, BlobFile], int], None] | None = None,
    *,
    keep: bool = False,
) -> dict[str, str]:
    """Store what ``write_tensors`` wrote; returns tensor name -> blob hash. Only what is missing travels, as
    deltas where files have some. ``keep``: on this machine's disk, and not into the store.

    The files are gone afterwards, or ``taken``'s, which hears of the bytes that travelled, once the store has
    them. Raises StorageError (a full store), ConnectionFailed, Cancelled.
    """
    left = files
    try:
        if keep:
            store.keep(list(files.values()), cancel)
        else:
            travelled = store.store(list(files.values()), cancel)
            if taken is not None:
                drop_deltas(files)
                left = {}
                taken(files, travelled)
    finally:
        remove(left)
    return {name: file.hash for name, file in files.items()}
