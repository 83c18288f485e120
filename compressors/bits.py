"""Bit streams in numpy: fixed-width numbers and unary runs, packed without gaps.

Little-endian throughout: bit 0 of byte 0 comes first. A stream of ``count`` numbers has exactly one
length in bytes, so a stream of any other length is refused before anything is allocated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.errors import BadFrame

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview


def as_bytes(data: Buffer) -> Bytes:
    """The buffer as an array, sharing its memory."""
    return np.frombuffer(data, np.uint8)


def packed_bytes(count: int, width: int) -> int:
    """Bytes of ``count`` numbers of ``width`` bits."""
    return count * (width // 8) + -(-count * (width % 8) // 8)


def pack(numbers: npt.NDArray[Any], width: int) -> Bytes:
    """``numbers`` (each 0 <= n < 2**width, width <= 62) in ``packed_bytes(len, width)`` bytes.

    Eight bits at a time as planes of whole bytes, lowest first; the remaining 1 to 7 bits of eight
    numbers in a word of 64 bits. No step handles single bits: about 1 ns a number.
    """
    planes = [(numbers >> (8 * plane)).astype(np.uint8) for plane in range(width // 8)]
    rest = width % 8
    if rest:
        planes.append(_pack_rest((numbers >> (width - rest)).astype(np.uint8), rest))
    return np.concatenate(planes) if planes else np.empty(0, np.uint8)


def unpack(data: Bytes, count: int, width: int) -> Ints:
    """Invert ``pack``. Raises BadFrame when ``data`` has another length or a set bit behind the end."""
    if len(data) != packed_bytes(count, width):
        raise BadFrame(f"{len(data)} bytes for {count} numbers of {width} bits")
    rest = width % 8
    if rest:
        numbers = _unpack_rest(data[(width // 8) * count :], count, rest).astype(np.int64)
        numbers <<= width - rest
    else:
        numbers = np.zeros(count, np.int64)
    for plane in range(width // 8):
        numbers |= data[plane * count : (plane + 1) * count].astype(np.int64) << (8 * plane)
    return numbers


def _lanes(bits: int, rest: int) -> np.uint64:
    """A mask of the low ``rest * bits // 8`` bits in the lower half of every lane of 2 * ``bits``."""
    lane = (1 << (rest * bits // 8)) - 1
    return np.uint64(sum(lane << at for at in range(0, 64, 2 * bits)))


def _pack_rest(small: Bytes, rest: int) -> Bytes:
    """Eight bytes of ``rest`` used bits each to ``rest`` bytes: pairs of lanes close up three times."""
    padded = np.zeros(-(-len(small) // 8) * 8, np.uint8)
    padded[: len(small)] = small
    words = padded.view("<u8")
    for bits in (8, 16, 32):
        mask, used = _lanes(bits, rest), rest * bits // 8
        upper = words >> np.uint64(bits - used)
        upper &= mask << np.uint64(used)
        words &= mask
        words |= upper
    packed = words.view(np.uint8).reshape(-1, 8)[:, :rest].reshape(-1)
    return packed[: packed_bytes(len(small), rest)]


def _unpack_rest(data: Bytes, count: int, rest: int) -> Bytes:
    if count * rest % 8 and data[-1] >> (count * rest % 8):
        raise BadFrame("bits set behind the end of packed numbers")
    groups = -(-count // 8)
    padded = np.zeros(groups * rest, np.uint8)
    padded[: len(data)] = data
    spread = np.zeros((groups, 8), np.uint8)
    spread[:, :rest] = padded.reshape(groups, rest)
    words = spread.view("<u8").reshape(-1)
    for bits in (32, 16, 8):
        mask, used = _lanes(bits, rest), rest * bits // 8
        upper = words & (mask << np.uint64(used))
        upper <<= np.uint64(bits - used)
        words &= mask
        words |= upper
    return words.view(np.uint8)[:count]


def unpack_ones(data: Bytes, count: int) -> Ints:
    """The places of exactly ``count`` ones, ascending, the last in the last byte; else BadFrame.

    Counted before anything is unpacked, so memory is at most 8 bytes a bit of ``data``.
    """
    ones = int(np.bitwise_count(data).sum(dtype=np.int64))
    if ones != count or (len(data) and data[-1] == 0):
        raise BadFrame(f"bit stream of {len(data)} bytes with {ones} ones, expected {count} to its end")
    return np.flatnonzero(np.unpackbits(data, bitorder="little").view(np.bool_))
