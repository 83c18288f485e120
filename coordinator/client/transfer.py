"""Content-addressed blobs between the owner's machine and the coordinator, resumable both ways."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import grpc

from atoll.errors import StorageError
from coordinator.client.calls import Patience, calling
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc

CHUNK_BYTES = 1 << 20
BLOBS_A_REQUEST = 10_000
MAX_BLOB_BYTES = 64 << 30
Progress = Callable[[int, int], None]  # bytes done, bytes in all


def silent(done_bytes: int, total_bytes: int) -> None:
    """A Progress that shows nothing."""


@dataclass(frozen=True, slots=True)
class LocalBlob:
    """Bytes to upload, made when they are needed so that a large model is not held twice."""

    hash: str
    size: int
    read: Callable[[], bytes]

    @classmethod
    def of(cls, read: Callable[[], bytes]) -> LocalBlob:
        """The blob that ``read`` returns; it must return the same bytes every time."""
        data = read()
        return cls(hashlib.sha256(data).hexdigest(), len(data), read)


class Transfers:
    """Uploads and downloads over one channel, with the owner's credentials."""

    def __init__(
        self,
        channel: grpc.Channel,
        metadata: Sequence[tuple[str, str]],
        address: str,
        patience: Callable[[], Patience] = Patience,
    ) -> None:
        self._stub = rpc.BlobsStub(channel)
        self._metadata = tuple(metadata)
        self._address = address
        self._patience = patience

    def upload(self, blobs: Sequence[LocalBlob], progress: Progress = silent) -> int:
        """Send what the coordinator lacks, from where an earlier upload ended; bytes sent.

        ConnectionFailed when it stays unreachable, StorageError when its disk is full.
        """
        by_hash = {blob.hash: blob for blob in blobs}
        total = sum(blob.size for blob in by_hash.values())
        patience = self._patience()
        sent = 0

        def chunks(missing: Mapping[str, int]) -> Iterator[pb.BlobChunk]:
            nonlocal sent
            done = total - sum(by_hash[name].size - offset for name, offset in missing.items())
            progress(done, total)
            for name, offset in missing.items():
                data = by_hash[name].read()
                for start in range(offset, max(len(data), 1), CHUNK_BYTES):
                    piece = data[start : start + CHUNK_BYTES]
                    yield pb.BlobChunk(hash=name, size=len(data), offset=start, data=piece)
                    sent += len(piece)
                    done += len(piece)
                    progress(done, total)

        with calling(self._address):
            while True:
                try:
                    missing = self._missing(list(by_hash.values()))
                    if not missing:
                        progress(total, total)
                        return sent
                    self._stub.Put(chunks(missing), metadata=self._metadata)
                    patience.success()
                except grpc.RpcError as error:
                    patience.failed(error)

    def _missing(self, blobs: Sequence[LocalBlob]) -> dict[str, int]:
        """Hash -> bytes already there, of the blobs that are not whole at the coordinator."""
        found: dict[str, int] = {}
        known = {blob.hash: blob.size for blob in blobs}
        for first in range(0, len(blobs), BLOBS_A_REQUEST):
            part = blobs[first : first + BLOBS_A_REQUEST]
            request = pb.BlobList(blobs=[pb.BlobRef(hash=b.hash, size=b.size) for b in part])
            reply = self._stub.Missing(request, metadata=self._metadata, timeout=60.0)
            found |= {b.hash: min(b.offset, known[b.hash]) for b in reply.blobs if b.hash in known}
        return found

    def download(self, hashes: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Each blob's bytes in turn, checked against its hash; goes on after a lost connection.

        StorageError when what arrives is not what the hash says.
        """
        remaining = list(hashes)
        held = bytearray()
        patience = self._patience()
        while remaining:
            request = pb.BlobList(
                blobs=[
                    pb.BlobRef(hash=name, offset=len(held) if index == 0 else 0)
                    for index, name in enumerate(remaining[:BLOBS_A_REQUEST])
                ]
            )
            with calling(self._address):
                try:
                    for chunk in self._stub.Get(request, metadata=self._metadata):
                        patience.success()
                        _take_in(held, chunk, remaining[0])
                        if len(held) == chunk.size:
                            yield remaining[0], _verified(bytes(held), remaining[0])
                            remaining.pop(0)
                            held.clear()
                            if not remaining:
                                return
                except grpc.RpcError as error:
                    patience.failed(error)


def _take_in(held: bytearray, chunk: pb.BlobChunk, expected: str) -> None:
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
