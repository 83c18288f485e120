"""Framed messages between a process and its child over a socket pair: a length, then the message."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING, TypeVar

from atoll.errors import BadFrame

if TYPE_CHECKING:
    from google.protobuf.message import Message

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("!I")
M = TypeVar("M", bound="Message")


class Gone(Exception):  # not an AtollError: each side knows what the other's end means
    """The other end closed the pipe, or died."""


class Pipe:
    """An end of a pipe; sending and receiving may be in different threads."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Write one message. Raises Gone."""
        data = message.SerializeToString()
        if len(data) > MAX_FRAME_BYTES:
            raise BadFrame(f"a message of {len(data)} bytes; at most {MAX_FRAME_BYTES} are possible")
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError:
            raise Gone from None

    def receive(self, into: M, timeout_s: float | None = None) -> M:
        """Read one message. Raises Gone, BadFrame, and TimeoutError after ``timeout_s`` without one."""
        self._socket.settimeout(timeout_s)
        try:
            head = self._exactly(_LENGTH.size)
            self._socket.settimeout(None)
            (length,) = _LENGTH.unpack(head)
            if length > MAX_FRAME_BYTES:
                raise BadFrame(f"a message of {length} bytes; at most {MAX_FRAME_BYTES} are accepted")
            data = self._exactly(length)
        except TimeoutError:
            raise
        except OSError:
            raise Gone from None
        try:
            into.ParseFromString(data)
        except Exception as error:  # noqa: BLE001 - protobuf's own error class is not public
            raise BadFrame(f"a damaged message: {error}") from None
        return into

    def close(self) -> None:
        """Close this end; the other one notices."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, length: int) -> bytes:
        found = bytearray()
        while len(found) < length:
            piece = self._socket.recv(min(length - len(found), 1 << 20))
            if not piece:
                raise Gone
            found += piece
        return bytes(found)


def pipe_from(descriptor: int) -> Pipe:
    """The child's end, by the number it was given."""
    return Pipe(socket.socket(fileno=descriptor))
