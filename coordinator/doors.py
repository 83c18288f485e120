"""Who may call what: the owner's token on the entry port, the worker's certificate on the work port;
and the two calls with which `atoll-worker doctor` looks at the way to us."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from atoll.errors import AccessDenied, AtollError, BadFrame, UsageError
from coordinator.entry_service import EntryService
from coordinator.refusing import refuse
from coordinator.sessions import host_of, worker_of
from coordinator.storage_services import DataService
from protos import atoll_control_pb2 as pb
from protos.credentials import MAX_TOKEN_CHARS, secret_hash
from protos.telemetry import Event

if TYPE_CHECKING:
    from coordinator.shell import Shell
    from coordinator.tokens import Register

    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor

OWNERS = ("/atoll.v1.Owner/", "/atoll.v1.Blobs/", "/atoll.v1.Apps/")
ECHO_MAX_BYTES = 64 * 2**20
ECHO_WITHIN_S = 30.0
ECHO_CHUNK_BYTES = 2**20
ECHOES_AT_ONCE = 4
REACH_WITHIN_S = 3.0

log = structlog.get_logger()


class OwnerGate(_Interceptor):
    """Calls of the owner need the owner's token; a wrong one costs a moment."""

    def __init__(self, owner_hash: str, delay_s: float) -> None:
        self._owner_hash = owner_hash
        self._delay_s = delay_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Pass the call on, or answer it with UNAUTHENTICATED."""
        handler = await continuation(details)
        if handler is None or not str(details.method).startswith(OWNERS):
            return handler
        given = str(dict(details.invocation_metadata or ()).get("authorization", ""))
        secret = given.removeprefix("Bearer ")[:MAX_TOKEN_CHARS]
        if given.startswith("Bearer ") and hmac.compare_digest(secret_hash(secret), self._owner_hash):
            return handler
        return _refusing(
            handler,
            AccessDenied(
                "this is not the owner's token of this coordinator; give --token, or run the command on the "
                "machine of `atoll serve`"
            ),
            self._delay_s,
        )


class WorkerGate(_Interceptor):
    """Blobs and data on the work port are for enrolled workers that nobody barred.

    Sessions check the same themselves, with words for the worker.
    """

    def __init__(self, register: Register, insecure: bool) -> None:
        self._register = register
        self._insecure = insecure

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the handler, since only the call's context knows the certificate."""
        handler = await continuation(details)
        if handler is None or str(details.method).endswith("/Session"):
            return handler
        return _checked(handler, self._check)

    def _check(self, context: Context) -> None:
        barred = self._register.refusal(worker_of(context, self._insecure))
        if barred is not None:
            raise AccessDenied(barred)


def _refusing(handler: Handler, error: AtollError, delay_s: float) -> Handler:
    """A handler of the same shape that refuses every call."""

    async def fail(context: Context) -> None:
        log.warning(Event.TOKEN_REFUSED.value, peer=context.peer(), reason="wrong owner token")
        await asyncio.sleep(delay_s)
        raise error

    return _guarded(handler, fail)


def _checked(handler: Handler, check: Callable[[Context], None]) -> Handler:
    async def pass_or_fail(context: Context) -> None:
        check(context)

    return _guarded(handler, pass_or_fail)


def _guarded(handler: Handler, before: Callable[[Context], Awaitable[None]]) -> Handler:
    """``handler`` after ``before``, which raises to refuse."""

    async def one(request: Any, context: Context) -> Any:
        await _run(before, context)
        inner: Any = handler.stream_unary if handler.request_streaming else handler.unary_unary
        return await inner(request, context)

    async def many(request: Any, context: Context) -> AsyncIterator[Any]:
        await _run(before, context)
        inner: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream
        async for reply in inner(request, context):
            yield reply

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[(bool(handler.request_streaming), bool(handler.response_streaming))]
    return make(
        many if handler.response_streaming else one,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


async def _run(before: Callable[[Context], Awaitable[None]], context: Context) -> None:
    try:
        await before(context)
    except AtollError as error:
        await refuse(context, error)


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
            await refuse(context, AccessDenied(f"{worker} holds no stage of {request.job[:80]!r}"))
        async for batch in super().Batches(request, context):
            yield batch


class Door(EntryService):
    """Entry with the doctor's two calls; both want a token that would open."""

    _echoes = 0

    async def Echo(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.EchoChunk], context: Context
    ) -> AsyncIterator[pb.EchoChunk]:
        """Send what the first chunk wants, count what comes; bounded in bytes, time and number."""
        try:
            first = await asyncio.wait_for(anext(aiter(request_iterator)), ECHO_WITHIN_S)
            self._may_look(first.token)
            if self._echoes >= ECHOES_AT_ONCE:
                raise UsageError(f"{ECHOES_AT_ONCE} measurements run already; try again in a moment")
        except (StopAsyncIteration, TimeoutError):
            await refuse(context, BadFrame("the measurement ended before its first chunk"))
        except AtollError as error:
            await refuse(context, error)
        self._echoes += 1
        try:
            counting = asyncio.create_task(_count(request_iterator, len(first.data)))
            left = min(first.wanted_bytes, ECHO_MAX_BYTES)
            while left > 0:
                piece = bytes(min(left, ECHO_CHUNK_BYTES))
                yield pb.EchoChunk(data=piece)
                left -= len(piece)
            received = await asyncio.wait_for(counting, ECHO_WITHIN_S)
            yield pb.EchoChunk(received_bytes=received)
        except TimeoutError:
            await refuse(context, BadFrame(f"the measurement took longer than {ECHO_WITHIN_S:.0f} s"))
        finally:
            self._echoes -= 1

    async def Reach(self, request: pb.ReachRequest, context: Context) -> pb.ReachReply:  # noqa: N802
        """Whether we can open a TCP connection back to the caller's own address, and to no other."""
        try:
            self._may_look(request.token)
            if not 1024 <= request.port <= 65535:
                raise UsageError(f"port {request.port}; 1024 to 65535 are tried")
        except AtollError as error:
            await refuse(context, error)
        host = host_of(context)
        try:
            opened = asyncio.open_connection(host, request.port)
            _, writer = await asyncio.wait_for(opened, REACH_WITHIN_S)
        except (OSError, TimeoutError) as error:
            words = "no answer in time" if isinstance(error, TimeoutError) else str(error.strerror or error)
            return pb.ReachReply(host=host, reachable=False, error=words)
        writer.close()
        return pb.ReachReply(host=host, reachable=True)

    def _may_look(self, token: str) -> None:
        if self._authority is not None:
            self._register.admit(token, self._clock())


async def _count(requests: AsyncIterator[pb.EchoChunk], received: int) -> int:
    async for chunk in requests:
        received += len(chunk.data)
        if received > ECHO_MAX_BYTES:
            break
    return received
