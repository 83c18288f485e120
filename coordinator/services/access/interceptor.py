"""Who may call what, found out before anything that the caller sends is taken in.

A call names its right in its metadata (the owner's token, a join token) or in its connection's
certificate. Until that was looked at, gRPC is asked for no message of the call: what a stranger sends
waits at his own end, but for the 64 KiB of a stream's window, and none of it is parsed.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from atoll.errors import AccessDenied, AtollError, BadFrame, ConnectionFailed
from coordinator.services.access.callers import network_of, worker_of
from coordinator.services.access.owners import needed_role
from hostos.budget import REFUSALS, REFUSALS_PER_S, Budget
from protos.connections import Known
from protos.credentials import presented_in
from protos.grpc_errors import refuse
from protos.message_sizes import COUNTED_FROM, reader
from protos.telemetry import Event

if TYPE_CHECKING:
    from coordinator.services.access.owners import Owners
    from coordinator.services.access.register import Register

    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
    Continue = Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor

OWNERS = ("/atoll.v1.Owner/", "/atoll.v1.Blobs/", "/atoll.v1.Apps/")
HELLO = "/atoll.v1.Entry/Hello"
SESSION = "/atoll.v1.Work/Session"
MAX_ENTRY_BYTES = 64 * 1024
FIRST_WITHIN_S = 30.0  # for the one message of a newcomer's call, once its token opens

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EntryThrottle:
    """How entry is slowed against guessing, and what one address may hold without the owner's token."""

    wrong_token_delay_s: float = 0.5
    wrong_tokens_at_once: int = 16  # that are answered late; further ones are refused at once
    calls_per_address: int = 64


class Calls:
    """Calls under way by caller, at most ``most`` of each."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._open: Counter[str] = Counter()

    @contextmanager
    def one_of(self, caller: str) -> Iterator[None]:
        """Count a call while it lasts. Raises ConnectionFailed when the caller has too many: later it may."""
        if self._open[caller] >= self._most:
            raise ConnectionFailed(f"{self._most} calls of this {self._what} are open; try again in a moment")
        self._open[caller] += 1
        try:
            yield
        finally:
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]


UNBOUNDED = Calls(sys.maxsize, "owner")


async def _nothing(context: Context) -> None:
    """The check of a caller that was checked before."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a call must keep to: so many of its ``caller``, what ``check`` refuses, so much in a message."""

    calls: Calls
    caller: Callable[[Context], str]
    check: Callable[[Context], Awaitable[None]]
    known: Known  # connections of who kept to it
    max_bytes: int | None = None


class EntryAccess(_Interceptor):
    """Access to the entry port: an owner's calls need the owner's token, enrolment a valid join token, a
    greeting nothing. Without TLS there are no tokens (``owners`` None) and everybody has access."""

    def __init__(
        self,
        owners: Owners | None,
        register: Register,
        rules: EntryThrottle,
        clock: Callable[[], float],
        known: Known | None = None,
    ) -> None:
        """``known``: connections of callers with a valid token."""
        self._owners = owners
        self._register = register
        self._rules = rules
        self._clock = clock
        self._calls = Calls(rules.calls_per_address, "address")
        self._known = known or Known()
        self._delayed = 0
        self._noted = Budget(REFUSALS, REFUSALS_PER_S)

    async def intercept_service(self, continuation: Continue, details: grpc.HandlerCallDetails) -> Any:
        """Pass the call on, its messages and open calls limited, or answer it with UNAUTHENTICATED."""
        handler = await continuation(details)
        if handler is None:
            return None
        method = str(details.method)
        if method == HELLO:
            return _unread(handler)
        refusal = self._refusal(method, presented_in(details.invocation_metadata))
        if refusal is None and method.startswith(OWNERS):
            return _guarded(handler, _Rule(UNBOUNDED, network_of, _nothing, self._known))
        return self._newcomers(handler, refusal)

    def _refusal(self, method: str, secret: str) -> AccessDenied | None:
        if self._owners is None:
            return None
        if method.startswith(OWNERS):
            owner, needed = self._owners.presenting(secret), needed_role(method)
            if owner is None:
                return AccessDenied(
                    "this is not an owner's token of this coordinator; give --token, or run the command on "
                    "the machine of `atoll serve`"
                )
            if not owner.may(needed):
                return AccessDenied(
                    f"the token of {owner.name} opens what {owner.role} may, this needs {needed}; ask for "
                    f"another by `atoll owner create NAME --role {needed}`"
                )
            return None
        try:
            self._register.admit(secret, self._clock())
        except AccessDenied as error:
            return error
        return None

    def _newcomers(self, handler: Handler, refusal: AccessDenied | None) -> Handler:
        """``handler`` for callers of whom each address may have so many, or their refusal."""

        async def check(context: Context) -> None:
            if refusal is not None:
                await self._slow_down(context, refusal)
                raise refusal

        return _guarded(handler, _Rule(self._calls, network_of, check, self._known, MAX_ENTRY_BYTES))

    async def _slow_down(self, context: Context, refusal: AccessDenied) -> None:
        if self._noted.take(self._clock()):
            more = {"left_out_before": left_out} if (left_out := self._noted.refused()) else {}
            log.warning(Event.TOKEN_REFUSED.value, peer=context.peer(), reason=str(refusal), **more)
        if self._delayed >= self._rules.wrong_tokens_at_once:
            return
        self._delayed += 1
        try:
            await asyncio.sleep(self._rules.wrong_token_delay_s)
        finally:
            self._delayed -= 1


class WorkerAccess(_Interceptor):
    """Work port: blobs, data and apps are for enrolled workers that nobody barred, and for so many calls
    of each at once.

    Sessions check the same themselves, with words for the worker.
    """

    def __init__(self, register: Register, insecure: bool, calls: Calls, known: Known | None = None) -> None:
        """``known``: connections of workers that may call."""
        self._register, self._known = register, known or Known()
        self._insecure = insecure
        self._calls = calls

    async def intercept_service(self, continuation: Continue, details: grpc.HandlerCallDetails) -> Any:
        """Wrap the handler, since only the call's context knows the certificate."""
        handler = await continuation(details)
        if handler is None:
            return None
        if str(details.method) == SESSION:  # it parses what is worth it, and answers for the rest
            session: Any = handler.stream_stream
            return grpc.stream_stream_rpc_method_handler(session, None, handler.response_serializer)
        return _guarded(handler, _Rule(self._calls, self._name, self._check, self._known))

    async def _check(self, context: Context) -> None:
        barred = self._register.refusal(self._name(context))
        if barred is not None:
            raise AccessDenied(barred)

    def _name(self, context: Context) -> str:
        return worker_of(context, self._insecure)


# ---------------------------------------------------------------- handlers that read nothing at first


def _unread(handler: Handler) -> Handler:
    """A handler of one reply that asks for no message: the reply does not depend on it."""

    async def reply(requests: AsyncIterator[bytes], context: Context) -> Any:
        inner: Any = handler.unary_unary
        return await inner(None, context)

    return grpc.stream_unary_rpc_method_handler(reply, None, handler.response_serializer)


def _guarded(handler: Handler, rule: _Rule) -> Handler:
    """``handler`` for calls that keep to ``rule``. Whatever its shape, gRPC sees one that takes a stream of
    bytes: so nothing is received, let alone parsed, before the handler itself asks for it."""

    async def request(requests: AsyncIterator[bytes]) -> Any:
        parse = handler.request_deserializer
        parsed = _parsed(requests, None if parse is None else reader(parse), rule.max_bytes)
        if handler.request_streaming:
            return parsed
        return await _only(parsed, None if rule.max_bytes is None else FIRST_WITHIN_S)

    async def one(requests: AsyncIterator[bytes], context: Context) -> Any:
        inner: Any = handler.stream_unary if handler.request_streaming else handler.unary_unary
        try:
            with rule.calls.one_of(rule.caller(context)):
                await rule.check(context)
                rule.known.add(context.peer() or "")
                return await inner(await request(requests), context)
        except AtollError as error:
            await refuse(context, error)

    async def many(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        inner: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream
        try:
            with rule.calls.one_of(rule.caller(context)):
                await rule.check(context)
                rule.known.add(context.peer() or "")
                async for reply in inner(await request(requests), context):
                    yield reply
        except AtollError as error:
            await refuse(context, error)

    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(many, None, handler.response_serializer)
    return grpc.stream_unary_rpc_method_handler(one, None, handler.response_serializer)


async def _parsed(
    requests: AsyncIterator[bytes], parse: Callable[[bytes], Any] | None, max_bytes: int | None
) -> AsyncIterator[Any]:
    async for data in requests:
        if max_bytes is not None and len(data) > max_bytes:
            raise BadFrame(f"a message of {len(data)} bytes; at most {max_bytes} are taken here")
        if parse is None:
            yield data
        elif len(data) <= COUNTED_FROM:
            yield parse(data)
        else:
            yield await asyncio.to_thread(parse, data)


async def _only(messages: AsyncIterator[Any], within_s: float | None) -> Any:
    """The one message of a call that has one. BadFrame when none comes."""
    try:
        return await asyncio.wait_for(anext(messages), within_s)
    except (StopAsyncIteration, TimeoutError):
        raise BadFrame("the call ended before its message") from None
