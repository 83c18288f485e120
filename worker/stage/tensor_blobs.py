"""Tensors between a stage and the blob store: safetensors files.

A tensor's blob holds the key "value" and, in a checkpoint, its optimizer state.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from atoll.errors import BadFrame, StorageError
from atoll.execute import DTYPES
from worker.blobs import STATE_KEYS, BlobFile, BlobStore
from worker.cancel import Cancel

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.opdag import StateMeta


def load(store: BlobStore, name: str, blob: str, state: StateMeta) -> dict[str, Tensor]:
    """The tensors of one blob, checked against the declared shape and dtype.

    BadFrame names what differs; the file stays memory-mapped, so the caller copies.
    """
    try:
        tensors = load_file(store.path(blob))
    except (SafetensorError, OSError) as error:
        raise BadFrame(f"blob {blob[:12]} of {name} is no safetensors file: {error}") from None
    value = tensors.get("value")
    if value is None or len(tensors) > 1 + STATE_KEYS:
        raise BadFrame(f"blob {blob[:12]} of {name} holds {sorted(tensors)[:5]}, expected 'value'")
    if tuple(value.shape) != state.meta.shape or value.dtype is not DTYPES[state.meta.dtype]:
        raise BadFrame(
            f"{name} is {value.dtype} {tuple(value.shape)}, the model has "
            f"{state.meta.dtype} {state.meta.shape}"
        )
    return tensors


def store_tensors(
    store: BlobStore, snapshot: Mapping[str, Mapping[str, Tensor]], scratch: Path, cancel: Cancel
) -> dict[str, str]:
    """Store a stage's snapshot; returns tensor name -> blob hash. Only what is missing travels, by way of
    files in ``scratch``, which are gone afterwards.

    Raises StorageError (a full store or disk), ConnectionFailed, Cancelled.
    """
    files: dict[str, BlobFile] = {}
    prefix = secrets.token_hex(4)
    try:
        for number, (name, tensors) in enumerate(sorted(snapshot.items())):
            cancel.check()
            data = save({key: value.contiguous() for key, value in sorted(tensors.items())})
            path = scratch / f"{prefix}.{number}"
            files[name] = BlobFile(path, hashlib.sha256(data).hexdigest(), len(data))
            try:
                path.write_bytes(data)
            except OSError as error:
                raise StorageError(f"cannot write {path}: {error.strerror}; free space") from None
        store.store(list(files.values()), cancel)
    finally:
        for file in files.values():
            file.path.unlink(missing_ok=True)
    return {name: file.hash for name, file in files.items()}
