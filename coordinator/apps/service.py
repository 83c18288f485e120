"""Flower apps over gRPC: the owner's run stream, the workers' streams, and parts in and out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from atoll.errors import AccessDenied, AtollError, BadFrame, UsageError
from coordinator.apps.hub import AppDesk
from coordinator.apps.mailbox import Mailbox
from coordinator.apps.parts import OWNER
from coordinator.services.access.callers import worker_of
from coordinator.services.access.owners import Owners, Role
from coordinator.services.blobs.service import MAX_BLOBS_A_REQUEST
from protos import atoll_apps_pb2 as pb
from protos import atoll_apps_pb2_grpc as rpc
from protos import bounds
from protos.text_limits import clean

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

FIRST_WITHIN_S = 10.0

log = structlog.get_logger()


class OwnerApps(rpc.AppsServicer):
    """What the owner of an app may ask; the caller's right was checked before."""

    def __init__(self, desk: AppDesk, owners: Owners) -> None:
        self._desk, self._owners = desk, owners

    async def Run(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.FromApp], context: Context
    ) -> AsyncIterator[pb.ToApp]:
        """One run's messages both ways, until the owner ends it."""
        desk = self._desk
        first = await _first(request_iterator)
        if not first.HasField("open"):
            raise BadFrame("the first message of a run opens it")
        owner = self._owners.calling(context.invocation_metadata())
        self._owners.did(owner, "flower run", clean(context.peer() or "", 100), run=f"{first.open.run:x}")
        box = desk.owner_comes(first.open, owner.name)
        run = first.open.run

        async def read() -> None:
            async for message in request_iterator:
                if not desk.owner_says(run, box, message):
                    return
            desk.owner_goes(run, box)

        try:
            async for message in _served(read, box):
                yield message
        finally:
            desk.owner_goes(run, box)

    async def EndRun(self, request: pb.AppClose, context: Context) -> pb.PartList:  # noqa: N802
        """End a run whose ServerApp died, or that is stopped from elsewhere; another owner's needs the right
        to administer."""
        owner = self._owners.calling(context.invocation_metadata())
        run = self._desk.runs.runs.get(request.run)
        if run is not None:
            if run.owner != owner.name and not owner.may(Role.ADMINISTER):
                raise AccessDenied(f"run {run.run:x} is {run.owner}'s; who administers may end it")
            self._owners.did(owner, "flower stop", clean(context.peer() or "", 100), run=f"{request.run:x}")
        self._desk.end(request.run, request.reason or f"ended by {owner.name}")
        return pb.PartList()

    async def ListRuns(self, request: pb.AppRunsRequest, context: Context) -> pb.AppRunList:  # noqa: N802
        """Every open run, whoever's it is."""
        return self._desk.runs.listed()

    async def PutParts(self, request_iterator: AsyncIterator[pb.PartChunk], context: Context) -> pb.PartList:  # noqa: N802
        """Take chunks of any parts of an open run."""
        return await _take(self._desk, OWNER, request_iterator, lambda run: self._desk.runs.of(run))

    async def GetParts(self, request: pb.PartList, context: Context) -> AsyncIterator[pb.PartChunk]:  # noqa: N802
        """The given parts in turn."""
        async for chunk in _give(self._desk, request, lambda run: self._desk.runs.of(run)):
            yield chunk


class NodeApps(rpc.AppWorkServicer):
    """The workers' side."""

    def __init__(self, desk: AppDesk, insecure: bool) -> None:
        self._desk = desk
        self._insecure = insecure

    async def Attend(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.FromNode], context: Context
    ) -> AsyncIterator[pb.ToNode]:
        """A worker that runs apps: offers and tasks to it, replies from it."""
        desk = self._desk
        worker = worker_of(context, self._insecure)
        first = await _first(request_iterator)
        if not first.HasField("hello"):
            raise BadFrame("the first message of an app host says hello")
        box = desk.node_comes(worker, first.hello)

        async def read() -> None:
            async for message in request_iterator:
                await desk.room_for(message)
                desk.node_says(worker, message)
            box.close()

        try:
            async for message in _served(read, box):
                yield message
        finally:
            desk.node_goes(worker, box)

    async def PutNodeParts(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.PartChunk], context: Context
    ) -> pb.PartList:
        """Take chunks of parts of a run that the worker takes part in."""
        worker = worker_of(context, self._insecure)

        def allowed(run: int) -> None:
            self._desk.may(worker, run)
            self._desk.takes_from(worker)

        return await _take(self._desk, worker, request_iterator, allowed)

    async def GetNodeParts(self, request: pb.PartList, context: Context) -> AsyncIterator[pb.PartChunk]:  # noqa: N802
        """The given parts in turn."""
        async for chunk in _give(self._desk, request, self._right(context)):
            yield chunk

    def _right(self, context: Context) -> Callable[[int], object]:
        return lambda run: self._desk.may(worker_of(context, self._insecure), run)


async def _first(requests: AsyncIterator[Any]) -> Any:
    try:
        return await asyncio.wait_for(anext(aiter(requests)), FIRST_WITHIN_S)
    except (StopAsyncIteration, TimeoutError):
        raise BadFrame("the stream ended before its first message") from None


async def _served(read: Callable[[], Any], box: Mailbox) -> AsyncIterator[Any]:
    """What is in the box, while ``read`` runs beside it; what ``read`` raises ends the call."""

    async def guarded() -> None:
        try:
            await read()
        except AtollError as error:
            box.close(error)
        except grpc.aio.AioRpcError:
            box.close()
        except Exception:  # a stream that nobody reads any more must end, not wait for ever
            log.exception("apps.stream_broke")
            box.close()

    reader = asyncio.create_task(guarded())
    try:
        while (message := await box.get()) is not None:
            yield message
        if box.error is not None:
            raise box.error
    finally:
        reader.cancel()
        with suppress(asyncio.CancelledError):
            await reader


async def _take(
    desk: AppDesk,
    holder: str,
    chunks: AsyncIterator[pb.PartChunk],
    allowed: Callable[[int], object],
) -> pb.PartList:
    whole: dict[str, int] = {}
    async for chunk in chunks:
        allowed(chunk.run)
        bounds.blob_hash("part", chunk.hash)
        where = chunk.run, holder, chunk.hash, chunk.size, chunk.offset
        if await asyncio.to_thread(desk.parts.write, *where, chunk.data):
            whole[chunk.hash] = chunk.size
    return pb.PartList(parts=[pb.Part(hash=name, size=size) for name, size in whole.items()])


async def _give(
    desk: AppDesk, request: pb.PartList, allowed: Callable[[int], object]
) -> AsyncIterator[pb.PartChunk]:
    allowed(request.run)
    for part in bounds.count("parts", request.parts, MAX_BLOBS_A_REQUEST):
        size = desk.parts.size(request.run, bounds.blob_hash("part", part.hash))
        offset = part.offset
        if offset > size:
            raise UsageError(f"part {part.hash[:12]} has {size} bytes; the request begins at {offset}")
        pieces = desk.parts.chunks(part.hash, offset)
        while piece := await asyncio.to_thread(next, pieces, b""):
            yield pb.PartChunk(hash=part.hash, size=size, offset=offset, data=piece)
            offset += len(piece)
        if offset == part.offset:
            yield pb.PartChunk(hash=part.hash, size=size, offset=offset)
