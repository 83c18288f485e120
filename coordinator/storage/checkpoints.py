"""Check that the blobs of a checkpoint are what the journal takes them for, without torch.

A checkpoint is whole when every tensor's blob is in the store and begins with a safetensors header of
the declared dtype and shape. Whether a blob's bytes still hash to its name is checked on request.
"""

from __future__ import annotations

import json
import struct
from math import prod
from typing import TYPE_CHECKING, Any

from atoll.opdag import DTYPE_BYTES
from coordinator.storage.blob_store import Gone

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from atoll.opdag import StateMeta
    from coordinator.storage.blob_store import BlobStore

MAX_HEADER_BYTES = 64 << 10  # of a tensor's file
STATE_TENSORS = 7  # beside the value, at most, none with more elements: an optimizer's, and a peer's
VALUE = "value"
_DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip


def defect(store: BlobStore, name: str, blob: str, state: StateMeta | None, *, hashes: bool = False) -> str:
    """Return why a blob is not the tensor ``name`` in a checkpoint, "" when it is; of one without a declared
    ``state`` only whether it is there.

    ``hashes``: also read all its bytes. One whose bytes do not hash to its name any more is dropped.
    StorageError where the store cannot say now: that is no defect of the blob.
    """
    if not store.has(blob):
        return f"the blob {blob[:12]} of {name} is not in the store"
    try:
        head = store.head(blob, 8 + MAX_HEADER_BYTES)
        wrong = _header_defect(head, store.size(blob), state) if state is not None else ""
    except Gone:
        wrong = "its bytes are gone"
    # One that rotted here would else stand in the way of whoever sends the same bytes again.
    if (wrong or hashes) and store.rotten(blob):
        wrong = "its bytes are gone or do not hash to its name; it is dropped"
    return f"the blob {blob[:12]} of {name} is damaged: {wrong}" if wrong else ""


def torn(
    store: BlobStore,
    tensors: Mapping[str, str],
    states: Mapping[str, StateMeta],
    needed: Collection[str],
    *,
    hashes: bool = False,
) -> str:
    """Return the first reason why a checkpoint cannot be loaded, "" when it can.

    ``states``: declared dtypes and shapes; ``needed``: names that a job of this kind has to find.
    StorageError as ``defect``.
    """
    lacking = sorted(set(needed) - tensors.keys())
    if lacking:
        return f"{len(lacking)} tensors have no blob, first {lacking[0]!r}"
    defects = (
        defect(store, name, blob, states.get(name), hashes=hashes) for name, blob in sorted(tensors.items())
    )
    return next(filter(None, defects), "")


def _header_defect(head: bytes, size: int, state: StateMeta) -> str:
    """Return what is wrong with the first bytes of a tensor's file of ``size`` bytes."""
    try:
        (length,) = struct.unpack("<Q", head[:8])
        if length > MAX_HEADER_BYTES or 8 + length > size:
            return f"a header of {length} bytes in a file of {size}"
        entries: dict[str, Any] = json.loads(head[8 : 8 + length])
        entries.pop("__metadata__", None)
        if VALUE not in entries or len(entries) > 1 + STATE_TENSORS:
            return f"it holds {sorted(entries)[:5]}, expected 'value'"
        end = 0
        for key, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            begin, stop = entry["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in shape):
                return f"{key} has the shape {shape}"
            if begin != end or stop - begin != prod(shape) * DTYPE_BYTES[dtype]:
                return f"{key} of {dtype} {shape} at bytes [{begin}, {stop}), expected from {end}"
            if key == VALUE and (dtype, shape) != (state.meta.dtype, state.meta.shape):
                return f"{dtype} {shape}, the model has {state.meta.dtype} {state.meta.shape}"
            if prod(shape) > max(1, state.meta.elements):
                return f"{key} of {prod(shape)} elements beside a value of {state.meta.elements}"
            end = stop
        if 8 + length + end != size:
            return f"{size} bytes, its header speaks of {8 + length + end}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        return "it has no safetensors header"
    return ""
