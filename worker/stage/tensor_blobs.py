"""Tensors between a stage and the blob store: safetensors files.

A tensor's blob holds the key "value" and, in a checkpoint, its optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from atoll.errors import BadFrame
from atoll.execute import DTYPES
from protos.blob_transfer import BlobPort, LocalBlob, upload
from worker import blobs
from worker.cancel import Cancel

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.opdag import StateMeta


def load(cache: blobs.BlobCache, name: str, blob: str, state: StateMeta) -> dict[str, Tensor]:
    """The tensors of one blob, checked against the declared shape and dtype.

    BadFrame names what differs; the file stays memory-mapped, so the caller copies.
    """
    try:
        tensors = load_file(cache.path(blob))
    except (SafetensorError, OSError) as error:
        raise BadFrame(f"blob {blob[:12]} of {name} is no safetensors file: {error}") from None
    value = tensors.get("value")
    if value is None or len(tensors) > 1 + blobs.STATE_KEYS:
        raise BadFrame(f"blob {blob[:12]} of {name} holds {sorted(tensors)[:5]}, expected 'value'")
    if tuple(value.shape) != state.meta.shape or value.dtype is not DTYPES[state.meta.dtype]:
        raise BadFrame(
            f"{name} is {value.dtype} {tuple(value.shape)}, the model has "
            f"{state.meta.dtype} {state.meta.shape}"
        )
    return tensors


def upload_tensors(
    port: BlobPort,
    snapshot: Mapping[str, Mapping[str, Tensor]],
    cancel: Cancel,
    max_bytes_per_s: float | None = None,
) -> dict[str, str]:
    """Store a stage's snapshot; returns tensor name -> blob hash. Only what is missing travels.

    Raises StorageError (a full store), ConnectionFailed after so many attempts, Cancelled.
    """
    found: dict[str, LocalBlob] = {}
    for name, tensors in sorted(snapshot.items()):
        cancel.check()
        data = save({key: value.contiguous() for key, value in sorted(tensors.items())})
        found[name] = LocalBlob.of(partial(bytes, data), blobs.CHUNK_BYTES)
    upload(port, found.values(), blobs.attempts(cancel), before=blobs.paced(cancel, max_bytes_per_s))
    return {name: blob.hash for name, blob in found.items()}
