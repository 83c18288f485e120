"""Shared part of the codecs that keep some elements: a packet of positions and values, and the values alone.

Payload: the positions (``indices.py``), then the values (``values.py``). Params: form, value codec,
how many were kept, in how many groups (each with a scale, for values of one and two bits).
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors.base import Compressor, Packet, State, Support, meta_of
from compressors.bits import Ints
from compressors.indices import decode_positions, encode_positions
from compressors.packing import TORCH_DTYPES, Floats, require_floats, zeros
from compressors.selection import Keys, all_finite, bits_of, scatter, values_at
from compressors.sparse_sizes import VALUE_CODECS, max_sparse_bytes, value_bytes
from compressors.values import decode_values, encode_values

_PARAMS = struct.Struct("<BBQQ")  # form, value codec, kept, groups of values
_WITH_POSITIONS, _VALUES_ONLY, _NOT_FINITE = range(3)


@dataclass(frozen=True, slots=True)
class Keep:
    """Most elements that a codec keeps of a tensor, over all its groups."""

    groups: int
    most: int


@dataclass(frozen=True, slots=True)
class _Form:
    """A packet's params, checked against its meta."""

    form: int
    values: str
    kept: int
    groups: int

    def pack(self) -> bytes:
        return _PARAMS.pack(self.form, VALUE_CODECS.index(self.values), self.kept, self.groups)

    @classmethod
    def of(cls, packet: Packet) -> _Form:
        if len(packet.params) != _PARAMS.size:
            raise BadFrame(f"sparse packet with {len(packet.params)} bytes of parameters")
        form, values, kept, groups = _PARAMS.unpack(packet.params)
        if form > _NOT_FINITE or values >= len(VALUE_CODECS) or kept > packet.meta.elements:
            raise BadFrame(f"sparse packet of form {form}, values {values}, {kept} of {packet.meta}")
        if groups > max(1, kept) or (groups and kept % groups) or (kept and not groups):
            raise BadFrame(f"{kept} values in {groups} groups")
        return cls(form, VALUE_CODECS[values], kept, groups)


class Scattered(Compressor, ABC):
    """A codec whose packets hold some elements of a tensor, which is zero elsewhere."""

    @abstractmethod
    def kept_of(self, packet: Packet) -> tuple[Ints, Floats]:
        """Positions (ascending, unique) and values, as float32, of a packet that is not marked zero.

        One value at least is not finite where the tensor was not. Raises BadFrame.
        """

    def decompress(self, packet: Packet, state: State = None) -> torch.Tensor:
        if packet.zero:
            return zeros(packet.meta)
        return scatter(*self.kept_of(packet), packet.meta)


class Sparse(Scattered):
    """A SparseCompressor, but for its selection."""

    name: str
    values: str  # of VALUE_CODECS

    @abstractmethod
    def keep(self, meta: TensorMeta) -> Keep:
        """Return how much is kept of a tensor of ``meta``."""

    @abstractmethod
    def select(self, bits: Keys, meta: TensorMeta, state: State) -> tuple[Ints, State]:
        """Ascending positions of at most ``keep(meta).most`` elements, and the next state."""

    # ---------------------------------------------------------------- with positions

    def compress(self, tensor: torch.Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        """Raises UsageError for a tensor that is not floating (``packing.require_floats``)."""
        meta = meta_of(tensor)
        require_floats(self.name, meta)
        bits = bits_of(tensor)
        positions, state = self.select(bits, meta, state)
        form = _Form(_WITH_POSITIONS, self.values, len(positions), self._groups(meta, len(positions)))
        payload = self._encoded(bits, positions, meta, form.groups)
        return Packet(
            self.name, meta, encode_positions(positions, meta.elements) + payload, form.pack()
        ), state

    def kept_of(self, packet: Packet) -> tuple[Ints, Floats]:
        form, positions, at = self._read(packet)
        data = memoryview(packet.payload)[at:]
        return positions, decode_values(data, form.kept, form.groups, form.values, packet.meta.dtype)

    def support(self, packet: Packet) -> Support:
        """No positions for a packet marked zero."""
        positions = np.empty(0, np.int64) if packet.zero else self._read(packet)[1]
        return Support(packet.meta, torch.from_numpy(positions))

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        keep = self.keep(meta)
        return max_sparse_bytes(keep.most, meta.elements, keep.groups, self.values)

    # ---------------------------------------------------------------- on another tensor's positions

    def compress_on(self, tensor: torch.Tensor, support: Support, *, seed: int = 0) -> Packet:
        """A tensor that is not finite outside ``support`` travels as a mark and decodes to NaN."""
        meta = meta_of(tensor)
        require_floats(self.name, meta)
        _same_shape(meta, support)
        bits, positions = bits_of(tensor), support.positions.numpy()
        groups = self._groups(meta, len(positions))
        if not all_finite(tensor) and np.isfinite(values_at(bits, positions, meta.dtype)).all():
            return Packet(self.name, meta, params=_Form(_NOT_FINITE, self.values, 0, 0).pack())
        form = _Form(_VALUES_ONLY, self.values, len(positions), groups)
        return Packet(self.name, meta, self._encoded(bits, positions, meta, groups), form.pack())

    def decompress_on(self, packet: Packet, support: Support) -> torch.Tensor:
        meta = packet.meta
        _same_shape(meta, support)
        if packet.zero:
            return zeros(meta)
        form = _Form.of(packet)
        if form.form == _NOT_FINITE and not form.kept and not len(packet.payload):
            return torch.full(meta.shape, torch.nan, dtype=TORCH_DTYPES[meta.dtype])
        if form.form != _VALUES_ONLY or form.kept != len(support.positions):
            raise BadFrame(f"{form} for {len(support.positions)} agreed positions")
        values = decode_values(packet.payload, form.kept, form.groups, form.values, meta.dtype)
        return scatter(support.positions.numpy(), values, meta)

    def max_payload_bytes_on(self, meta: TensorMeta) -> int:
        keep = self.keep(meta)
        return value_bytes(keep.most, keep.groups, self.values)

    # ---------------------------------------------------------------- inside

    def _groups(self, meta: TensorMeta, kept: int) -> int:
        groups = self.keep(meta).groups
        return groups if kept and kept % groups == 0 else min(1, kept)

    def _encoded(self, bits: Keys, positions: Ints, meta: TensorMeta, groups: int) -> bytes:
        values = values_at(bits, positions, meta.dtype)
        return encode_values(values, groups, self.values, half=meta.dtype == "float16")

    def _read(self, packet: Packet) -> tuple[_Form, Ints, int]:
        """Params, positions, and where in the payload the values begin."""
        form = _Form.of(packet)
        at = len(packet.payload) - value_bytes(form.kept, form.groups, form.values)
        if form.form != _WITH_POSITIONS or at < 0:
            raise BadFrame(f"{form} in {len(packet.payload)} bytes is not a packet with positions")
        elements = packet.meta.elements
        return form, decode_positions(memoryview(packet.payload)[:at], form.kept, elements), at


def _same_shape(meta: TensorMeta, support: Support) -> None:
    if meta.shape != support.meta.shape:
        raise BadFrame(f"positions in a tensor of {support.meta.shape}, values of {meta.shape}")
