"""Whole numbers around zero, in the bits that they need: sums of a federated round as they travel.

    payload = a byte for each whole block of 512 numbers and one for the rest: its width in bits;
              then for each width, ascending, the numbers of its whole blocks, packed; then the rest

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
MAX_WIDTH = 62
LARGEST = 2 ** (MAX_WIDTH - 1) - 1
_POWERS = 1 << np.arange(MAX_WIDTH + 1, dtype=np.int64)


def pack_integers(array: Ints) -> Packet:
    """A packet of ``array``; ValueError for another dtype or a magnitude above ``LARGEST``."""
    meta = TensorMeta(tuple(array.shape), str(array.dtype))
    flat = np.ascontiguousarray(array).reshape(-1)
    if meta.dtype != DTYPE or (flat.size and not -LARGEST <= flat.min() <= flat.max() <= LARGEST):
        raise ValueError(f"{meta} with numbers beyond {LARGEST}, or not of {DTYPE}")
    zigzag = (flat << 1) ^ (flat >> 63)
    whole = flat.size // BLOCK
    blocks, rest = zigzag[: whole * BLOCK].reshape(whole, BLOCK), zigzag[whole * BLOCK :]
    widths = np.searchsorted(_POWERS, blocks.max(axis=1, initial=0), side="right").astype(np.uint8)
    last = int(rest.max(initial=0)).bit_length()
    packed = [pack(blocks[widths == width].reshape(-1), int(width)) for width in np.unique(widths)]
    head = [widths, np.asarray([last], np.uint8)]
    return Packet(NAME, meta, np.concatenate([*head, *packed, pack(rest, last)]).data)


def unpack_integers(packet: Packet, meta: TensorMeta) -> Ints:
    """The numbers of a packet. BadFrame unless it is exactly one of ``meta``; its length is checked before
    anything is allocated."""
    if packet.codec != NAME or packet.meta != meta or packet.params or packet.zero or meta.dtype != DTYPE:
        raise BadFrame(f"a packet of {packet.codec} with {packet.meta}; expected {NAME} with {meta}")
    data = as_bytes(packet.payload)
    whole, rest = divmod(meta.elements, BLOCK)
    widths = data[: whole + 1]
    if len(widths) != whole + 1 or widths.max() > MAX_WIDTH:
        raise BadFrame(f"{NAME}: {len(data)} bytes for {meta}, or numbers of more than {MAX_WIDTH} bits")
    parts = list(_parts(widths, rest))
    if len(data) != whole + 1 + sum(size for _, _, size in parts):
        raise BadFrame(f"{NAME}: {len(data)} bytes for {meta} in these widths")
    found = np.empty(meta.elements, np.int64)
    blocks, at = found[: whole * BLOCK].reshape(whole, BLOCK), whole + 1
    for chosen, width, size in parts:
        count = rest if chosen is None else int(chosen.sum()) * BLOCK
        zigzag = unpack(data[at : at + size], count, width)
        numbers = (zigzag >> 1) ^ -(zigzag & 1)
        if chosen is None:
            found[whole * BLOCK :] = numbers
        else:
            blocks[chosen] = numbers.reshape(-1, BLOCK)
        at += size
    return found.reshape(meta.shape)


def _parts(widths: Bytes, rest: int) -> Iterator[tuple[NDArray[Any] | None, int, int]]:
    """(which blocks, width, bytes) of each part of a payload; None: the numbers after the last block."""
    for width in np.unique(widths[:-1]):
        chosen = widths[:-1] == width
        yield chosen, int(width), packed_bytes(int(chosen.sum()) * BLOCK, int(width))
    yield None, int(widths[-1]), packed_bytes(rest, int(widths[-1]))
