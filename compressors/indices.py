"""Positions of the kept elements: k sorted unique numbers below d, in as few bytes as they need.

Costs in bits a position, for uniform positions of density p = k/d (the bound is
log2 C(d, k) / k, about log2(e/p) for small p):

    all       0, where k = d
    rice      b + 1 + sum(gap >> b)/k, at most b + 1 + (d-k)/(k 2**b), at least one less.
              Expected b + 1/(1 - (1-p)**(2**b)): 0.4 % above the bound at p = 1 %
    zstd      the entropy of the gaps as varints: less than all others where positions cluster
    bitmap    d/k: Rice with b = 0 takes no more

``choose`` takes Rice or the bitmap by density, and tries zstd where a sample of the gaps says that it saves
15 %. Rice keeps its unary parts and its low bits in two streams, so that both ends are vectors. Elias-Fano
and bare varints are read and no longer written: over 4,000 sets of uniform positions the one saved 0.012 %,
the other is never the shortest. Source: Rice and Plaunt 1971; Elias 1974; papers/compression.md 1.3.

Every decoder takes k and d as agreed, allocates in proportion to k and to what has arrived, and
raises BadFrame unless the positions are ascending, unique, below d and the stream has its one length.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import zstandard

from atoll.errors import BadFrame
from compressors.bits import Bytes, Ints, as_bytes, pack, packed_bytes, unpack, unpack_ones

Buffer = bytes | bytearray | memoryview

MAX_POSITIONS = 1 << 48
"""d and k are below: sums of positions stay within 64 bits."""
_VARINT_BYTES = 7  # 49 bits
_SAMPLE = 4096  # gaps looked at before zstd is tried
_FEW = 512  # positions below this: a frame's own bytes would eat the gain
_BLOCK = 1 << 15


def rice_parameter(kept: int, total: int) -> int:
    """The b that minimises the expected bits of a position."""
    if kept <= 0 or 2 * kept >= total:
        return 0
    guess = int(math.log2(total / kept * math.log(2)))
    return min(range(max(0, guess - 1), guess + 3), key=lambda b: _rice_bits(b, kept, total))


def _rice_bits(b: int, kept: int, total: int) -> float:
    """b + 1/(1 - (1-p)**(2**b)), for 0 < kept < total."""
    return b - 1.0 / math.expm1(2.0**b * math.log1p(-kept / total))


def expected_bytes(kept: int, total: int) -> float:
    """Bytes that ``encode_positions`` takes for uniform positions.

    Rice's bounds hold any real positions within one bit each (0.67 at 1 %) above this.
    """
    if kept <= 0 or kept >= total:
        return 0.0 if kept <= 0 else 1.0
    return 2.0 + kept * _rice_bits(rice_parameter(kept, total), kept, total) / 8


def max_bytes(kept: int, total: int) -> int:
    """No stream of ``encode_positions`` is longer: Rice's bound."""
    if kept <= 0 or kept >= total:
        return 0 if kept <= 0 else 1
    b = rice_parameter(kept, total)
    return 3 + -(-(kept + ((total - kept) >> b)) // 8) + packed_bytes(kept, b)


def max_read_bytes(kept: int, total: int) -> int:
    """No stream that ``decode_positions`` reads is longer, of an older version's either: zstd of varints."""
    # Each further byte of a varint needs a gap 128 times as long, and all gaps add up to the total.
    varints = kept + sum(min(kept, total >> (7 * more)) for more in range(1, _VARINT_BYTES))
    return max(max_bytes(kept, total), 1 + varints + (varints >> 8) + 64)


def _gaps(positions: Ints) -> Ints:
    gaps = np.empty(len(positions), np.int64)
    gaps[:1] = positions[:1]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps[1:] -= 1
    return gaps


def _from_gaps(gaps: Ints, total: int) -> Ints:
    """Positions of non-negative gaps. BadFrame when they reach ``total``."""
    if float(gaps.sum(dtype=np.float64)) + len(gaps) > total:  # in floats: int64 could wrap
        raise BadFrame(f"{len(gaps)} positions reach beyond {total}")
    gaps += 1
    np.cumsum(gaps, out=gaps)
    gaps -= 1
    return gaps


def _encode_rice(positions: Ints, total: int) -> bytes:
    kept = len(positions)
    b = rice_parameter(kept, total)
    ones = np.zeros(kept + ((total - kept) >> b), np.bool_)
    low = np.empty(kept, np.uint8 if b <= 8 else np.int64)
    previous = place = -1
    for start in range(0, kept, _BLOCK):  # temporaries stay in the cache: twice as fast
        part = positions[start : start + _BLOCK]
        gaps = _gaps(part)
        gaps[0] -= previous + 1
        low[start : start + _BLOCK] = gaps & ((1 << b) - 1)
        gaps >>= b
        gaps += 1
        np.cumsum(gaps, out=gaps)
        gaps += place
        ones[gaps] = True
        previous, place = int(part[-1]), int(gaps[-1])
    unary = np.packbits(ones[: place + 1], bitorder="little")
    return b"".join((bytes((b,)), unary.data, pack(low, b).data))


def _decode_rice(data: Bytes, kept: int, total: int) -> Ints:
    if not len(data) or (1 << int(min(data[0], 62))) > total:
        raise BadFrame(f"Rice stream of {len(data)} bytes for {kept} of {total}")
    b = int(data[0])
    split = len(data) - packed_bytes(kept, b)
    if split < 1:
        raise BadFrame(f"Rice stream of {len(data)} bytes is too short for {kept} positions")
    places = unpack_ones(data[1:split], kept)
    low = unpack(data[split:], kept, b)
    if kept and (int(places[-1]) + 1 - kept) << b > total:
        raise BadFrame(f"{kept} positions reach beyond {total}")
    high = _gaps(places)
    high <<= b
    high |= low
    return _from_gaps(high, total)


def _decode_elias(data: Bytes, kept: int, total: int) -> Ints:
    width = max(0, (total // kept).bit_length() - 1)
    split = len(data) - packed_bytes(kept, width)
    if split < 0:
        raise BadFrame(f"Elias-Fano stream of {len(data)} bytes is too short for {kept} positions")
    positions = unpack_ones(data[:split], kept)
    positions -= np.arange(kept)
    positions <<= width
    positions |= unpack(data[split:], kept, width)
    return checked(positions, kept, total)


def _encode_varint(positions: Ints, total: int) -> bytes:
    gaps = _gaps(positions)
    parts = (_varints(gaps[start : start + _BLOCK]) for start in range(0, len(gaps), _BLOCK))
    return b"".join(part.data for part in parts)


def _varints(gaps: Ints) -> Bytes:
    """Seven bits a byte, lowest first; every byte of a gap but its last has the top bit set.

    A gap's bytes stand side by side, as many for all as the largest takes; what is beyond is cut out.
    """
    width = max(1, -(-int(gaps.max()).bit_length() // 7))
    used = np.ones((len(gaps), width), np.bool_)
    for byte in range(1, width):
        np.greater_equal(gaps, 1 << (7 * byte), out=used[:, byte])
    if width == 2:  # nearly always: words of 16 bits, a third faster
        words = gaps.astype("<u2")
        low = words & 0x7F
        low |= used[:, 1].astype(np.uint16) << 7
        words <<= 1
        words &= 0x7F00
        words |= low
        lanes = words.view(np.uint8).reshape(-1, 2)
    else:
        lanes = np.empty((len(gaps), width), np.uint8)
        for byte in range(width):
            lanes[:, byte] = (gaps >> (7 * byte)) & 0x7F
        lanes[:, :-1] |= used[:, 1:].astype(np.uint8) << 7
    return lanes[used]


def _decode_varint(data: Bytes, kept: int, total: int) -> Ints:
    last = np.flatnonzero(data < 0x80)
    if len(last) != kept or (len(data) and data[-1] >= 0x80):
        raise BadFrame(f"{len(last)} varints in {len(data)} bytes, expected {kept}")
    sizes = np.diff(last, prepend=-1)
    if kept and int(sizes.max()) > _VARINT_BYTES:
        raise BadFrame(f"a varint of {int(sizes.max())} bytes")
    gaps = (data[last] & 0x7F).astype(np.int64)
    which = np.arange(kept)
    for back in range(1, int(sizes.max(initial=1))):
        which = which[sizes[which] > back]
        gaps[which] = (gaps[which] << 7) | (data[last[which] - back] & 0x7F)
    return _from_gaps(gaps, total)


def _encode_zstd(positions: Ints, total: int) -> bytes:
    packed: bytes = zstandard.ZstdCompressor(level=1).compress(_encode_varint(positions, total))
    return packed


def _decode_zstd(data: Bytes, kept: int, total: int) -> Ints:
    limit = kept * _VARINT_BYTES
    try:
        # The frame's own claim decides what zstandard allocates: look at it first.
        if zstandard.frame_content_size(data.data) not in range(limit + 1):
            raise BadFrame(f"zstd frame declares more than {limit} bytes")
        plain = zstandard.ZstdDecompressor().decompress(data.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadFrame(f"zstd frame of {len(data)} bytes: {error}") from None
    return _decode_varint(as_bytes(plain), kept, total)


def _encode_bitmap(positions: Ints, total: int) -> bytes:
    bits = np.zeros(total, np.bool_)
    bits[positions] = True
    return np.packbits(bits, bitorder="little").tobytes()


def _decode_bitmap(data: Bytes, kept: int, total: int) -> Ints:
    if len(data) != -(-total // 8) or int(np.bitwise_count(data).sum(dtype=np.int64)) != kept:
        raise BadFrame(f"bitmap of {len(data)} bytes does not hold {kept} of {total}")
    return checked(np.flatnonzero(np.unpackbits(data, bitorder="little").view(np.bool_)), kept, total)


def _decode_all(data: Bytes, kept: int, total: int) -> Ints:
    if len(data) or kept != total:
        raise BadFrame(f"{kept} of {total} positions need {len(data)} bytes: not all of them")
    return np.arange(total)


Decode = Callable[[Bytes, int, int], Ints]
DECODERS: tuple[Decode, ...] = (
    _decode_all, _decode_rice, _decode_elias, _decode_varint, _decode_zstd, _decode_bitmap,
)  # fmt: skip
"""``decode(data, k, d)``, k above 0, gives int64 positions. Places are the wire's codes: never reorder."""
ENCODERS: dict[str, tuple[int, Callable[[Ints, int], bytes]]] = {
    "all": (0, lambda positions, total: b""),
    "rice": (1, _encode_rice),
    "zstd": (4, _encode_zstd),
    "bitmap": (5, _encode_bitmap),
}
"""``encode(positions, d)`` of those that are written, with their codes."""


def checked(positions: Ints, kept: int, total: int) -> Ints:
    """``positions``, or BadFrame unless they are ``kept``, ascending, unique and below ``total``."""
    if len(positions) != kept:
        raise BadFrame(f"{len(positions)} positions, expected {kept}")
    if kept and (positions[0] < 0 or positions[-1] >= total or not bool((np.diff(positions) > 0).all())):
        raise BadFrame(f"positions are not ascending and below {total}")
    return positions


def choose(positions: Ints, total: int) -> str:
    """The cheapest encoding by the costs above; nothing but Rice itself can exceed Rice's bound."""
    kept = len(positions)
    if kept == total:
        return "all"
    b = rice_parameter(kept, total)
    if not b:
        return "bitmap"  # the same bits without gaps
    if kept < _FEW:
        return "rice"
    places = np.arange(1, kept, -(-kept // _SAMPLE))
    gaps = positions[places] - positions[places - 1] - 1
    pays = _varint_bits(gaps) < 0.85 * (b + 1 + float((gaps >> b).mean()))
    return "zstd" if pays else "rice"


def _varint_bits(gaps: Ints) -> float:
    """Bits a gap as a varint under an ideal coder of first bytes."""
    long = gaps >= 128
    counts = np.bincount((gaps & 0x7F) | (long << 7), minlength=256)
    share = counts[counts > 0] / len(gaps)
    first = -float((share * np.log2(share)).sum())
    # The histogram of a small sample looks more ordered than it is: (symbols - 1)/(2 n ln 2) bits.
    first += (len(share) - 1) / (2 * len(gaps) * math.log(2))
    return first + 8.0 * float(long.mean())


def encode_positions(positions: Ints, total: int) -> bytes:
    """Return one byte that names the encoding, then its stream. ``positions``: int64, ascending, unique, in
    0..total-1."""
    if not 0 <= total < MAX_POSITIONS or len(positions) > total:
        raise ValueError(f"{len(positions)} positions below {total}")
    if not len(positions):
        return b""
    chosen = choose(positions, total)
    stream = encoded(positions, total, chosen)
    if chosen == "zstd":  # the entropy was an estimate
        stream = min(stream, encoded(positions, total, "rice"), key=len)
    return stream


def encoded(positions: Ints, total: int, name: str) -> bytes:
    """Return the stream in the encoding of this name, behind its code."""
    code, encode = ENCODERS[name]
    return bytes((code,)) + encode(positions, total)


def decode_positions(data: Buffer, kept: int, total: int) -> Ints:
    """Invert ``encode_positions``. Raises BadFrame for anything else."""
    if not 0 <= kept <= total < MAX_POSITIONS:
        raise BadFrame(f"{kept} positions below {total}")
    stream = as_bytes(data)
    if not kept:
        if len(stream):
            raise BadFrame(f"{len(stream)} bytes of positions for none")
        return np.empty(0, np.int64)
    if not len(stream) or int(stream[0]) >= len(DECODERS):
        raise BadFrame("positions in no known encoding")
    return DECODERS[int(stream[0])](stream[1:], kept, total)
