"""Pipes of messages between two workers, and the only kind there is so far: gRPC streams.

All that the rest of the transport knows of bytes is ``Pipe``; a relay or a tunnel brings another one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from atoll.errors import AccessDenied, AtollError, BadFrame, ConnectionFailed, ProtocolMismatch
from hostos.descriptors import limit_now
from hostos.net.addresses import join_address
from hostos.net.proxies import proxy_option
from protos.connections import ConnectionBound, Known, PortBound
from protos.credentials import channel_credentials, name_options, peer_name, server_credentials
from protos.text_limits import clean
from worker.transport import TUNED
from worker.transport.frames import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from protos.credentials import CurrentIdentity, Identity

aio: Any = grpc.aio  # grpc-stubs lacks half of it
METHOD = "/atoll.v1.Peer/Frames"
MAX_REASON_CHARS = 400
OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.http2.lookahead_bytes", 8 << 20),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.enable_retries", 0),
    ("grpc.so_reuseport", 0),
    # Each connection to a peer is a TCP flow of its own.
    ("grpc.use_local_subchannel_pool", 1),
]
_REFUSALS = {
    ProtocolMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    AccessDenied: grpc.StatusCode.PERMISSION_DENIED,
    BadFrame: grpc.StatusCode.INVALID_ARGUMENT,
    TimeoutError: grpc.StatusCode.CANCELLED,
}
_FAILURES = (grpc.RpcError, aio.BaseError, asyncio.InvalidStateError)


class Pipe(Protocol):
    """Messages both ways, in order. One coroutine at a time sends, one receives; on the transport's loop."""

    async def send(self, message: bytes) -> None:
        """Return when the next message may be sent. Raises ConnectionFailed."""

    async def receive(self) -> bytes | None:
        """Return the next message, None at the other side's end. Raises ConnectionFailed, or the refusal."""

    async def finish(self) -> None:
        """Nothing more will be sent; what was, arrives."""

    async def close(self) -> None:
        """Break it off."""


class _Stream:
    """What both ends of a gRPC stream have in common."""

    _stream: Any

    async def send(self, message: bytes) -> None:
        try:
            await self._stream.write(message)
        except _FAILURES:
            raise await self._why() from None

    async def receive(self) -> bytes | None:
        try:
            message = await self._stream.read()
        except _FAILURES:
            raise await self._why() from None
        return None if message is aio.EOF else message

    async def _why(self) -> AtollError:
        return ConnectionFailed("connection broken")


class DialledPipe(_Stream):
    """The end that called."""

    def __init__(self, identity: Identity | None, peer: str, target: str, *, use_proxy: bool) -> None:
        """A connection of its own to gRPC's address ``target`` that accepts nobody but ``peer`` there."""
        options = [*OPTIONS, proxy_option(use_proxy)]
        self._peer = peer
        if identity is None:
            self._channel = aio.insecure_channel(target, options=options)
        else:
            credentials = channel_credentials(identity.ca_pem, identity)
            self._channel = aio.secure_channel(target, credentials, options=[*options, *name_options(peer)])
        self._stream = self._channel.stream_stream(METHOD)()

    async def finish(self) -> None:
        try:
            await self._stream.done_writing()
        except _FAILURES:
            raise await self._why() from None

    async def close(self) -> None:
        self._stream.cancel()
        await self._channel.close()

    async def _why(self) -> AtollError:
        code, details = await self._stream.code(), await self._stream.details()
        # INTERNAL is what gRPC's asyncio API has instead of the reason where the end came during a write.
        known = details if code is not grpc.StatusCode.INTERNAL else ""
        reason = clean(known or "connection broken", MAX_REASON_CHARS)
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            return ProtocolMismatch(reason)
        tls = "ssl handshake" in reason.lower() or "verification check" in reason.lower()
        if code is grpc.StatusCode.UNAUTHENTICATED or tls:
            return AccessDenied(f"{self._peer} is not who answers, or refuses us: {reason}")
        return ConnectionFailed(reason)


class AcceptedPipe(_Stream):
    """The end that was called; its handler's task is its life."""

    def __init__(self, context: Any, known: Known) -> None:
        self._stream, self._task, self._known = context, asyncio.current_task(), known
        self.certified = peer_name(context.auth_context())  # the name in its certificate, None without TLS
        self.tunnelled = str(context.peer()).startswith("unix:")

    def admit(self) -> None:
        """Note that the caller is a peer: its connection gives way to no other."""
        self._known.add(str(self._stream.peer()))

    async def finish(self) -> None:
        """The handler's return does it."""

    async def close(self) -> None:
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()


Accept = Callable[[AcceptedPipe], Awaitable[None]]
"""Serve an accepted pipe until its end. An AtollError or TimeoutError refuses the caller, who sees it."""


class PipeServer:
    """The listening side."""

    def __init__(
        self, identity: CurrentIdentity | None, accept: Accept, max_connections: int, handshake_s: float
    ) -> None:
        """``max_connections``: of peers; beside them as many strangers may knock at the same time."""
        self._identity, self._accept = identity, accept
        self._known = Known()
        self._most = max(2, min(2 * max_connections, limit_now() // 4))
        options = [
            *OPTIONS,
            ("grpc.max_allowed_incoming_connections", self._most),
            ("grpc.server_handshake_timeout_ms", round(1000 * handshake_s)),
            ("grpc.max_connection_idle_ms", round(1000 * TUNED.idle_connection_s)),
        ]
        handler = grpc.method_handlers_generic_handler(
            "atoll.v1.Peer", {"Frames": grpc.stream_stream_rpc_method_handler(self._handle)}
        )
        self._server = aio.server(
            handlers=[handler], options=options, maximum_concurrent_rpcs=max_connections
        )

    async def start(self, listen: tuple[str, int] | None, local: str | None) -> int:
        """Listen on an address, and on a local one for tunnels; returns the port, 0 without an address.

        Raises ConnectionFailed when one cannot be opened.
        """
        port = self._open(join_address(*listen)) if listen is not None else 0
        if local is not None:
            self._open(local)
        await self._server.start()
        return port

    def _open(self, target: str) -> int:
        try:
            if self._identity is None:
                return int(self._server.add_insecure_port(target))
            credentials = server_credentials(self._identity, mutual=True)
            return int(self._server.add_secure_port(target, credentials))
        except RuntimeError:
            raise ConnectionFailed(f"cannot listen on {target}; choose another port") from None

    async def keep_bounds(self, port: int) -> None:
        """Shut strangers' connections to our port down where they are too many, for ever."""
        bound = PortBound(self._most, self._most // 2, TUNED.idle_connection_s, self._known)
        await ConnectionBound({port: bound}, time.monotonic).keep()

    async def close(self) -> None:
        await self._server.stop(0)

    async def _handle(self, _: object, context: Any) -> None:
        try:
            await self._accept(AcceptedPipe(context, self._known))
        except tuple(_REFUSALS) as error:
            await context.abort(_REFUSALS[type(error)], clean(str(error), MAX_REASON_CHARS))
        except AtollError:
            return  # broken: nobody is there to hear why
