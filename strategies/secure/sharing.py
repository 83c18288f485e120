"""Shamir's secret sharing of 32 bytes over the field of 2^521 - 1.

    f(0) = secret,   share of holder x = f(x),   f of degree t - 1 with random coefficients

Any t shares give the secret by Lagrange's interpolation at 0; of fewer every secret is equally likely.
Source: Shamir 1979.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

from atoll.errors import BadUpdate
from atoll.secure import KEY_BYTES, SHARE_BYTES

PRIME = 2**521 - 1

Random = Callable[[int], bytes]


def shared(secret: bytes, holders: Collection[int], threshold: int, random: Random) -> dict[int, bytes]:
    """Return a share for each of ``holders``, numbers from 1. ValueError for a secret that is no 32 bytes or
    a threshold that they cannot reach."""
    if len(secret) != KEY_BYTES or not 1 <= threshold <= len(holders) or min(holders) < 1:
        raise ValueError(f"{len(secret)} bytes for {len(holders)} holders, {threshold} of whom are needed")
    # 39 random bits more than the field's: no coefficient is likelier than another by 2^-39.
    rest = [int.from_bytes(random(70), "big") % PRIME for _ in range(threshold - 1)]
    coefficients = [*rest, int.from_bytes(secret, "big")]
    found = {}
    for x in holders:
        value = 0
        for coefficient in coefficients:
            value = (value * x + coefficient) % PRIME
        found[x] = value.to_bytes(SHARE_BYTES, "big")
    return found


def joined(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret of which these are shares. BadUpdate where they are too few, or of no secret."""
    if len(shares) < threshold:
        raise BadUpdate(f"{len(shares)} shares of a secret; {threshold} are needed")
    points = tuple(sorted(shares)[:threshold])
    values = [int.from_bytes(shares[x], "big") for x in points]
    secret = sum(w * y for w, y in zip(_weights(points), values, strict=True)) % PRIME
    if secret >> (8 * KEY_BYTES):
        raise BadUpdate("shares that are of no secret: some member's is wrong")
    return secret.to_bytes(KEY_BYTES, "big")


@lru_cache(maxsize=256)
def _weights(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights at 0; members who are left are mostly the same for all secrets."""
    found = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)
