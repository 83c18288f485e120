"""Wires: gRPC streams on which messages start, and are told, by calls.

gRPC's own iterators cost every message three threads that are woken for it: the one that pulls the next, the
one that waits until it is written, and the one that waits for what arrives. Here a message starts in the
thread that has it, and what arrives is handled in the thread that gRPC tells: a third of the switches between
threads. That takes the operations behind the iterators, which gRPC does not promise to keep, so all that
knows of them is in this file, and ``pyproject.toml`` bounds gRPC's version.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import grpc
import structlog
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from protos.text_limits import clean
from worker.transport.channels import METHOD

log = structlog.get_logger()

MAX_REASON_CHARS = 400
_NO_FLAGS = 0


class Wire(Protocol):
    """One stream of messages; whoever uses it sends one at a time."""

    def send(self, message: bytes, sent: Callable[[], None]) -> bool:
        """Start sending; ``sent()`` says, in a thread of gRPC's, that the next may be. False: it is over."""

    def end(self) -> None:
        """Nothing more will be sent. What has been still arrives."""


class NewWire(Wire, Protocol):
    """One that is still to be opened."""

    def open(self) -> None:
        """From now on messages may be sent."""


class _Operations(ABC):
    """What both ends have in common: sending, receiving and telling so."""

    def __init__(self, received: Callable[[bytes], None], ended: Callable[[str], None]) -> None:
        """``received(message)`` is called in a thread of gRPC's, one message at a time; ``ended(why)`` there
        or in the thread that opens, perhaps more than once. Both must be short, and may send."""
        self._received, self._tell_end = received, ended
        self._ending = threading.Event()

    def send(self, message: bytes, sent: Callable[[], None]) -> bool:
        def done(event: Any) -> None:
            if event.success:
                sent()

        return self._start(cygrpc.SendMessageOperation(message, _NO_FLAGS), done)

    def end(self) -> None:
        self._ending.set()

    @abstractmethod
    def _start(self, operation: Any, done: Callable[[Any], None]) -> bool:
        """Have gRPC do it; ``done(event)`` follows in its thread. False: the stream is over."""

    @abstractmethod
    def _over(self) -> None:
        """Nothing more will arrive."""

    def _expect_message(self) -> None:
        self._start(cygrpc.ReceiveMessageOperation(_NO_FLAGS), self._arrived)

    def _arrived(self, event: Any) -> None:
        message = event.batch_operations[0].message() if event.success else None
        if message is None:
            self._over()
            return
        self._received(message)
        self._expect_message()

    def _guarded(self, done: Callable[[Any], None], event: Any) -> None:
        """gRPC's thread serves other streams, too."""
        try:
            done(event)
        except Exception as error:
            log.exception("stream.failed")
            try:
                self._tell_end(f"{type(error).__name__} here")
            except Exception:
                log.exception("stream.failed")


class DialledWire(_Operations):
    """The end that called."""

    def __init__(
        self,
        channel: grpc.Channel,
        received: Callable[[bytes], None],
        ended: Callable[[str], None],
        method: str = METHOD,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(received, ended)
        self._channel, self._method, self._metadata = channel, method, metadata
        self.call: Any = None

    def open(self) -> None:
        call: Any = self._channel.stream_stream(self._method, None, None)
        try:
            self.call = call(self._until_the_end(), metadata=self._metadata)
        except ValueError:  # the channel is closed
            self._tell_end("closed")
            return
        self.call.add_done_callback(self._done)
        self._expect_message()

    def close(self) -> None:
        """Break it off. Waits for gRPC's thread, so not to be called in it."""
        self.end()
        self._channel.close()

    def _until_the_end(self) -> Iterator[bytes]:
        """The requests that gRPC knows of: none, and their end."""
        self._ending.wait()
        yield from ()

    def _start(self, operation: Any, done: Callable[[Any], None]) -> bool:
        if self.call is None:
            return False
        state, kind = self.call._state, operation.type()

        def handled(event: Any) -> bool:
            with state.condition:
                state.due.discard(kind)
            self._guarded(done, event)
            with state.condition:
                return not state.due

        # gRPC's thread for this channel lives as long as something is due; closing waits for what it then
        # would leave behind.
        with state.condition:
            if state.code is not None:
                return False
            state.due.add(kind)
            started = False
            try:
                started = bool(self.call._call.operate((operation,), handled))
            except ValueError:
                log.debug("stream.refuses", operation=kind, exc_info=True)  # the channel is closed
            finally:
                if not started:
                    state.due.discard(kind)
            return started

    def _over(self) -> None:
        """Its status says why, and comes by itself."""

    def _done(self, call: Any) -> None:
        ok = call.code() is grpc.StatusCode.OK
        self._tell_end(
            "connection closed by the peer"
            if ok
            else clean(call.details() or "connection broken", MAX_REASON_CHARS)
        )


class AcceptedWire(_Operations):
    """The end that was called."""

    def __init__(self, context: Any, received: Callable[[bytes], None], ended: Callable[[str], None]) -> None:
        super().__init__(received, ended)
        self._context = context

    def open(self) -> None:
        # gRPC calls this at the end, whatever becomes of the operations started here.
        if self._context.add_callback(lambda: self._tell_end("connection broken")):
            with suppress(grpc.RpcError):
                self._context.send_initial_metadata(())
        else:
            self._tell_end("connection broken")

    def serve(self) -> None:
        """Receive until ``end``; the handler of the call waits here."""
        self._expect_message()
        self._ending.wait()

    def close(self) -> None:
        """Break it off."""
        self.end()
        self._context.cancel()

    def _start(self, operation: Any, done: Callable[[Any], None]) -> bool:
        def handled(event: Any) -> tuple[None, tuple[()]]:
            self._guarded(done, event)
            return None, ()  # no call has ended, nothing is to be called

        try:
            code = self._context._rpc_event.call.start_server_batch((operation,), handled)
        except ValueError:  # it has ended
            return False
        return bool(code == 0)

    def _over(self) -> None:
        self._tell_end("connection closed by the peer" if self._context.is_active() else "connection broken")
