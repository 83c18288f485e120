"""Keys of an exchange: pairs made for it alone, what two of them agree on, and shares sealed with that.

    K_ij = HKDF-SHA256(X25519(i, j), info = purpose, exchange)

A purpose and an exchange have keys of their own, so nothing that was sealed, signed or masked in one exchange
means anything in another. All by ``cryptography``.
"""

from __future__ import annotations

from collections.abc import Callable

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.errors import BadFrame
from atoll.secure import KEY_BYTES, MemberKeys

Random = Callable[[int], bytes]

SEALING, MASKING, OWN = b"atoll/secure/seal", b"atoll/secure/mask", b"atoll/secure/own"
_ONCE = bytes(12)  # each key seals one message


class PrivateKeys:
    """A member's secrets of one exchange."""

    def __init__(self, random: Random) -> None:
        self._sealing = X25519PrivateKey.from_private_bytes(random(KEY_BYTES))
        self._masking = X25519PrivateKey.from_private_bytes(random(KEY_BYTES))
        self._signing = Ed25519PrivateKey.from_private_bytes(random(KEY_BYTES))

    @property
    def public(self) -> MemberKeys:
        """What the other members get."""
        pairs = (self._sealing, self._masking, self._signing)
        return MemberKeys(*(pair.public_key().public_bytes_raw().hex() for pair in pairs))

    @property
    def mask_secret(self) -> bytes:
        """The secret that is shared out: it takes this member's masks off the others' vectors."""
        return self._masking.private_bytes_raw()

    def seal_key(self, peer: MemberKeys, info: bytes) -> bytes:
        """Key of shares between two members, in the direction that ``info`` names."""
        return derived(_agreed(self._sealing, peer.sealing), SEALING, info)

    def mask_key(self, peer: MemberKeys, info: bytes) -> bytes:
        """Key of the mask that two members have in common."""
        return mask_key(self.mask_secret, peer, info)

    def sign(self, message: bytes) -> str:
        return self._signing.sign(message).hex()


def mask_key(mask_secret: bytes, peer: MemberKeys, info: bytes) -> bytes:
    """Return the key of a mask from one member's secret and the other's public key."""
    return derived(_agreed(X25519PrivateKey.from_private_bytes(mask_secret), peer.masking), MASKING, info)


def own_key(secret: bytes, info: bytes) -> bytes:
    """Return the key of the mask that a member has for itself."""
    return derived(secret, OWN, info)


def is_secret_of(mask_secret: bytes, keys: MemberKeys) -> bool:
    """Whether this is the secret behind a member's public masking key."""
    pair = X25519PrivateKey.from_private_bytes(mask_secret)
    return pair.public_key().public_bytes_raw().hex() == keys.masking


def signed(keys: MemberKeys, signature: str, message: bytes) -> bool:
    """Whether a member has signed ``message``."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(keys.signing)).verify(
            bytes.fromhex(signature), message
        )
    except (InvalidSignature, ValueError):
        return False
    return True


def sealed(key: bytes, message: bytes) -> str:
    """``message`` for the only holder of ``key`` beside the sender; a key seals once."""
    return AESGCM(key).encrypt(_ONCE, message, None).hex()


def opened(key: bytes, parcel: str) -> bytes:
    """The message in a parcel. BadFrame for one that was not sealed with ``key``."""
    try:
        return AESGCM(key).decrypt(_ONCE, bytes.fromhex(parcel), None)
    except (InvalidTag, ValueError):
        raise BadFrame("a share that its sender did not seal for this member in this exchange") from None


def derived(secret: bytes, purpose: bytes, info: bytes) -> bytes:
    """A key of 32 bytes."""
    return HKDF(SHA256(), KEY_BYTES, None, purpose + b"\0" + info).derive(secret)


def _agreed(own: X25519PrivateKey, peer: str) -> bytes:
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(peer)))
    except ValueError:  # a point of small order, with which every secret agrees on zero
        raise BadFrame("a member's public key is none") from None
