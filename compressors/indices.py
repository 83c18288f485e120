"""Positions of the kept elements: k sorted unique numbers below d, in as few bytes as they need.

Costs in bits a position, for uniform positions of density p = k/d (the bound is
log2 C(d, k) / k, about log2(e/p) for small p):

    all       0, where k = d
    rice      b + 1 + sum(gap >> b)/k, at most b + 1 + (d-k)/(k 2**b), at least one less.
              Expected b + 1/(1 - (1-p)**(2**b)): 0.4 % above the bound at p = 1 %
    elias     l + 1 + (last >> l)/k with l = floor(log2(d/k)): 2 to 3 + l
    varint    8 a position and 8 more for each gap of 128 and above
    zstd      the varints' entropy: less than all others where positions cluster
    bitmap    d/k: Rice with b = 0 takes no more

``choose`` takes the cheapest by Rice's expectation and the exact sizes of Elias-Fano and the bitmap, and
tries zstd where a sample of the gaps says that it saves 15 %. Rice and Elias-Fano keep their unary parts and
their low bits in two streams, so that both ends are vectors. Source: Rice and Plaunt 1971; Elias
1974; papers/compression.md 1.3 (measured sizes).

Every decoder takes k and d as agreed, allocates in proportion to k and to what has arrived, and
raises BadFrame unless the positions are ascending, unique, below d and the stream has its one length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zstandard

from atoll.errors import BadFrame
from compressors.bits import Bytes, Ints, as_bytes, pack, pack_ones, packed_bytes, unpack, unpack_ones

Buffer = bytes | bytearray | memoryview

MAX_POSITIONS = 1 << 48
"""d and k are below: sums of positions stay within 64 bits."""
_VARINT_BYTES = 7  # 49 bits
_SAMPLE = 4096  # gaps looked at before zstd is tried
_FEW = 512  # positions below this: a frame's own bytes would eat the gain
_BLOCK = 1 << 15


@dataclass(frozen=True, slots=True)
class IndexCodec:
    """An encoding. ``encode(positions, d)``; ``decode(data, k, d)`` gives int64 positions."""

    name: str
    encode: Callable[[Ints, int], bytes]
    decode: Callable[[Bytes, int, int], Ints]


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


def _elias_width(kept: int, total: int) -> int:
    return max(0, (total // kept).bit_length() - 1) if kept else 0


def _encode_elias(positions: Ints, total: int) -> bytes:
    width = _elias_width(len(positions), total)
    places = positions >> width
    places += np.arange(len(places))
    return b"".join((pack_ones(places).data, pack(positions & ((1 << width) - 1), width).data))


def _decode_elias(data: Bytes, kept: int, total: int) -> Ints:
    width = _elias_width(kept, total)
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
    if len(positions) > total // 16:
        bits = np.zeros(total, np.bool_)
        bits[positions] = True
        return np.packbits(bits, bitorder="little").tobytes()
    # Few positions: touch their bytes only (measured at 1 %: 2.7 times faster).
    places, ones = positions >> 3, np.left_shift(1, positions & 7).astype(np.uint8)
    packed = np.zeros(-(-total // 8), np.uint8)
    packed[places] = ones  # of several in a byte the last one stays
    again = np.flatnonzero(places[1:] == places[:-1])
    np.bitwise_or.at(packed, places[again], ones[again])
    return packed.tobytes()


def _decode_bitmap(data: Bytes, kept: int, total: int) -> Ints:
    if len(data) != -(-total // 8) or int(np.bitwise_count(data).sum(dtype=np.int64)) != kept:
        raise BadFrame(f"bitmap of {len(data)} bytes does not hold {kept} of {total}")
    return checked(np.flatnonzero(np.unpackbits(data, bitorder="little").view(np.bool_)), kept, total)


def _encode_all(positions: Ints, total: int) -> bytes:
    return b""


def _decode_all(data: Bytes, kept: int, total: int) -> Ints:
    if len(data) or kept != total:
        raise BadFrame(f"{kept} of {total} positions need {len(data)} bytes: not all of them")
    return np.arange(total)


INDEX_CODECS = (
    IndexCodec("all", _encode_all, _decode_all),
    IndexCodec("rice", _encode_rice, _decode_rice),
    IndexCodec("elias", _encode_elias, _decode_elias),
    IndexCodec("varint", _encode_varint, _decode_varint),
    IndexCodec("zstd", _encode_zstd, _decode_zstd),
    IndexCodec("bitmap", _encode_bitmap, _decode_bitmap),
)
"""The place is the wire's code: append, never reorder."""
BY_NAME = {codec.name: number for number, codec in enumerate(INDEX_CODECS)}


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
    b, width = rice_parameter(kept, total), _elias_width(kept, total)
    if not b:
        return "bitmap"  # the same bits without gaps
    name = min(
        (kept * _rice_bits(b, kept, total), "rice"),
        (kept * (width + 1) + (int(positions[-1]) >> width), "elias"),
        (total, "bitmap"),
        key=lambda pair: pair[0],
    )[1]
    if name != "rice" or kept < _FEW:
        return name
    places = np.arange(1, kept, -(-kept // _SAMPLE))
    gaps = positions[places] - positions[places - 1] - 1
    pays = _varint_bits(gaps) < 0.85 * (b + 1 + float((gaps >> b).mean()))
    return "zstd" if pays else name


def _varint_bits(gaps: Ints) -> float:
    """Bits a gap as a varint under an ideal coder of first bytes."""
    long = gaps >= 128
    counts = np.bincount((gaps & 0x7F) | (long << 7), minlength=256)
    share = counts[counts > 0] / len(gaps)
    first = -float((share * np.log2(share)).sum())
    # The histogram of a small sample looks more ordered than it is: (symbols - 1)/(2 n ln 2) bits.
    first += (len(share) - 1) / (2 * len(gaps) * math.log(2))
    return first + 8.0 * float(long.mean())


def encode_positions(positions: Ints, total: int, name: str = "auto") -> bytes:
    """Return one byte that names the encoding, then its stream. ``positions``: int64, ascending, unique, in
    0..total-1."""
    if not 0 <= total < MAX_POSITIONS or len(positions) > total:
        raise ValueError(f"{len(positions)} positions below {total}")
    if not len(positions):
        return b""
    chosen = choose(positions, total) if name == "auto" else name
    stream = _encoded(positions, total, chosen)
    if name == "auto" and chosen == "zstd":  # the entropy was an estimate
        stream = min(stream, _encoded(positions, total, "rice"), key=len)
    return stream


def _encoded(positions: Ints, total: int, name: str) -> bytes:
    return bytes((BY_NAME[name],)) + INDEX_CODECS[BY_NAME[name]].encode(positions, total)


def decode_positions(data: Buffer, kept: int, total: int) -> Ints:
    """Invert ``encode_positions``. Raises BadFrame for anything else."""
    if not 0 <= kept <= total < MAX_POSITIONS:
        raise BadFrame(f"{kept} positions below {total}")
    stream = as_bytes(data)
    if not kept:
        if len(stream):
            raise BadFrame(f"{len(stream)} bytes of positions for none")
        return np.empty(0, np.int64)
    if not len(stream) or int(stream[0]) >= len(INDEX_CODECS):
        raise BadFrame("positions in no known encoding")
    return INDEX_CODECS[int(stream[0])].decode(stream[1:], kept, total)


def max_encoded_bytes(kept: int, total: int, name: str = "auto") -> int:
    """No stream of ``encode_positions(..., name)`` is longer."""
    if kept <= 0:
        return 0
    if name in ("auto", "all"):
        return max_bytes(kept, total)
    if name == "rice":
        b = rice_parameter(kept, total)
        return 2 + -(-(kept + ((total - kept) >> b)) // 8) + packed_bytes(kept, b)
    if name == "elias":
        width = _elias_width(kept, total)
        return 3 + -(-(kept + (total >> width)) // 8) + packed_bytes(kept, width)
    if name == "bitmap":
        return 1 + -(-total // 8)
    # Each further byte of a varint needs a gap 128 times as long, and all gaps add up to the total.
    varints = kept + sum(min(kept, total >> (7 * more)) for more in range(1, _VARINT_BYTES))
    return 1 + varints + (varints >> 8) + 64  # zstd: its own bound for what does not shrink
