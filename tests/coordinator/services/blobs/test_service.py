"""Blobs over real gRPC: uploads resume, damage is refused with a reason."""

import hashlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from coordinator.services.access.interceptor import EntryAccess, EntryThrottle
from coordinator.services.access.register import Register
from coordinator.services.blobs.service import BlobService
from coordinator.storage.blob_store import BlobStore
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc


@asynccontextmanager
async def served(store: BlobStore) -> AsyncIterator[rpc.BlobsStub]:
    access = EntryAccess(None, Register(), EntryThrottle(), time.time)
    server = grpc.aio.server(interceptors=[access])
    rpc.add_BlobsServicer_to_server(BlobService(store), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield rpc.BlobsStub(channel)
    await server.stop(0)


def chunk(data: bytes, begin: int, end: int) -> pb.BlobChunk:
    name = hashlib.sha256(data).hexdigest()
    return pb.BlobChunk(hash=name, size=len(data), offset=begin, data=data[begin:end])


async def test_an_upload_goes_on_where_it_broke_off_and_comes_back_whole(tmp_path: Path) -> None:
    data = os.urandom(2_500_000)
    ref = pb.BlobRef(hash=hashlib.sha256(data).hexdigest())

    async with served(BlobStore(tmp_path)) as stub:
        await stub.Put(iter([chunk(data, 0, 1_000_000)]))
        missing = (await stub.Missing(pb.BlobList(blobs=[ref]))).blobs
        at = missing[0].offset
        assert (len(missing), at) == (1, 999_999), "its last byte may be the blob's"
        done = await stub.Put(iter([chunk(data, at, 2_000_000), chunk(data, 2_000_000, len(data))]))
        assert [b.hash for b in done.blobs] == [ref.hash]
        assert not (await stub.Missing(pb.BlobList(blobs=[ref]))).blobs
        got = [c async for c in stub.Get(pb.BlobList(blobs=[pb.BlobRef(hash=ref.hash, offset=500)]))]
        assert b"".join(c.data for c in got) == data[500:]
        assert {c.size for c in got} == {len(data)}


async def test_forged_bytes_and_unknown_blobs_end_the_call_with_a_reason(tmp_path: Path) -> None:
    forged = chunk(b"honest", 0, 6)
    forged.data = b"forged"

    async with served(BlobStore(tmp_path)) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Put(iter([forged]))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "hash to" in (refused.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as absent:
            async for _ in stub.Get(pb.BlobList(blobs=[pb.BlobRef(hash="0" * 64)])):
                pass
        assert absent.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
