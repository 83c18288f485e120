"""Session stream to the coordinator: sends messages in order, delivers what arrives to a callback.

A message starts in the thread that sends it, and what arrives is delivered in gRPC's (``grpc_streams``):
with gRPC's own iterators a step's commit came 0.4 ms later, of 1.2 there and back. When a stream
ends, for whatever reason, that is one event, in a thread of its own. Messages sent while no stream is
open are dropped: the session machine keeps what must arrive.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from atoll.errors import AtollError, ConnectionFailed
from protos import atoll_apps_pb2 as apps_pb
from protos import atoll_control_pb2 as pb
from protos.grpc_errors import to_atoll_error
from worker.transport.grpc_streams import DialledWire

if TYPE_CHECKING:
    from collections.abc import Sequence

END_TIMEOUT_S = 0.4


class Method(NamedTuple):
    """A call of two streams: its path, and what its answers are read as."""

    path: str
    answer: Any


SESSION = Method("/atoll.v1.Work/Session", pb.ToWorker)
ATTEND = Method("/atoll.v1.AppWork/Attend", apps_pb.ToNode)


class Stream:
    """A session over ``channel``, which it closes at its end."""

    def __init__(
        self,
        channel: grpc.Channel,
        metadata: Sequence[tuple[str, str]],
        address: str,
        introduction: Any,
        max_queued: int,
        received: Callable[[Any], None],
        ended: Callable[[AtollError | None], None],
        method: Method = SESSION,
    ) -> None:
        """``received(message)`` is called in gRPC's thread, one message at a time, and must be short; it may
        send. ``ended(error)`` is called once, in the stream's thread; None: the coordinator closed
        it, or we."""
        self._channel, self._address, self._max_queued = channel, address, max_queued
        self._received, self._ended = received, ended
        self._read = method.answer.FromString
        self._lock = threading.Lock()
        self._queue: deque[Any] = deque((introduction,))
        self._writing = self._closing = False
        self._over = threading.Event()
        self._why = ""
        self._wire = DialledWire(channel, self._arrived, self._broke, method.path, metadata)
        self._wire.open()
        self._thread = threading.Thread(target=self._end, name="atoll-session", daemon=True)
        self._thread.start()
        self._write()

    def send(self, message: Any) -> bool:
        """Queue a message; False when the queue is full, which ends the stream."""
        with self._lock:
            if self._over.is_set():
                return True
            full = len(self._queue) >= self._max_queued
            if not full:
                self._queue.append(message)
        if full:
            self.close(wait=False)
            return False
        self._write()
        return True

    def close(self, wait: bool = True) -> None:
        """End the stream; with ``wait`` after what is queued has left."""
        self._closing = True
        if wait:
            self._write()
            self._over.wait(END_TIMEOUT_S)
        self._over.set()
        if wait:
            self._thread.join(END_TIMEOUT_S)

    def _write(self) -> None:
        """Start the oldest message in the queue, unless one is being written; half-close after the last."""
        with self._lock:
            if self._writing or self._over.is_set():
                return
            message = self._queue.popleft() if self._queue else None
            self._writing = message is not None
        if message is not None:
            self._wire.send(message.SerializeToString(), self._written)
        elif self._closing:
            self._wire.end()

    def _written(self) -> None:
        with self._lock:
            self._writing = False
        self._write()

    def _arrived(self, message: bytes) -> None:
        self._received(self._read(message))

    def _broke(self, why: str) -> None:
        self._why = why
        self._over.set()

    def _end(self) -> None:
        """Thread: gRPC's own must not close the channel that it serves."""
        self._over.wait()
        self._wire.end()
        error = self._error()
        self._channel.close()
        self._ended(error)

    def _error(self) -> AtollError | None:
        if self._closing:
            return None
        call = self._wire.call
        if call is None or call.is_active():  # what came could not be handled here
            return ConnectionFailed(f"the session with {self._address} ended: {self._why}")
        return None if call.code() is grpc.StatusCode.OK else to_atoll_error(call, self._address)
