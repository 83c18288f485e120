"""Whole numbers around zero, in the bits that they need: sums of a federated round as they travel.

    payload = for each 2^20 numbers: a byte for each whole block of 512 and one for the rest, its width in
              bits; then for each width, ascending, the numbers of its whole blocks, packed; then the rest

A number is sent as zigzag(v) = 2v or -2v - 1, so a block's width follows from its largest magnitude. One wide
number does not widen a tensor, and a sum whose elements stay below 2^31 units takes less than float32. No
codec of a link: it takes int64 alone, and |v| < 2^61, which ``strategies.fixed`` keeps to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors.base import Packet
from compressors.bits import as_bytes, pack, packed_bytes, unpack

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from compressors.bits import Bytes, Ints

NAME = "integers"
DTYPE = "int64"
BLOCK = 512
PIECE = 1 << 20  # numbers at a time: temporaries take a few pieces, however large the tensor
MAX_WIDTH = 62
LARGEST = 2 ** (MAX_WIDTH - 1) - 1
_POWERS = 1 << np.arange(MAX_WIDTH + 1, dtype=np.int64)


def pack_integers(array: Ints) -> Packet:
    """A packet of ``array``; ValueError for another dtype or a magnitude above ``LARGEST``."""
    meta = TensorMeta(tuple(array.shape), str(array.dtype))
    flat = np.ascontiguousarray(array).reshape(-1)
    if meta.dtype != DTYPE or (flat.size and not -LARGEST <= flat.min() <= flat.max() <= LARGEST):
        raise ValueError(f"{meta} with numbers beyond {LARGEST}, or not of {DTYPE}")
    parts = [part for here in _pieces(flat.size) for part in _packed(flat[here])]
    return Packet(NAME, meta, np.concatenate(parts).data if parts else b"")


def unpack_integers(packet: Packet, meta: TensorMeta) -> Ints:
    """The numbers of a packet. BadFrame unless it is exactly one of ``meta``; its length is checked before
    anything is allocated."""
    if packet.codec != NAME or packet.meta != meta or packet.params or packet.zero or meta.dtype != DTYPE:
        raise BadFrame(f"a packet of {packet.codec} with {packet.meta}; expected {NAME} with {meta}")
    data, ends = as_bytes(packet.payload), [0]
    for here in _pieces(meta.elements):
        count = here.stop - here.start
        widths = _widths(data[ends[-1] :], count)
        ends.append(ends[-1] + len(widths) + sum(size for _, _, size in _parts(widths, count)))
    if len(data) != ends[-1]:
        raise BadFrame(f"{NAME}: {len(data)} bytes for {meta}; in these widths it takes {ends[-1]}")
    found = np.empty(meta.elements, np.int64)
    for here, begin in zip(_pieces(meta.elements), ends, strict=False):
        _unpack_into(found[here], data[begin:])
    return found.reshape(meta.shape)


def _packed(flat: Ints) -> Iterator[Bytes]:
    """The parts of a piece's payload."""
    zigzag = (flat << 1) ^ (flat >> 63)
    whole = flat.size // BLOCK
    blocks, rest = zigzag[: whole * BLOCK].reshape(whole, BLOCK), zigzag[whole * BLOCK :]
    widths = np.searchsorted(_POWERS, blocks.max(axis=1, initial=0), side="right").astype(np.uint8)
    last = int(rest.max(initial=0)).bit_length()
    yield np.append(widths, np.uint8(last))
    for width in np.unique(widths):
        yield pack(blocks[widths == width].reshape(-1), int(width))
    yield pack(rest, last)


def _unpack_into(target: Ints, data: Bytes) -> None:
    whole = target.size // BLOCK
    widths = _widths(data, target.size)
    blocks, at = target[: whole * BLOCK].reshape(whole, BLOCK), len(widths)
    for chosen, width, size in _parts(widths, target.size):
        count = target.size % BLOCK if chosen is None else int(chosen.sum()) * BLOCK
        zigzag = unpack(data[at : at + size], count, width)
        numbers = (zigzag >> 1) ^ -(zigzag & 1)
        if chosen is None:
            target[whole * BLOCK :] = numbers
        else:
            blocks[chosen] = numbers.reshape(-1, BLOCK)
        at += size


def _pieces(elements: int) -> Iterator[slice]:
    return (slice(at, min(at + PIECE, elements)) for at in range(0, elements, PIECE))


def _widths(data: Bytes, count: int) -> Bytes:
    """The widths at the beginning of a piece of ``count`` numbers."""
    widths = data[: count // BLOCK + 1]
    if len(widths) != count // BLOCK + 1 or widths.max() > MAX_WIDTH:
        raise BadFrame(f"{NAME}: a payload that is cut short, or numbers of more than {MAX_WIDTH} bits")
    return widths


def _parts(widths: Bytes, count: int) -> Iterator[tuple[NDArray[Any] | None, int, int]]:
    """(which blocks, width, bytes) of each part behind the widths; None: the numbers after the last block."""
    for width in np.unique(widths[:-1]):
        chosen = widths[:-1] == width
        yield chosen, int(width), packed_bytes(int(chosen.sum()) * BLOCK, int(width))
    yield None, int(widths[-1]), packed_bytes(count % BLOCK, int(widths[-1]))
