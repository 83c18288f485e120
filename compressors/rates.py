"""Payload bytes of the codecs whose length follows from the number of elements; no torch here."""

from __future__ import annotations

from collections.abc import Callable

from atoll.opdag import TensorMeta

CHUNK = 1 << 16
"""Elements that are coded together: 256 KiB of float32."""
INT8_BLOCK, INT4_BLOCK, QSGD_BUCKET = 256, 64, 512
SCALE_BYTES = 4
NIBBLES, TRITS = 2, 5  # digits of base 16 and 3 that a byte holds
EDEN_BLOCK, EDEN_SCALE_BYTES, EDEN_MOST_BITS = 256, 2, 4
SEED_BYTES = 4
EDEN_ROWS = CHUNK // EDEN_BLOCK  # blocks that are coded together
MAX_RATIO_8_BIT = 4.0
"""``qsgd`` sends bytes up to this ratio, above it halves of bytes."""


def ceil_div(elements: int, size: int) -> int:
    """Return how many pieces of ``size`` hold so many elements."""
    return -(-elements // size)


def digit_bytes(elements: int, digits: int) -> int:
    """Bytes of ``planes.Planes``: each chunk on its own, so many digits a byte."""
    whole, rest = divmod(elements, CHUNK)
    return whole * ceil_div(CHUNK, digits) + ceil_div(rest, digits)


def fp16_bytes(elements: int) -> int:
    """A half an element, a shift a chunk."""
    return 2 * elements + ceil_div(elements, CHUNK)


def bf16_bytes(elements: int) -> int:
    """Half a float32 an element."""
    return 2 * elements


def int8_bytes(elements: int) -> int:
    """A byte an element, a scale a block."""
    return elements + SCALE_BYTES * ceil_div(elements, INT8_BLOCK)


def int4_bytes(elements: int) -> int:
    """Half a byte an element, a bfloat16 a block."""
    return digit_bytes(elements, NIBBLES) + 2 * ceil_div(elements, INT4_BLOCK)


def sign_bytes(elements: int) -> int:
    """A bit an element, a scale a tensor."""
    return SCALE_BYTES + ceil_div(elements, 8) if elements else 0


def qsgd_bytes(elements: int, bits: int = 8) -> int:
    """Eight or four bits an element, a scale a bucket."""
    codes = elements if bits == 8 else digit_bytes(elements, NIBBLES)
    return codes + SCALE_BYTES * ceil_div(elements, QSGD_BUCKET)


def terngrad_bytes(elements: int) -> int:
    """A base-3 digit an element, a scale a tensor."""
    return SCALE_BYTES + digit_bytes(elements, TRITS) if elements else 0


def natural_bytes(elements: int) -> int:
    """A byte an element, a first exponent a chunk."""
    return elements + ceil_div(elements, CHUNK)


def eden_widths(ratio: float) -> tuple[int, int]:
    """(bits a coordinate, how many of a block's 256 take one more) in 32 / ratio bits a value.

    The scale counts. Coordinates by eights, so that planes of bits are whole bytes; at least eight
    coordinates of one bit.
    """
    room = EDEN_BLOCK * 32.0 / ratio - 8.0 * EDEN_SCALE_BYTES
    bits, rest = divmod(max(8.0, min(room, EDEN_MOST_BITS * EDEN_BLOCK)), EDEN_BLOCK)
    return int(bits), int(rest) // 8 * 8


def eden_bytes(elements: int, bits: int, longer: int) -> int:
    """A seed; a bfloat16 a block and so many bits a coordinate, the last block whole."""
    return (SEED_BYTES if elements else 0) + ceil_div(elements, EDEN_BLOCK) * (
        EDEN_SCALE_BYTES + (EDEN_BLOCK * bits + longer) // 8
    )


def eden_size(meta: TensorMeta, ratio: float) -> float:
    """Return the payload bytes of ``eden``."""
    return float(eden_bytes(meta.elements, *eden_widths(ratio)))


def size_of(length: Callable[[int], int]) -> Callable[[TensorMeta, float], float]:
    """A catalogue's size of one of the above."""
    return lambda meta, ratio: float(length(meta.elements))


def qsgd_size(meta: TensorMeta, ratio: float) -> float:
    """Return the payload bytes of ``qsgd``, which the ratio makes narrower."""
    return float(qsgd_bytes(meta.elements, 8 if ratio <= MAX_RATIO_8_BIT else 4))
