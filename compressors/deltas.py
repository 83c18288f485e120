"""A file of tensors as what changed in it against another file of the same layout, bit for bit.

A checkpoint's blob and the one before it have one header and words at the same places. In pieces of 1 MiB a
delta takes the shortest of these forms, of n words of w bits, of which a share c changed (as bits, so NaN and
-0 are values like any other):

    same        nothing                                       c = 0
    positions   4 bytes and the new word, each                (32 + w) c n bits: below c = 1/32
    mask        a bit a word, and the new words that changed  w / (1 + w c) times fewer bits
    coded       mask and differences, by byte planes and zstd
    differences of all words, by byte planes and zstd         where nearly all changed
    whole       the new words                                 what has no pattern

A difference is that of the words as integers, whose sign is moved to the lowest bit: neighbouring floats have
neighbouring integers. Nothing here loads torch. papers/decentralized.md 7 (BitSnap, arXiv 2511.12376).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from atoll.errors import BadFrame

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Words = NDArray[np.unsignedinteger]

PIECE_BYTES = 1 << 20
"""Encoded at one time: temporaries are some six times as much."""
LEVEL = 1  # of zstd: what is beyond is slower than a home's uplink
MAX_HEADER_BYTES = 64 << 10  # of a tensor's file
MOST_BYTES_PER_S = 30e6
"""On a faster line encoding, some 100 MB/s of one core, gains nothing."""
_MAGIC = b"ATD1"
_HEAD = struct.Struct("<4s32s32sQ")  # magic, hashes of the base and of the new file, size of both
HEAD_BYTES = _HEAD.size
_PIECE = struct.Struct("<BBII")  # form, bytes a word, words, bytes that follow
_WORDS: dict[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_SIGNED: dict[int, Any] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
_WIDTHS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "C64": 4}


class Form(IntEnum):
    """How a piece is written."""

    SAME = 0
    POSITIONS = 1
    MASK = 2
    CODED = 3
    DIFFERENCES = 4
    WHOLE = 5


@dataclass(frozen=True, slots=True)
class Head:
    """What a delta says of itself: SHA-256 of both files, and the bytes of each."""

    base: str
    new: str
    size: int


def fitting(base: Bytes, new: Bytes) -> bool:
    """Return whether two files of tensors have one layout, so that a delta says anything."""
    length = _header_bytes(new)
    return base.size == new.size and length is not None and bool((base[:length] == new[:length]).all())


def encode(base: Bytes, new: Bytes, names: tuple[str, str]) -> Iterator[bytes]:
    """Yield the delta of ``new`` against ``base``, files of safetensors that are ``fitting``.

    ``names``: their SHA-256, hexadecimal. Both are read piece by piece, so they may be mapped.
    """
    yield _HEAD.pack(_MAGIC, bytes.fromhex(names[0]), bytes.fromhex(names[1]), new.size)
    for begin, end, width in _segments(new):
        step = PIECE_BYTES // width * width
        for at in range(begin, end, step):
            stop = min(at + step, end)
            yield encode_piece(base[at:stop], new[at:stop], width)


def encode_piece(base: Bytes, new: Bytes, width: int) -> bytes:
    """Return one piece in its shortest form; both hold whole words of ``width`` bytes."""
    before, after = base.view(_WORDS[width]), new.view(_WORDS[width])
    changed = before != after
    count = int(np.count_nonzero(changed))
    n = len(after)
    best = Form.WHOLE, new.tobytes() if count else b""
    if not count:
        best = Form.SAME, b""
    else:
        values = after[changed]
        positions, mask = count * (4 + width), (n + 7) // 8 + count * width
        if positions < min(mask, len(best[1])):
            where = np.flatnonzero(changed).astype("<u4")
            best = Form.POSITIONS, where.tobytes() + values.tobytes()
        elif mask < len(best[1]):
            best = Form.MASK, masked(changed, values)
        squeeze = zstandard.ZstdCompressor(level=LEVEL).compress
        packed = squeeze(np.packbits(changed).tobytes())
        coded = struct.pack("<I", len(packed)) + packed + _coded(before[changed], values, width, squeeze)
        if len(coded) < len(best[1]):
            best = Form.CODED, coded
        if 2 * count > n and len(every := _coded(before, after, width, squeeze)) < len(best[1]):
            best = Form.DIFFERENCES, every
    form, payload = best
    return _PIECE.pack(form, width, n, len(payload)) + payload


def masked(changed: NDArray[np.bool_], values: Words) -> bytes:
    """Return a bit a word and the new words that changed."""
    return np.packbits(changed).tobytes() + values.tobytes()


def head_of(data: bytes) -> Head:
    """Return the head of a delta, of its first bytes at least; BadFrame for what is none."""
    if len(data) < _HEAD.size or data[:4] != _MAGIC:
        raise BadFrame("this is not a delta of a file of tensors")
    _, base, new, size = _HEAD.unpack_from(data)
    return Head(base.hex(), new.hex(), size)


def decode(base: Bytes, delta: Bytes) -> Iterator[bytes]:
    """Yield the new file in pieces of at most 1 MiB. BadFrame for a delta that is none of a file of
    ``base``'s size; whether the bytes are the right ones, and whether the base was, their hash says."""
    head = head_of(delta[: _HEAD.size].tobytes())
    if head.size != base.size:
        raise BadFrame(f"a delta of files of {head.size} bytes, the base has {base.size}")
    at, done = _HEAD.size, 0
    while done < head.size:
        if at + _PIECE.size > delta.size:
            raise BadFrame(f"a delta ends after {done} of {head.size} bytes")
        form, width, n, length = _PIECE.unpack(delta[at : at + _PIECE.size].tobytes())
        at += _PIECE.size
        n_bytes = n * width
        if width not in _WORDS or not 0 < n_bytes <= PIECE_BYTES or done + n_bytes > head.size:
            raise BadFrame(f"a piece of {n} words of {width} bytes at {done} of {head.size}")
        if length > n_bytes or at + length > delta.size:
            raise BadFrame(f"a piece of {length} bytes for {n_bytes}")
        payload, before = delta[at : at + length], base[done : done + n_bytes]
        yield decode_piece(form, width, before, payload)
        at, done = at + length, done + n_bytes
    if at != delta.size:
        raise BadFrame(f"{delta.size - at} bytes behind a delta's last piece")


def decode_piece(form: int, width: int, base: Bytes, payload: Bytes) -> bytes:
    """Return the new words of one piece. BadFrame for a payload that is none."""
    after = base.view(np.uint8).copy().view(_WORDS[width])
    n = len(after)
    if form == Form.SAME:
        _exactly(payload, 0)
    elif form == Form.WHOLE:
        _exactly(payload, n * width)
        return payload.tobytes()
    elif form == Form.POSITIONS:
        count, odd = divmod(payload.size, 4 + width)
        where = _words(payload[: 4 * count], 4).astype(np.int64)
        if odd or (where >= n).any() or (np.diff(where) <= 0).any():
            raise BadFrame("positions that do not ascend within their piece")
        after[where] = _words(payload[4 * count :], width)
    elif form == Form.MASK:
        held = (n + 7) // 8
        changed = _mask(payload[:held].tobytes(), n)
        _exactly(payload[held:], int(np.count_nonzero(changed)) * width)
        after[changed] = _words(payload[held:], width)
    elif form == Form.CODED:
        if payload.size < 4:
            raise BadFrame("a mask without its length")
        (length,) = struct.unpack("<I", payload[:4].tobytes())
        changed = _mask(_unsqueezed(payload[4 : 4 + length].tobytes(), (n + 7) // 8), n)
        after[changed] = _uncoded(after[changed], payload[4 + length :], width)
    elif form == Form.DIFFERENCES:
        after = _uncoded(after, payload, width)
    else:
        raise BadFrame(f"a piece of the form {form}")
    found: bytes = after.tobytes()
    return found


def _coded(before: Words, after: Words, width: int, squeeze: Callable[[bytes], bytes]) -> bytes:
    """Differences as integers, the sign in the lowest bit, by byte planes."""
    moved = (after - before).view(_SIGNED[width])
    flat = ((moved << 1) ^ (moved >> (8 * width - 1))).view(np.uint8)
    return squeeze(np.ascontiguousarray(flat.reshape(-1, width).T).tobytes())


def _uncoded(before: Words, payload: Bytes, width: int) -> Words:
    planes = np.frombuffer(_unsqueezed(payload.tobytes(), before.nbytes), np.uint8).reshape(width, -1)
    moved = np.ascontiguousarray(planes.T).reshape(-1).view(_WORDS[width])
    one = moved.dtype.type(1)
    after: Words = before + ((moved >> one) ^ (-(moved & one).view(_SIGNED[width])).view(moved.dtype))
    return after


def _unsqueezed(data: bytes, n_bytes: int) -> bytes:
    try:
        if zstandard.frame_content_size(data) != n_bytes:
            raise BadFrame(f"a frame that says other than {n_bytes} bytes")
        found = zstandard.ZstdDecompressor().decompress(data, max_output_size=n_bytes)
    except zstandard.ZstdError as error:
        raise BadFrame(f"a frame that is not zstd: {error}") from None
    if len(found) != n_bytes:
        raise BadFrame(f"{len(found)} bytes of {n_bytes}")
    return found


def _mask(data: bytes, n: int) -> NDArray[np.bool_]:
    if len(data) != (n + 7) // 8:
        raise BadFrame(f"a mask of {len(data)} bytes for {n} words")
    return np.unpackbits(np.frombuffer(data, np.uint8), count=n).astype(np.bool_)


def _words(data: Bytes, width: int) -> Words:
    found: Words = np.frombuffer(data.tobytes(), _WORDS[width])
    return found


def _exactly(payload: Bytes, n_bytes: int) -> None:
    if payload.size != n_bytes:
        raise BadFrame(f"{payload.size} bytes where {n_bytes} belong")


def _header_bytes(file: Bytes) -> int | None:
    """Return where the values begin; None where that is no file of safetensors."""
    if file.size < 8:
        return None
    length = 8 + int.from_bytes(file[:8].tobytes(), "little")
    return length if length <= min(file.size, 8 + MAX_HEADER_BYTES) else None


def _segments(file: Bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, bytes a word) of the header and of each tensor, in order, with no byte left out.

    What this side wrote itself is read, so a header that does not add up is our own fault: ValueError.
    """
    values = _header_bytes(file)
    if values is None:
        raise ValueError("no file of safetensors")
    yield 0, values, 1
    entries = json.loads(file[8:values].tobytes())
    entries.pop("__metadata__", None)
    at = values
    for entry in sorted(entries.values(), key=lambda entry: tuple(entry["data_offsets"])):
        begin, end = (values + offset for offset in entry["data_offsets"])
        if begin != at:
            raise ValueError(f"a tensor at {begin}, expected at {at}")
        yield begin, end, _WIDTHS.get(entry["dtype"], 1)
        at = end
    if at != file.size:
        raise ValueError(f"tensors end at {at} of {file.size} bytes")


def name_of(file: Bytes) -> str:
    """Return the SHA-256 of a file's bytes, hexadecimal."""
    return hashlib.sha256(file.data).hexdigest()
