"""Framed messages between a process and its child over a socket pair: a length, then the message."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.errors import BadFrame
from protos.message_sizes import check

if TYPE_CHECKING:
    from google.protobuf.message import Message

MAX_FRAME_BYTES = 65 << 20  # a control message, and what it travels in
READ_BYTES = 64 << 10
_LENGTH = struct.Struct("!I")
M = TypeVar("M", bound="Message")


class Gone(Exception):  # not an AtollError: each side knows what the other's end means
    """The other end closed the pipe, or died."""


def framed(message: Message) -> bytes:
    """A message as it is written. Raises BadFrame when it is too large."""
    return _framed(message.SerializeToString())


def _framed(data: bytes) -> bytes:
    if len(data) > MAX_FRAME_BYTES:
        raise BadFrame(f"a message of {len(data)} bytes; at most {MAX_FRAME_BYTES} are possible")
    return _LENGTH.pack(len(data)) + data


class Pipe:
    """An end of a pipe; sending and receiving may be in different threads."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._read = bytearray()  # and not parsed

    def send(self, message: Message) -> None:
        """Write one message. Raises Gone."""
        self.write(framed(message))

    def say(self, value: Mapping[str, Any], timeout_s: float | None = None) -> None:
        """Write one JSON object. Raises Gone, and TimeoutError when nothing is read for ``timeout_s``."""
        frame = _framed(json.dumps(value, default=str).encode())
        self._socket.settimeout(timeout_s)
        try:
            self.write(frame)
        finally:
            self._socket.settimeout(None)

    def hear(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Read one JSON object. Raises as ``receive``."""
        data = self._next(timeout_s)
        try:
            found = json.loads(data)
        except ValueError as error:
            raise BadFrame(f"a message that is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise BadFrame(f"a message that is a {type(found).__name__}")
        return found

    def finish(self) -> None:
        """Write nothing any more, which the other end notices; it may still write."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def write(self, frames: bytes | memoryview) -> None:
        """Write whole frames, waiting for room. Raises Gone."""
        try:
            with self._sending:
                self._socket.sendall(frames)
        except TimeoutError:
            raise
        except OSError:
            raise Gone from None

    def offer(self, frames: bytes) -> int:
        """Write as much as there is room for now; returns how many bytes. The caller keeps the order, and
        writes the rest. Raises Gone."""
        try:
            return self._socket.send(frames, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            raise Gone from None

    def ready(self, timeout_s: float) -> bool:
        """Whether a message begins to arrive within ``timeout_s``. Raises Gone."""
        try:
            self._fill(1, timeout_s)
        except TimeoutError:
            return False
        return True

    def receive(self, into: M, timeout_s: float | None = None) -> M:
        """Read one message. Raises Gone, BadFrame, and TimeoutError after ``timeout_s`` without a byte."""
        data = self._next(timeout_s)
        check(into.DESCRIPTOR, data)
        try:
            into.ParseFromString(data)
        except Exception as error:  # noqa: BLE001 - protobuf's own error class is not public
            raise BadFrame(f"a damaged message: {error}") from None
        return into

    def _next(self, timeout_s: float | None) -> bytes:
        """The bytes of the next message."""
        if len(self._read) < _LENGTH.size:
            self._fill(_LENGTH.size, timeout_s)
        (length,) = _LENGTH.unpack_from(self._read)
        if length > MAX_FRAME_BYTES:
            raise BadFrame(f"a message of {length} bytes; at most {MAX_FRAME_BYTES} are accepted")
        end = _LENGTH.size + length
        if len(self._read) < end:
            self._fill(end, timeout_s)
        with memoryview(self._read) as read:
            data = bytes(read[_LENGTH.size : end])
        del self._read[:end]
        return data

    def close(self) -> None:
        """Close this end; the other one notices."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _fill(self, wanted: int, timeout_s: float | None = None) -> None:
        """Read until ``wanted`` bytes are here, and what else has come."""
        if timeout_s is not None:
            self._socket.settimeout(timeout_s)
        try:
            while len(self._read) < wanted:
                piece = self._socket.recv(max(READ_BYTES, min(wanted - len(self._read), 1 << 20)))
                if not piece:
                    raise Gone
                self._read += piece
        except TimeoutError:
            raise
        except OSError:
            raise Gone from None
        finally:
            if timeout_s is not None:
                self._socket.settimeout(None)  # sends wait as long as it takes


def pipe_from(descriptor: int) -> Pipe:
    """The child's end, by the number it was given."""
    return Pipe(socket.socket(fileno=descriptor))
