"""Session stream to the coordinator: sends messages in order, delivers what arrives to a callback.

It lives on the loop of the peers' connections. Messages sent while no stream is open are dropped: the
session machine keeps what must arrive.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import grpc.aio
import structlog

from atoll.errors import AtollError, BadFrame, ConnectionFailed
from protos import atoll_apps_pb2 as apps_pb
from protos import atoll_control_pb2 as pb
from protos.grpc_errors import to_atoll_error
from protos.message_sizes import COUNTED_FROM, read
from worker.transport.loop import SHARED

if TYPE_CHECKING:
    from collections.abc import Sequence

log = structlog.get_logger()

END_TIMEOUT_S = 0.4


class Method(NamedTuple):
    """A call of two streams: its path, and what its answers are read as."""

    path: str
    answer: Any


SESSION = Method("/atoll.v1.Work/Session", pb.ToWorker)
ATTEND = Method("/atoll.v1.AppWork/Attend", apps_pb.ToNode)


class Stream:
    """A session over a channel of its own. Methods may be called from any thread, ``close`` with ``wait``
    from any but the loop's."""

    def __init__(
        self,
        open_channel: Callable[[], grpc.aio.Channel],
        metadata: Sequence[tuple[str, str]],
        address: str,
        introduction: Any,
        max_queued: int,
        received: Callable[[Any], None],
        ended: Callable[[AtollError | None], None],
        method: Method = SESSION,
    ) -> None:
        """``received(message)`` is called on the loop, one message at a time, and must be short; it may
        send. ``ended(error)`` is called once, in a thread of its own; None: the coordinator closed
        it, or we."""
        self._open_channel, self._metadata, self._address = open_channel, metadata, address
        self._max_queued, self._method = max_queued, method
        self._received, self._ended = received, ended
        self._queue: deque[Any] = deque((introduction,))
        self._wanted = asyncio.Event()
        self._closing = False
        self._abandoned: AtollError | None = None
        self._over = threading.Event()
        self._loop = SHARED.acquire()
        self._life = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    def send(self, message: Any) -> bool:
        """Queue a message; False when the queue is full, which ends the stream."""
        if self._over.is_set():
            return True
        if len(self._queue) >= self._max_queued:
            self.close(wait=False)
            return False
        self._queue.append(message)
        self._wake()
        return True

    def close(self, wait: bool = True) -> None:
        """End the stream; with ``wait`` after what is queued has left."""
        self._closing = True
        if wait:
            self._wake()
            self._over.wait(END_TIMEOUT_S)
        self._life.cancel()
        if wait:
            self._over.wait(END_TIMEOUT_S)

    def abandon(self, reason: str) -> None:
        """End the stream at once, as if it had broken."""
        self._abandoned = ConnectionFailed(reason)
        self._life.cancel()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop has ended, as this stream has
            self._loop.call_soon_threadsafe(self._wanted.set)

    async def _run(self) -> None:
        error = None
        try:
            async with self._open_channel() as channel:
                method: Any = channel.stream_stream  # its stubs lack its defaults
                error = await self._talk(method(self._method.path)(metadata=self._metadata))
        finally:
            self._over.set()
            threading.Thread(target=self._end, args=(error,), name="atoll-session-end", daemon=True).start()

    def _end(self, error: AtollError | None) -> None:
        SHARED.release()
        self._ended(None if self._closing else self._abandoned or error)

    async def _talk(self, call: Any) -> AtollError | None:
        """Send and receive until either side ends the call; returns why, None where it is no error."""
        writing = asyncio.create_task(self._write(call))
        try:
            while isinstance(message := await call.read(), bytes):
                self._received(await self._parsed(message))
        except BadFrame as error:
            log.error("message.refused", reason=str(error))
            return ConnectionFailed(f"the session with {self._address} ended: {error}")
        except grpc.aio.AioRpcError as error:
            # gRPC's asyncio API has this instead of the reason where the end came during a write: a refusal
            # then comes again at the next attempt.
            if error.code() is grpc.StatusCode.INTERNAL:
                return ConnectionFailed(f"the session with {self._address} broke during a message")
            return to_atoll_error(error, self._address)
        except Exception as error:
            log.exception("stream.failed")
            return ConnectionFailed(f"the session with {self._address} ended: {type(error).__name__} here")
        finally:
            call.cancel()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        return None

    async def _parsed(self, message: bytes) -> Any:
        if len(message) <= COUNTED_FROM:
            return read(self._method.answer, message)
        return await asyncio.to_thread(read, self._method.answer, message)  # peers need the loop meanwhile

    async def _write(self, call: Any) -> None:
        """Send what is queued, and half-close after the last. ``read`` raises what breaks the call."""
        while True:
            self._wanted.clear()
            while self._queue:
                await call.write(self._queue.popleft().SerializeToString())
            if self._closing:
                await call.done_writing()
                return
            await self._wanted.wait()
