"""Vector: float32 elements in a row, all of them or some; what exchanges add up and send.

A sparse vector holds positions (ascending, unique) and the values there, and is zero elsewhere. On the wire a
dense vector is a codec's packet, and a sparse one a packet ``sparse``: positions (``indices.py``), then
values as float32; so positions beyond 2**24 stay exact, which they are not in a buffer of floats.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors.base import Compressor, Packet, check_packet
from compressors.indices import decode_positions, encode_positions, max_bytes
from compressors.none import Uncompressed
from compressors.selection import bits_of, largest
from compressors.sparse import Scattered

SPARSE = "sparse"
_COUNT = struct.Struct("<Q")


@dataclass(frozen=True)
class Vector:
    """``size`` elements; ``values`` float32 on the CPU, [size] or, with ``positions`` (int64), [kept]."""

    size: int
    values: Tensor
    positions: Tensor | None = None

    @property
    def sparse(self) -> bool:
        return self.positions is not None

    def dense(self) -> Tensor:
        """All elements, [size]. A dense vector's are its own memory: do not write to them."""
        if self.positions is None:
            return self.values
        whole = torch.zeros(self.size)
        whole[self.positions] = self.values
        return whole

    def part(self, start: int, stop: int) -> Vector:
        """Elements [start, stop) as a vector of their own; a dense one's share memory."""
        if self.positions is None:
            return Vector(stop - start, self.values[start:stop])
        borders = torch.tensor([start, stop])
        low, high = (int(at) for at in torch.searchsorted(self.positions, borders))
        return Vector(stop - start, self.values[low:high], self.positions[low:high] - start)


def dense(values: Tensor) -> Vector:
    """Vector of all elements of ``values`` [n], as float32 on the CPU."""
    return Vector(values.numel(), values.detach().reshape(-1).to("cpu", torch.float32))


def empty_vector(size: int) -> Vector:
    """Sparse vector of zeros."""
    return Vector(size, torch.empty(0), torch.empty(0, dtype=torch.int64))


def total(parts: Sequence[Vector]) -> Vector:
    """Sum of at least one vector, added element by element in the given order; sparse if all of them are."""
    if len({part.size for part in parts}) != 1:
        raise ValueError(f"vectors of {sorted({part.size for part in parts})} elements cannot be added")
    if len(parts) == 1:
        return parts[0]
    size = parts[0].size
    held = [part.positions for part in parts if part.positions is not None]
    if len(held) == len(parts):
        union = torch.unique(torch.cat(held))  # ascending
        values = torch.zeros(len(union))
        for part in parts:
            values[torch.searchsorted(union, _positions(part))] += part.values  # unique: no order among them
        return Vector(size, values, union)
    first = parts[0]
    values = first.dense() if first.sparse else first.values.clone()
    for part in parts[1:]:
        if part.positions is None:
            values += part.values
        else:
            values[part.positions] += part.values
    return Vector(size, values)


def chosen(vector: Vector, positions: Tensor) -> Vector:
    """The elements of a dense vector at ``positions`` (int64, ascending, unique)."""
    return Vector(vector.size, vector.values[positions], positions)


def strongest(vector: Vector, kept: int) -> tuple[Vector, Vector]:
    """(the ``kept`` elements of the largest magnitude, the rest), both sparse; of equal ones the first."""
    here = _positions(vector)
    chosen_here = largest(bits_of(vector.values), kept) if kept else np.empty(0, np.int64)
    stays = torch.from_numpy(chosen_here)
    rest = torch.ones(len(here), dtype=torch.bool)
    rest[stays] = False
    return (
        Vector(vector.size, vector.values[stays], here[stays]),
        Vector(vector.size, vector.values[rest], here[rest]),
    )


def joined(size: int, parts: Sequence[tuple[int, Vector]]) -> Vector:
    """Vector of ``size`` with each part's elements from its start on, zero elsewhere; parts do not overlap
    and come in ascending order. Sparse if all are."""
    if all(part.sparse for _, part in parts):
        if not parts:
            return empty_vector(size)
        return Vector(
            size,
            torch.cat([part.values for _, part in parts]),
            torch.cat([_positions(part) + start for start, part in parts]),
        )
    values = torch.zeros(size)
    for start, part in parts:
        values[start : start + part.size] = part.dense()
    return Vector(size, values)


def pack(vector: Vector, codec: Compressor, *, seed: int = 0) -> Packet:
    """Packet of a vector: a sparse one's positions and values, a dense one's through ``codec``, which must
    keep no state from packet to packet. An uncompressed payload shares the vector's memory."""
    if vector.positions is None:
        packet, _ = codec.compress(vector.values, codec.init(_meta(vector.size)), seed=seed)
        return packet
    positions = encode_positions(vector.positions.numpy(), vector.size)
    values = vector.values.numpy().astype("<f4", copy=False).tobytes()
    return Packet(SPARSE, _meta(vector.size), positions + values, _COUNT.pack(len(vector.values)))


def unpack(packet: Packet, size: int, codec: Compressor) -> Vector:
    """Vector of ``size`` elements in a received packet. BadFrame for anything that ``pack`` does not make."""
    meta = _meta(size)
    if packet.codec != SPARSE:
        check_packet(packet, codec.name, meta, codec.max_payload_bytes(meta))
        if isinstance(codec, Scattered) and not packet.zero:
            positions, values = codec.kept_of(packet)
            return Vector(size, torch.from_numpy(values.copy()), torch.from_numpy(positions))
        return Vector(size, codec.decompress(packet).reshape(-1))
    if len(packet.params) != _COUNT.size or packet.zero:
        raise BadFrame(f"sparse packet with {len(packet.params)} bytes of parameters")
    (kept,) = _COUNT.unpack(packet.params)
    if kept > size:
        raise BadFrame(f"sparse packet of {kept} among {size} elements")
    check_packet(packet, SPARSE, meta, max_bytes(kept, size) + 4 * kept)
    payload = memoryview(packet.payload)
    at = len(payload) - 4 * kept
    if at < 0:
        raise BadFrame(f"sparse packet of {len(payload)} bytes for {kept} values")
    found = decode_positions(payload[:at], kept, size)
    values = np.frombuffer(payload[at:], "<f4").astype(np.float32)
    return Vector(size, torch.from_numpy(values), torch.from_numpy(found))


UNCOMPRESSED = Uncompressed()


def _meta(size: int) -> TensorMeta:
    return TensorMeta((size,), "float32")


def _positions(vector: Vector) -> Tensor:
    return torch.arange(vector.size) if vector.positions is None else vector.positions
