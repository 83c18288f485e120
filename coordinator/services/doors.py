"""Entry and data as the ports serve them: the two calls with which `atoll-worker doctor` looks at the way to
us, and micro-batches for those alone who hold a stage. ``access.interceptor`` asks who calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from atoll.errors import AccessDenied, BadFrame, UsageError
from coordinator.services.access.callers import host_of, worker_of
from coordinator.services.blobs.service import DataService
from coordinator.services.workers.entry import EntryService
from protos import atoll_control_pb2 as pb

if TYPE_CHECKING:
    import grpc

    from coordinator.shell import Shell

    Context = grpc.aio.ServicerContext[Any, Any]

ECHO_MAX_BYTES = 64 * 2**20
ECHO_WITHIN_S = 30.0
ECHO_CHUNK_BYTES = 2**20
ECHOES_AT_ONCE = 4
REACH_WITHIN_S = 3.0


class StageData(DataService):
    """Micro-batches only for workers that hold a stage of the job."""

    def __init__(self, shell: Shell, provider: Any, insecure: bool) -> None:
        super().__init__(provider, shell.scheduler.spec_of)
        self._shell = shell
        self._insecure = insecure

    async def Batches(self, request: pb.BatchRequest, context: Context) -> AsyncIterator[pb.Batch]:  # noqa: N802
        """The named inputs of some steps, in (step, micro, input) order."""
        worker = worker_of(context, self._insecure)
        if self._shell.scheduler.spec_of(request.job, worker) is None:
            raise AccessDenied(f"{worker} holds no stage of {request.job[:80]!r}")
        async for batch in super().Batches(request, context):
            yield batch


class Door(EntryService):
    """Entry with the doctor's two calls, for callers whose join token would open."""

    _echoes = 0

    async def Echo(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.EchoChunk], context: Context
    ) -> AsyncIterator[pb.EchoChunk]:
        """Send what the first chunk wants, count what comes; bounded in bytes, time and number."""
        if self._echoes >= ECHOES_AT_ONCE:
            raise UsageError(f"{ECHOES_AT_ONCE} measurements run already; try again in a moment")
        self._echoes += 1
        counting: asyncio.Task[int] | None = None
        try:
            first = await asyncio.wait_for(anext(aiter(request_iterator)), ECHO_WITHIN_S)
            counting = asyncio.create_task(_count(request_iterator, len(first.data)))
            left = min(first.wanted_bytes, ECHO_MAX_BYTES)
            while left > 0:
                piece = bytes(min(left, ECHO_CHUNK_BYTES))
                yield pb.EchoChunk(data=piece)
                left -= len(piece)
            received = await asyncio.wait_for(counting, ECHO_WITHIN_S)
            yield pb.EchoChunk(received_bytes=received)
        except StopAsyncIteration:
            raise BadFrame("the measurement ended before its first chunk") from None
        except TimeoutError:
            raise BadFrame(f"the measurement took longer than {ECHO_WITHIN_S:.0f} s") from None
        finally:
            self._echoes -= 1
            if counting is not None:
                counting.cancel()

    async def Reach(self, request: pb.ReachRequest, context: Context) -> pb.ReachReply:  # noqa: N802
        """Whether we can open a TCP connection back to the caller's own address, and to no other."""
        if not 1024 <= request.port <= 65535:
            raise UsageError(f"port {request.port}; 1024 to 65535 are tried")
        host = host_of(context)
        try:
            opened = asyncio.open_connection(host, request.port)
            _, writer = await asyncio.wait_for(opened, REACH_WITHIN_S)
        except (OSError, TimeoutError) as error:
            words = "no answer in time" if isinstance(error, TimeoutError) else str(error.strerror or error)
            return pb.ReachReply(host=host, reachable=False, error=words)
        writer.close()
        return pb.ReachReply(host=host, reachable=True)


async def _count(requests: AsyncIterator[pb.EchoChunk], received: int) -> int:
    async for chunk in requests:
        received += len(chunk.data)
        if received > ECHO_MAX_BYTES:
            break
    return received
