"""A publisher's signature of an app: worker's owners may accept whatever one publisher signs.

The key is Ed25519 (RFC 8032) in a PEM file of the publisher's; who it is for others is ``ed25519:`` and the
public key in base64. Signed is the bundle's hash, so every file of the app.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from atoll.errors import UsageError
from hostos.files.private_files import write_private

if TYPE_CHECKING:
    from pathlib import Path

    from protos import atoll_apps_pb2 as pb

SCHEME = "ed25519:"
KEY_BYTES, SIGNATURE_BYTES = 32, 64
MAX_FILE_BYTES = 10_000
_SIGNED = b"atoll app bundle\0"


def make_key(path: Path) -> str:
    """Write a new key into a private file and return its publisher. UsageError when the file is there."""
    if path.exists():
        raise UsageError(f"{path} already exists; a key that people accepted must not be replaced")
    key = Ed25519PrivateKey.generate()
    write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return publisher(_public(key))


def sign(path: Path, bundle: str) -> tuple[bytes, bytes]:
    """Return a publisher's public key, and its signature of the bundle of this hash. UsageError."""
    try:
        text = path.read_bytes()[:MAX_FILE_BYTES]
        key = load_pem_private_key(text, None)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} holds no key: {error}; `atoll flower key {path.name}` makes one") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} holds another kind of key; `atoll flower key` makes one")
    return _public(key), key.sign(_SIGNED + bytes.fromhex(bundle))


def signer(app: pb.AppIdentity) -> str:
    """Return the publisher that signed this app, "" when nobody did or the signature is not of its hash."""
    try:
        key = Ed25519PublicKey.from_public_bytes(app.signer)
        key.verify(app.signature, _SIGNED + bytes.fromhex(app.hash))
    except (InvalidSignature, ValueError):
        return ""
    return publisher(app.signer)


def publisher(key: bytes) -> str:
    """Return a public key as people exchange it."""
    return SCHEME + base64.b64encode(key).decode()


def checked_publisher(text: str) -> str:
    """Return a publisher as it was typed. UsageError when it is none."""
    try:
        key = base64.b64decode(text.strip().removeprefix(SCHEME), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(f"{text[:80]!r} is not a publisher; `atoll flower key FILE` prints one, ed25519:...")
    return publisher(key)


def _public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
