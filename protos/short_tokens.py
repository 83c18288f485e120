"""Join tokens of at most 90 characters: a secret, the coordinator's address, hashes of its authorities.

A long token (``credentials.JoinToken``) carries the authority's certificate. A short one pins it: the
certificate is fetched from the coordinator without proof of who answers, and counts only where its hash is
the token's. Until then nothing secret is sent.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
import zlib
from dataclasses import dataclass, field

from atoll.errors import AccessDenied

SHORT_PREFIX = "atoll2_"
MAX_SHORT_CHARS = 90
SECRET_BYTES = 16
MAX_AUTHORITIES = 2  # that are trusted at once: the one in force, and the one that takes its place
PIN_BYTES = 16  # of SHA-256: a certificate of another key with the same ones takes 2^128 attempts
_HEAD = struct.Struct("!BH")  # authorities, entry port
_CHECK = struct.Struct("!I")
HOST = re.compile(r"[A-Za-z0-9.:_-]*")


def is_short(text: str) -> bool:
    """True for a short token, false for a long one and for none."""
    return text.strip().startswith(SHORT_PREFIX)


def sealed(prefix: str, body: bytes) -> str:
    """``prefix`` and base64url of ``body`` with its crc32, as tokens are written."""
    return prefix + base64.urlsafe_b64encode(body + _CHECK.pack(zlib.crc32(body))).decode().rstrip("=")


def unsealed(encoded: str, least: int) -> bytes:
    """The body that ``sealed`` wrote behind its prefix, of at least so many bytes. AccessDenied otherwise."""
    try:
        found = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise AccessDenied("join token holds characters that do not belong there; copy it again") from None
    body, check = found[: -_CHECK.size], found[-_CHECK.size :]
    if len(found) < least + _CHECK.size or zlib.crc32(body) != _CHECK.unpack(check)[0]:
        raise AccessDenied("join token is damaged or cut off (checksum differs); copy it whole")
    return body


@dataclass(frozen=True, slots=True)
class ShortToken:
    """Token of at most 90 characters; ``host`` "" where the address is given beside it."""

    secret: bytes = field(repr=False)
    pins: tuple[bytes, ...]  # of one authority, or of two while one takes the other's place
    host: str = ""
    port: int = 0

    def encode(self) -> str:
        """``atoll2_`` + base64url(authorities, port, secret, pins, host, crc32)."""
        body = _HEAD.pack(len(self.pins), self.port) + self.secret + b"".join(self.pins) + self.host.encode()
        return sealed(SHORT_PREFIX, body)

    @classmethod
    def decode(cls, text: str) -> ShortToken:
        """Parse a short token as pasted by a person. Raises AccessDenied, saying what is wrong with it."""
        text = "".join(text.split())
        if not text.startswith(SHORT_PREFIX) or len(text) > MAX_SHORT_CHARS:
            raise AccessDenied(
                f"this is not a short join token: {SHORT_PREFIX} and at most {MAX_SHORT_CHARS} characters, "
                f"not {len(text)}; copy it whole"
            )
        body = unsealed(text.removeprefix(SHORT_PREFIX), _HEAD.size + SECRET_BYTES + PIN_BYTES)
        count, port = _HEAD.unpack_from(body)
        start = _HEAD.size + SECRET_BYTES
        stop = start + count * PIN_BYTES
        if not 1 <= count <= MAX_AUTHORITIES or stop > len(body):
            raise AccessDenied("join token names no authority; ask for a new one")
        pins = tuple(body[at : at + PIN_BYTES] for at in range(start, stop, PIN_BYTES))
        host = body[stop:].decode("ascii", "replace")
        token = cls(body[_HEAD.size : start], pins, host, port)
        if not HOST.fullmatch(host) or bool(host) != bool(port) or token.encode() != text:
            raise AccessDenied("join token is not written as it was issued; copy it again")
        return token
