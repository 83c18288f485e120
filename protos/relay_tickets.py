"""Tickets with which two workers are joined at a relay, and the few bytes that are exchanged there. Pure.

The relay greets with a nonce. A worker answers with its ticket and a proof that it holds the ticket's key,
which the coordinator gave it beside the ticket and which never crosses the connection: who overhears a ticket
cannot use it. The relay checks both with the one key that it shares with the coordinator, and knows no worker
by name. Once the other end is there it says JOINED to the one that waits, which answers CONFIRMED, then to
the one that dials; after that all bytes are the two workers' own.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import AccessDenied, BadFrame, StorageError, UsageError
from hostos.files.private_files import write_private

MAGIC = b"ATOLRLY1"
NONCE_BYTES = 16
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
KEY_BYTES = 32
MAC_BYTES = 32
JOINED, CONFIRMED = b"J", b"K"
REFUSED = b"R"  # is followed by the length of the reason in one byte, and the reason
_BODY = struct.Struct(">16s8sBQQH")
TICKET_BYTES = _BODY.size + MAC_BYTES
ANSWER_BYTES = TICKET_BYTES + MAC_BYTES  # the ticket and the proof
MAX_REASON_BYTES = 200


@dataclass(frozen=True, slots=True)
class Ticket:
    """Right of one end of a pair to be joined with the other, within bounds."""

    pair: bytes  # 16 bytes, the same for both ends
    serial: bytes  # 8 bytes, of this ticket alone
    dials: bool  # one end dials, the other waits for it
    expires_s: int  # Unix time; connections that are joined by then stay
    max_bytes: int  # of all connections together, both directions
    max_connections: int  # at once


def new_key() -> bytes:
    """A fresh key of a coordinator and its relays."""
    return secrets.token_bytes(KEY_BYTES)


def pair_id(key: bytes, one: str, other: str) -> bytes:
    """The 16 bytes by which a relay knows two workers, in either order."""
    first, second = sorted((one, other))
    return _mac(key, b"pair", first.encode() + b"\0" + second.encode())[:16]


def seal(key: bytes, ticket: Ticket) -> bytes:
    """The ticket's bytes, which nobody without ``key`` can make."""
    body = _BODY.pack(
        ticket.pair, ticket.serial, ticket.dials, ticket.expires_s, ticket.max_bytes, ticket.max_connections
    )
    return body + _mac(key, b"ticket", body)


def opened(key: bytes, sealed: bytes, now_s: float) -> Ticket:
    """The ticket. BadFrame of the wrong length, AccessDenied of a forged one and after its end."""
    if len(sealed) != TICKET_BYTES:
        raise BadFrame(f"a ticket of {len(sealed)} bytes; it has {TICKET_BYTES}")
    body, mac = sealed[: _BODY.size], sealed[_BODY.size :]
    if not hmac.compare_digest(mac, _mac(key, b"ticket", body)):
        raise AccessDenied("a ticket of another coordinator, or a forged one")
    pair, serial, dials, expires_s, max_bytes, max_connections = _BODY.unpack(body)
    if now_s > expires_s:
        raise AccessDenied(f"this ticket ended {now_s - expires_s:.0f} s ago")
    return Ticket(pair, serial, bool(dials), expires_s, max_bytes, max_connections)


def ticket_key(key: bytes, sealed: bytes) -> bytes:
    """The key that shows a ticket to be one's own."""
    return _mac(key, b"holder", sealed)


def greeting(nonce: bytes) -> bytes:
    """The relay's first bytes."""
    return MAGIC + nonce


def nonce_of(first: bytes) -> bytes:
    """The nonce of a greeting. BadFrame when something else than a relay of this version answers."""
    if len(first) != GREETING_BYTES or not first.startswith(MAGIC):
        raise BadFrame("no relay of this version answers there")
    return first[len(MAGIC) :]


def answer(sealed: bytes, holder: bytes, nonce: bytes) -> bytes:
    """The answer of the holder of a ticket to a greeting."""
    return sealed + _mac(holder, b"proof", nonce)


def admitted(key: bytes, said: bytes, nonce: bytes, now_s: float) -> Ticket:
    """The ticket of an answer. BadFrame, or AccessDenied with the reason."""
    sealed, proof = said[:TICKET_BYTES], said[TICKET_BYTES:]
    ticket = opened(key, sealed, now_s)
    if not hmac.compare_digest(proof, _mac(ticket_key(key, sealed), b"proof", nonce)):
        raise AccessDenied("this ticket is somebody else's")
    return ticket


def refusal(reason: str) -> bytes:
    """The relay's last word to somebody whom it does not join."""
    text = reason.encode()[:MAX_REASON_BYTES]
    return REFUSED + bytes([len(text)]) + text


def _mac(key: bytes, purpose: bytes, content: bytes) -> bytes:
    return hmac.digest(key, purpose + b"\0" + content, hashlib.sha256)


def key_file(path: Path) -> bytes:
    """The key that a file holds as hexadecimal digits. UsageError for anything else, StorageError."""
    try:
        text = path.read_text()[: 4 * KEY_BYTES]
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read the relay's key in {path}: {error}") from None
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(f"{path} holds no key of a relay: {2 * KEY_BYTES} hexadecimal digits")
    return key


def made_key_file(path: Path) -> bytes:
    """The same, made with mode 0600 where there is none."""
    if not path.exists():
        write_private(path, new_key().hex().encode() + b"\n")
    return key_file(path)
