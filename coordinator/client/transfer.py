"""Blobs from the coordinator into the owner's memory, one at a time and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from atoll.errors import StorageError
from protos.blob_calls import BLOBS_A_REQUEST
from protos.blob_transfer import BlobPort, Chunk, fetch

if TYPE_CHECKING:
    from tenacity import Retrying

PIECE_BYTES = 1 << 20  # of what is uploaded, in one message
STREAMS = 4  # blobs of an upload at a time: while one is hashed and synced to the disk, others travel
MAX_BLOB_BYTES = 64 << 30
Progress = Callable[[int, int], None]  # bytes done, bytes in all


def silent(done_bytes: int, total_bytes: int) -> None:
    """A Progress that shows nothing."""


def download(port: BlobPort, hashes: Sequence[str], attempts: Retrying) -> Iterator[tuple[str, bytes]]:
    """Each blob's bytes in turn, checked against its hash; goes on after a lost connection.

    StorageError when what arrives is not what the hash says.
    """
    remaining = list(hashes)
    held = bytearray()

    def lacking() -> list[tuple[str, int]]:
        asked = remaining[:BLOBS_A_REQUEST]
        return [(name, len(held) if at == 0 else 0) for at, name in enumerate(asked)]

    for chunk in fetch(port.get, lacking, attempts):
        if not remaining:
            return
        _take_in(held, chunk, remaining[0])
        if len(held) == chunk.size:
            yield remaining[0], _verified(bytes(held), remaining[0])
            remaining.pop(0)
            held.clear()


def _take_in(held: bytearray, chunk: Chunk, expected: str) -> None:
    """Append a chunk, or raise StorageError when it is not the next one of ``expected``."""
    fits = chunk.offset == len(held) and len(held) + len(chunk.data) <= chunk.size <= MAX_BLOB_BYTES
    stuck = not chunk.data and len(held) < chunk.size
    if chunk.hash != expected or not fits or stuck:
        raise StorageError(
            f"asked for byte {len(held)} of blob {expected[:12]}, got byte {chunk.offset} of "
            f"{chunk.hash[:12]}; try again, and see the coordinator's log if it stays"
        )
    held += chunk.data


def _verified(data: bytes, expected: str) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise StorageError(
            f"blob {expected[:12]} arrived with hash {found[:12]}: the coordinator's copy is damaged; "
            f"resume the job from an earlier checkpoint or submit it again"
        )
    return data
