"""Masks: keystreams of AES-256 in counter mode, added to whole numbers modulo 2^32 or 2^64.

A keystream is uniform to whoever lacks its key, and so is whatever it is added to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

PIECE_BYTES = 1 << 18  # stays in the processor's cache
_BLOCK = 16

Words = Sequence[NDArray[Any]]
"""Flat arrays of unsigned numbers, through which one keystream goes."""


def keystream(key: bytes) -> Callable[[int], bytes]:
    """Return a source of random bytes, the same for the same key."""
    stream = Cipher(AES(key), CTR(bytes(_BLOCK))).encryptor()
    return lambda count: stream.update(bytes(count))


def add_mask(words: Words, key: bytes, *, subtract: bool = False) -> None:
    """Add the keystream of ``key`` to ``words`` in place. A key is for one vector alone."""
    stream = Cipher(AES(key), CTR(bytes(_BLOCK))).encryptor()
    size = min(PIECE_BYTES, max(array.nbytes for array in words))
    zeros, held = bytes(size), bytearray(size + _BLOCK)
    for array in words:
        step = PIECE_BYTES // array.itemsize
        little = array.dtype.newbyteorder("<")
        for at in range(0, len(array), step):
            part = array[at : at + step]
            stream.update_into(memoryview(zeros)[: part.nbytes], held)
            mask = np.frombuffer(held, little, len(part))
            if subtract:
                part -= mask
            else:
                part += mask
