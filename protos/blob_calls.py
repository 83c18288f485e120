"""The coordinator's blob store over gRPC."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import grpc

from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos import bounds
from protos.blob_transfer import Change, Chunk, Patch
from protos.grpc_errors import to_atoll_error

BLOBS_A_REQUEST = 10_000
CHAINS_A_REQUEST = 1_000  # each answered with some deltas
CALL_TIMEOUT_S = 60.0
PATCHED_BYTES_PER_S = 5e6  # that any coordinator reads, decodes, hashes and writes of blobs made of deltas


class BlobsOverGrpc:
    """``BlobPort`` over one channel, with the caller's credentials."""

    def __init__(self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]], address: str) -> None:
        self._stub: Any = rpc.BlobsStub(channel)
        self._metadata, self._address = metadata, address

    def get(self, wanted: list[tuple[str, int]]) -> Iterable[Chunk]:
        request = pb.BlobList(blobs=[pb.BlobRef(hash=name, offset=offset) for name, offset in wanted])
        call = self._stub.Get(request, metadata=self._metadata)
        try:
            for chunk in call:
                yield Chunk(chunk.hash, chunk.size, chunk.offset, chunk.data)
        except grpc.RpcError as error:
            raise to_atoll_error(error, self._address) from None
        finally:
            call.cancel()

    def missing(self, hashes: list[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for first in range(0, len(hashes), BLOBS_A_REQUEST):
            part = hashes[first : first + BLOBS_A_REQUEST]
            request = pb.BlobList(blobs=[pb.BlobRef(hash=name) for name in part])
            try:
                reply = self._stub.Missing(request, metadata=self._metadata, timeout=CALL_TIMEOUT_S)
            except grpc.RpcError as error:
                raise to_atoll_error(error, self._address) from None
            found |= {blob.hash: blob.offset for blob in reply.blobs}
        return found

    def gather(self, sizes: Mapping[str, int]) -> Iterator[tuple[int, int]]:
        """Have workers put what they hold of these blobs (hash -> bytes) and the coordinator does not; yields
        bytes that are there, and bytes that are to come in all."""
        refs = [pb.BlobRef(hash=name, size=size) for name, size in sizes.items()]
        before, found = (0, 0), (0, 0)
        for first in range(0, len(refs), BLOBS_A_REQUEST):
            request = pb.BlobList(blobs=refs[first : first + BLOBS_A_REQUEST])
            call = self._stub.Gather(request, metadata=self._metadata)
            try:
                for at in call:
                    found = (before[0] + at.done_bytes, before[1] + at.total_bytes)
                    yield found
            except grpc.RpcError as error:
                raise to_atoll_error(error, self._address) from None
            finally:
                call.cancel()
            before = found

    def patch(self, patches: list[Patch]) -> Collection[str]:
        request = pb.BlobPatches(
            patches=[pb.BlobPatch(hash=p.hash, size=p.size, base=p.base, delta=p.delta) for p in patches]
        )
        patience_s = CALL_TIMEOUT_S + sum(p.size for p in patches) / PATCHED_BYTES_PER_S
        try:
            reply = self._stub.Patch(request, metadata=self._metadata, timeout=patience_s)
        except grpc.RpcError as error:
            raise to_atoll_error(error, self._address) from None
        return frozenset(blob.hash for blob in reply.blobs)

    def changes(self, hashes: list[str]) -> list[Change]:
        found: list[Change] = []
        for first in range(0, len(hashes), CHAINS_A_REQUEST):
            part = hashes[first : first + CHAINS_A_REQUEST]
            request = pb.BlobList(blobs=[pb.BlobRef(hash=name) for name in part])
            try:
                reply = self._stub.Changes(request, metadata=self._metadata, timeout=CALL_TIMEOUT_S)
            except grpc.RpcError as error:
                raise to_atoll_error(error, self._address) from None
            found += map(_change, reply.changes)
        return found

    def put(self, chunks: Iterator[Chunk]) -> Collection[str]:
        failure: list[BaseException] = []

        def messages() -> Iterator[pb.BlobChunk]:
            try:
                for c in chunks:
                    yield pb.BlobChunk(hash=c.hash, size=c.size, offset=c.offset, data=c.data)
            except BaseException as error:
                failure.append(error)  # grpc would only say that iterating failed
                raise

        try:
            reply = self._stub.Put(messages(), metadata=self._metadata)
        except grpc.RpcError as error:
            if failure:
                raise failure[0] from None
            raise to_atoll_error(error, self._address) from None
        return frozenset(blob.hash for blob in reply.blobs)


def _change(c: pb.BlobChange) -> Change:
    """Raises BadFrame for names that are none."""
    base, delta = bounds.blob_hash("base", c.base), bounds.blob_hash("delta", c.delta)
    return Change(bounds.blob_hash("blob", c.hash), base, delta, c.size)
