"""Top-k of chunks: a fixed k of every 4,096 elements, values of one or two bits, a scale of eight.

    v'[i] = sign(v[i]) * s * (low or high) for i in the chunk's k largest, 0 elsewhere;  s = mean |v[S]|

The mathematics of SparseLoCo (64 of 4,096, 2 bits: 146x with its 12-bit positions) and of Psyche (8 of
4,096, the sign: 964x with 16-bit positions), at fewer bytes. Positions of all chunks are either one
number a chunk (``ranking.py``) or one Rice stream, whichever is shorter. Measured on the wire, 6,104
chunks: 7.53 bits a position and 212x; 10.13 and 1,350x. For gradients and deltas under error feedback.
Source: papers/peers.md 7.5; DeMo's chunks, papers/decentralized.md 8.6.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors.base import Packet, State, meta_of
from compressors.bits import Ints, as_bytes
from compressors.contrib.sparse.ranking import RankPlan, decode_ranks, encode_ranks, plan_ranks
from compressors.contrib.sparse.sizes import CHUNK, chunk_kept, chunks_of
from compressors.indices import decode_positions, encode_positions, expected_bytes, max_bytes
from compressors.packing import Floats, require_floats
from compressors.selection import bits_of, largest_in_rows, values_at
from compressors.sparse import Scattered
from compressors.sparse_sizes import VALUE_CODECS, value_bytes
from compressors.values import decode_values, encode_values

if TYPE_CHECKING:
    import torch

_PARAMS = struct.Struct("<BIQ")  # value codec, chunk, kept of each


class ChunkTopK(Scattered):
    """The codec above. ``kept`` of every ``chunk``; by default what ``ratio`` allows."""

    name = "chunk_topk"

    def __init__(
        self, ratio: float = 200.0, *, chunk: int = CHUNK, kept: int | None = None, values: str = "2bit"
    ) -> None:
        """Raises ValueError for settings outside their range."""
        if not ratio >= 1.0 or not 1 <= chunk < 2**32 or values not in VALUE_CODECS:
            raise ValueError(f"chunks of {chunk}, ratio {ratio}, values {values!r}")
        if kept is not None and not 1 <= kept <= chunk:
            raise ValueError(f"{kept} of a chunk of {chunk}")
        self.ratio, self.chunk, self.kept, self.values = ratio, chunk, kept, values

    def compress(self, tensor: torch.Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        meta = meta_of(tensor)
        require_floats(self.name, meta)
        chunks, width, kept = self._sizes(meta)
        params = _PARAMS.pack(VALUE_CODECS.index(self.values), self.chunk, kept)
        if not chunks:
            return Packet(self.name, meta, params=params), None
        bits = np.zeros(chunks * width, bits_of(tensor).dtype) if meta.elements % width else bits_of(tensor)
        if meta.elements % width:
            bits[: meta.elements] = bits_of(tensor)  # zeros behind the end: the first are chosen last
        positions = largest_in_rows(bits, width, kept)
        values = values_at(bits, positions, meta.dtype)
        coded = encode_values(values, chunks, self.values, half=meta.dtype == "float16")
        return Packet(self.name, meta, code_positions(positions, chunks, width, kept) + coded, params), None

    def kept_of(self, packet: Packet) -> tuple[Ints, Floats]:
        meta = packet.meta
        chunks, width, kept = self._sizes(meta)
        if packet.params != _PARAMS.pack(VALUE_CODECS.index(self.values), self.chunk, kept):
            raise BadFrame(f"chunk top-k packet of other settings than {kept} of {self.chunk}")
        payload = memoryview(packet.payload)
        at = len(payload) - value_bytes(chunks * kept, chunks, self.values)
        if at < 0:
            raise BadFrame(f"{len(payload)} bytes are too short for {chunks} chunks of {kept} values")
        values = decode_values(payload[at:], chunks * kept, chunks, self.values, meta.dtype)
        positions = _decoded(payload[:at], chunks, width, kept)
        real = int(np.searchsorted(positions, meta.elements))
        return positions[:real], values[:real]

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        chunks, width, kept = self._sizes(meta)
        plan = _ranked(chunks, width, kept)
        total = chunks * width
        positions = plan.bytes_of(chunks) if plan else max_bytes(chunks * kept, total)
        return value_bytes(chunks * kept, chunks, self.values) + positions

    def _sizes(self, meta: TensorMeta) -> tuple[int, int, int]:
        """(chunks, elements of each, kept of each)."""
        chunks, width = chunks_of(meta, self.chunk)
        if self.kept is not None:
            return chunks, width, min(self.kept, width)
        return chunks, width, chunk_kept(meta, self.ratio, self.chunk, self.values)


def _ranked(chunks: int, width: int, kept: int) -> RankPlan | None:
    """The plan where ranks are shorter than a Rice stream's expectation: both ends ask this."""
    plan = plan_ranks(width, kept)
    if plan is None or plan.bytes_of(chunks) > expected_bytes(chunks * kept, chunks * width):
        return None
    return plan


def code_positions(positions: Ints, chunks: int, width: int, kept: int) -> bytes:
    """``kept`` ascending positions of each chunk, those of chunk c from c * width on."""
    plan = _ranked(chunks, width, kept)
    if plan is None:
        return encode_positions(positions, chunks * width)
    local = positions.reshape(chunks, kept) - (np.arange(chunks) * width)[:, None]
    return encode_ranks(local, plan).tobytes()


def _decoded(data: memoryview, chunks: int, width: int, kept: int) -> Ints:
    plan = _ranked(chunks, width, kept)
    if plan is None:
        return decode_positions(data, chunks * kept, chunks * width)
    local = decode_ranks(as_bytes(data), chunks, plan)
    local += (np.arange(chunks) * width)[:, None]
    return local.reshape(-1)
