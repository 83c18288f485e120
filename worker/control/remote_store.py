"""The coordinator's Blobs and Data services as the ports that the worker's parts expect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import grpc

from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.grpc_errors import to_atoll_error
from worker.blobs import Chunk
from worker.stage.feed import Arrived, Fetch

if TYPE_CHECKING:
    from collections.abc import Sequence

CALL_TIMEOUT_S = 30.0


class BlobsOverGrpc:
    """``blobs.BlobPort`` over one channel."""

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
        request = pb.BlobList(blobs=[pb.BlobRef(hash=name) for name in hashes])
        try:
            reply = self._stub.Missing(request, metadata=self._metadata, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise to_atoll_error(error, self._address) from None
        return {blob.hash: blob.offset for blob in reply.blobs}

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


def data_fetch(channel: grpc.Channel, metadata: Sequence[tuple[str, str]], address: str, job: str) -> Fetch:
    """``feed.Fetch`` of one job over one channel."""
    stub: Any = rpc.DataStub(channel)

    def fetch(evaluation: bool, inputs: tuple[str, ...], first_step: int, count: int) -> Iterable[Arrived]:
        request = pb.BatchRequest(
            job=job, evaluation=evaluation, inputs=inputs, first_step=first_step, count=count
        )
        call = stub.Batches(request, metadata=metadata)
        try:
            for b in call:
                yield Arrived(b.step, b.micro, b.input, b.dtype, tuple(b.shape), b.data)
        except grpc.RpcError as error:
            raise to_atoll_error(error, address) from None
        finally:
            call.cancel()

    return fetch
