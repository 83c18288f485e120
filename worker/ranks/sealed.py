"""A connection between hosts of one site whose frames only who has the site's secret can write and read.

Both ends send 32 random bytes. The key of each direction is HKDF-SHA256 of the secret, salted with both, so
that nothing of another connection is taken here, nor what this end has sent itself. A frame is its length
and AES-GCM of its content, numbered from 0: one that was changed, repeated or left out ends the connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.errors import AccessDenied

MOST_BYTES = 64 << 10  # of a frame's content
LEAST_SECRET = 16
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!IQ")
_RANDOM, _TAG = 32, 16
_PROTOCOL = b"atoll site 1"
_IDLE_S, _EVERY_S, _MISSED = 2, 1, 3  # of keepalive: a host that vanishes is missed after some 5 s


class Closed(Exception):  # not an AtollError: each side knows what the other's end means
    """The other end closed the connection, or vanished."""


class Sealed:
    """A connection after its handshake; sending and receiving may be in different threads."""

    def __init__(self, end: socket.socket, secret: bytes, *, opener: bool, timeout_s: float) -> None:
        """``opener``: this end has connected. Raises Closed, also where the other end says nothing for
        ``timeout_s``. The secret is proven by the first frame, not yet here."""
        if len(secret) < LEAST_SECRET:
            raise ValueError(f"a secret of {len(secret)} bytes; at least {LEAST_SECRET}")
        self._socket, self._sending = end, threading.Lock()
        self._sent = self._received = 0
        _keep_alive(end)
        end.settimeout(timeout_s)
        try:
            own = os.urandom(_RANDOM)
            end.sendall(own)
            other = self._exactly(_RANDOM)
        except OSError:
            raise Closed from None
        salt = own + other if opener else other + own
        keys = HKDF(algorithm=SHA256(), length=64, salt=salt, info=_PROTOCOL).derive(secret)
        first, second = AESGCM(keys[:32]), AESGCM(keys[32:])
        self._seal, self._unseal = (first, second) if opener else (second, first)

    def send(self, content: bytes | memoryview) -> None:
        """Write a frame of at most ``MOST_BYTES``. Raises Closed."""
        with self._sending:
            data = self._seal.encrypt(_NUMBER.pack(0, self._sent), bytes(content), None)
            self._sent += 1
            try:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
            except OSError:
                raise Closed from None

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Read a frame. Raises Closed, TimeoutError, and AccessDenied for a frame that the holder of the
        secret has not written here and now."""
        self._socket.settimeout(timeout_s)
        try:
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            if not _TAG <= length <= MOST_BYTES + _TAG:
                raise AccessDenied("a frame of no length that a host of this site writes")
            data = self._exactly(length)
        except TimeoutError:
            raise
        except OSError:
            raise Closed from None
        try:
            content = self._unseal.decrypt(_NUMBER.pack(0, self._received), data, None)
        except InvalidTag:
            raise AccessDenied("a frame that is not sealed with this site's secret") from None
        self._received += 1
        return content

    def close(self) -> None:
        """Close it; the other end notices."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            piece = self._socket.recv(size - len(found))
            if not piece:
                raise Closed
            found += piece
        return bytes(found)


def _keep_alive(end: socket.socket) -> None:
    """Have the system look whether the other host is still there; as far as it can."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _EVERY_S),
        ("TCP_KEEPCNT", _MISSED),
        ("TCP_USER_TIMEOUT", 1000 * (_IDLE_S + _EVERY_S * _MISSED)),
        ("TCP_NODELAY", 1),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.IPPROTO_TCP, option, value)
