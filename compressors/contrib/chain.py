"""A chain: codecs one behind the other, each packing what the one before left.

    tensor -> splits: (side bytes, fewer values) -> codec of the values -> byte coders of every part

    Chain([KeepLargest(100)], make_compressor("fp16"), [Zstd()])
    Chain([KeepLargest(20)], make_compressor("int8_block"))
    Chain([], make_compressor("bf16"), [Zstd()])

The first is ``make_compressor("chain", 100)``.

- A *split* takes some elements out of a tensor: where they were becomes bytes, the rest a shorter tensor.
- The *codec* is any of this package whose other end needs no state; it sees the values as a tensor.
- *Byte coders* pack each part's bytes: the sides, the codec's params, its payload.

Payload: each part behind its length. What a part may be follows from the tensor's meta at both ends,
so its size is bounded before it is unpacked. What is not finite is selected first and kept by the
value codec as it keeps such values. Source: papers/compression.md 0 (index and value codecs are
independent of the selector), 1.3.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

import torch
import zstandard
from torch import Tensor

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors import make_compressor
from compressors.base import MAX_HEADER_BYTES, Buffer, Compressor, Packet, State, meta_of
from compressors.catalogue import CODECS
from compressors.contrib.sparse.sizes import chain_kept
from compressors.indices import decode_positions, encode_positions, max_read_bytes
from compressors.packing import flat, require_floats, zeros
from compressors.selection import bits_of, largest_in_rows
from compressors.sparse_sizes import rows_of

_LENGTH = struct.Struct("<I")
_MAX_PARTS = 16


class Split(Protocol):
    """Takes elements out of a tensor; ``values`` have its dtype and one dimension."""

    def split(self, tensor: Tensor) -> tuple[bytes, Tensor]:
        """Side bytes and the values that stay."""

    def join(self, side: Buffer, values: Tensor, meta: TensorMeta) -> Tensor:
        """The tensor of ``meta``. Raises BadFrame."""

    def kept(self, meta: TensorMeta) -> TensorMeta:
        """Return the meta of the kept values of a tensor of ``meta``: the same at both ends."""

    def max_side_bytes(self, meta: TensorMeta) -> int:
        """No side is longer."""


class ByteCoder(Protocol):
    """Lossless coder of bytes; its output is at most one byte longer than its input."""

    def encode(self, data: bytes) -> bytes: ...

    def decode(self, data: bytes, limit_bytes: int) -> bytes:
        """Raises BadFrame for what is not its own, or longer than the limit."""


class KeepLargest:
    """The largest of each row (``sparse_sizes.rows_of``).

    ``ratio``: of dense bytes to those of the chain with values of 16 bits and zstd.
    """

    def __init__(self, ratio: float = 100.0) -> None:
        """Raises ValueError for a ratio below 1."""
        if not ratio >= 1.0:
            raise ValueError(f"ratio {ratio}; ratio >= 1")
        self.ratio = ratio

    def split(self, tensor: Tensor) -> tuple[bytes, Tensor]:
        meta = meta_of(tensor)
        rows, width = rows_of(meta)
        positions = largest_in_rows(bits_of(tensor), width, chain_kept(meta, self.ratio) // rows)
        return encode_positions(positions, meta.elements), flat(tensor)[torch.from_numpy(positions)]

    def join(self, side: Buffer, values: Tensor, meta: TensorMeta) -> Tensor:
        positions = decode_positions(side, values.numel(), meta.elements)
        tensor = zeros(meta)
        tensor.view(-1)[torch.from_numpy(positions)] = values
        return tensor

    def kept(self, meta: TensorMeta) -> TensorMeta:
        return TensorMeta((chain_kept(meta, self.ratio),), meta.dtype)

    def max_side_bytes(self, meta: TensorMeta) -> int:
        return max_read_bytes(chain_kept(meta, self.ratio), meta.elements)


class Zstd:
    """zstd, or the bytes themselves where it would not make them fewer; one byte says which."""

    def __init__(self, level: int = 1) -> None:
        self.level = level

    def encode(self, data: bytes) -> bytes:
        packed = zstandard.ZstdCompressor(level=self.level).compress(data)
        return b"\x01" + packed if len(packed) < len(data) else b"\x00" + data

    def decode(self, data: bytes, limit_bytes: int) -> bytes:
        if data[:1] == b"\x00" and len(data) - 1 <= limit_bytes:
            return data[1:]
        try:
            # The frame's own claim decides what zstandard allocates: look at it first.
            if data[:1] != b"\x01" or zstandard.frame_content_size(data[1:]) not in range(limit_bytes + 1):
                raise BadFrame(f"{len(data)} bytes are no zstd frame of at most {limit_bytes}")
            return zstandard.ZstdDecompressor().decompress(data[1:], allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise BadFrame(f"zstd frame of {len(data)} bytes: {error}") from None


class Chain(Compressor):
    """The composition above; what ``ratio`` gives by default is top-k, fp16, zstd."""

    name = "chain"

    def __init__(
        self,
        splits: Sequence[Split],
        codec: Compressor,
        coders: Sequence[ByteCoder] = (),
    ) -> None:
        """Raises ValueError for a codec whose other end needs its state, or a chain too long."""
        facts = CODECS.get(codec.name)
        if (facts is not None and facts.stateful) or len(splits) > _MAX_PARTS - 2:
            raise ValueError(f"a chain of {len(splits)} splits and {codec.name!r}; a codec without state")
        self.splits, self.codec, self.coders = tuple(splits), codec, tuple(coders)

    def compress(self, tensor: Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        meta = meta_of(tensor)
        require_floats(self.name, meta)
        parts, values = [], tensor
        for split in self.splits:
            side, values = split.split(values)
            parts.append(side)
        packet, _ = self.codec.compress(values, seed=seed)
        parts += [packet.params, bytes(packet.payload)]
        return Packet(self.name, meta, b"".join(self._packed(part) for part in parts)), None

    def decompress(self, packet: Packet, state: State = None) -> Tensor:
        if packet.zero:
            return zeros(packet.meta)
        metas = self._metas(packet.meta)
        *sides, params, payload = self._parts(packet.payload, self._limits(metas))
        values = self.codec.decompress(Packet(self.codec.name, metas[-1], payload, params))
        for split, side, meta in reversed(list(zip(self.splits, sides, metas[:-1], strict=True))):
            values = split.join(side, values, meta)
        return values

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        return sum(_LENGTH.size + limit + len(self.coders) for limit in self._limits(self._metas(meta)))

    def _metas(self, meta: TensorMeta) -> list[TensorMeta]:
        """Return the metas of the tensor before each split, and of the values behind the last."""
        metas = [meta]
        for split in self.splits:
            metas.append(split.kept(metas[-1]))
        return metas

    def _limits(self, metas: list[TensorMeta]) -> list[int]:
        """Bytes of each part before the byte coders, at most."""
        sides = [split.max_side_bytes(meta) for split, meta in zip(self.splits, metas[:-1], strict=True)]
        return [*sides, MAX_HEADER_BYTES, self.codec.max_payload_bytes(metas[-1])]

    def _packed(self, part: bytes) -> bytes:
        for coder in self.coders:
            part = coder.encode(part)
        return _LENGTH.pack(len(part)) + part

    def _parts(self, payload: Buffer, limits: list[int]) -> list[bytes]:
        """As many parts as there are limits, each decoded. Raises BadFrame."""
        view, parts = memoryview(payload), []
        for limit in limits:
            length = _LENGTH.unpack_from(view)[0] if len(view) >= _LENGTH.size else 2**32
            if length > min(len(view) - _LENGTH.size, limit + len(self.coders)):
                raise BadFrame(f"a part of {length} bytes in a chain; {len(view)} are left, {limit} allowed")
            part = bytes(view[_LENGTH.size : _LENGTH.size + length])
            for before, coder in reversed(list(enumerate(self.coders))):
                part = coder.decode(part, limit + before)
            parts.append(part)
            view = view[_LENGTH.size + length :]
        if len(view):
            raise BadFrame(f"{len(view)} bytes behind the last part of a chain")
        return parts


class DefaultChain(Chain):
    """Top-k of each row, 16-bit values, zstd."""

    def __init__(self, ratio: float = 100.0) -> None:
        super().__init__([KeepLargest(ratio)], make_compressor("fp16"), [Zstd()])
        self.ratio = ratio
