"""One session stream to the coordinator: what we say goes out in order, what comes in is posted.

A stream lives in one thread; when it ends, for whatever reason, that is one event. What is said
while no stream is open is dropped: the session machine keeps what must arrive.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import grpc

from atoll.errors import AtollError
from protos import atoll_control_pb2_grpc as rpc
from worker.calls import as_atoll_error

if TYPE_CHECKING:
    from collections.abc import Sequence

END_TIMEOUT_S = 0.4


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
        method: Callable[[grpc.Channel], Any] = lambda channel: rpc.WorkStub(channel).Session,
    ) -> None:
        """``ended(error)`` is called once, in the stream's thread; None: the coordinator closed it.
        ``method``: the call, the session's unless another is named."""
        self._channel, self._address = channel, address
        self._queue: queue.Queue[Any] = queue.Queue(max_queued)
        self._queue.put_nowait(introduction)
        self._received, self._ended = received, ended
        self._closing = False
        self._call: Any = method(channel)(self._outgoing(), metadata=metadata)
        self._thread = threading.Thread(target=self._read, name="atoll-session", daemon=True)
        self._thread.start()

    def say(self, message: Any) -> bool:
        """Queue a message; False when the queue is full, which ends the stream."""
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self.close(wait=False)
            return False
        return True

    def close(self, wait: bool = True) -> None:
        """End the stream; with ``wait`` after what is queued has left."""
        self._closing = True
        if wait:
            try:
                self._queue.put(None, timeout=END_TIMEOUT_S)
            except queue.Full:
                wait = False
        if wait:
            self._thread.join(END_TIMEOUT_S)
        self._call.cancel()

    def _outgoing(self) -> Iterator[Any]:
        while (message := self._queue.get()) is not None:
            yield message

    def _read(self) -> None:
        error: AtollError | None = None
        try:
            for message in self._call:
                self._received(message)
        except grpc.RpcError as failed:
            error = as_atoll_error(failed, self._address)
        finally:
            # The sending side waits in the queue until told.
            self._stop_sending()
            self._channel.close()
            self._ended(None if self._closing else error)

    def _stop_sending(self) -> None:
        while True:
            try:
                self._queue.put_nowait(None)
                return
            except queue.Full:
                try:
                    self._queue.get_nowait()
                except queue.Empty:
                    continue
