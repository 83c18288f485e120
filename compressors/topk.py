"""Top-k: the largest elements by magnitude, their values in 16 bits, their positions coded by density.

    v'[i] = v[i] (rounded) for i in S, 0 elsewhere;  S = the k largest |v| of each group

``make_compressor("topk", ratio)`` is the pipeline's form: an exact k in each row, no state, the same
packet for the same tensor. For gradients and deltas, under ``error_feedback``, take the whole
tensor as one group and find the threshold cheaply:

- ``exact``: the k largest;
- ``sampled``: the threshold is the exact quantile of every 97th element; the count lands near k;
- ``reused``: the threshold of the last tensor, drawn anew when the count leaves k/2 .. 2k, moved by
  about 1.2 % when it leaves 2k/3 .. 5k/4 (Ok-Topk).

The last two never send more than 5k/4 elements, nor a zero. Bounds: the kept values as in
``values.py``; ||v - v'||**2 <= (1 - k/d) ||v||**2 for the exact selection, by group. Sources: AdaTopK
(papers/decentralized.md 1.7); papers/compression.md 3 (TopK-SGD, arXiv 1911.08772; Ok-Topk,
arXiv 2201.07598).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors.base import TORCH_DTYPES, Packet, State, Support, meta_of
from compressors.bits import Ints
from compressors.indices import decode_positions, encode_positions
from compressors.packing import require_floats, zeros
from compressors.selection import (
    Keys,
    above,
    all_finite,
    bits_of,
    largest,
    largest_in_rows,
    magnitude,
    sampled_threshold,
    scatter,
    values_at,
)
from compressors.sparse_sizes import (
    VALUE_CODECS,
    kept_of_row,
    max_sparse_bytes,
    rows_of,
    sparse_bytes,
    value_bytes,
)
from compressors.values import decode_values, encode_values

Selection = Literal["exact", "sampled", "reused"]
Values = Literal["fp32", "fp16", "2bit", "1bit"]

_PARAMS = struct.Struct("<BBQQ")  # form, value codec, kept, groups of values
_WITH_POSITIONS, _VALUES_ONLY, _NOT_FINITE = range(3)
_MANTISSA_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}


@dataclass(frozen=True, slots=True)
class Threshold:
    """State of ``reused``: the key (``selection.magnitude``) that the last kept elements reached."""

    key: int


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
            raise BadFrame(f"top-k packet with {len(packet.params)} bytes of parameters")
        form, values, kept, groups = _PARAMS.unpack(packet.params)
        if form > _NOT_FINITE or values >= len(VALUE_CODECS) or kept > packet.meta.elements:
            raise BadFrame(f"top-k packet of form {form}, values {values}, {kept} of {packet.meta}")
        if groups > max(1, kept) or (groups and kept % groups) or (kept and not groups):
            raise BadFrame(f"{kept} values in {groups} groups")
        return cls(form, VALUE_CODECS[values], kept, groups)


class TopK:
    """The codec above. ``ratio``: dense bytes / payload bytes aimed at; ``density``: k/d instead.

    ``rows``: whether rows select for themselves (``sparse_sizes.rows_of``); True only with ``exact``.
    """

    name = "topk"

    def __init__(
        self,
        ratio: float = 100.0,
        *,
        density: float | None = None,
        selection: Selection = "exact",
        rows: bool = True,
        values: Values = "fp16",
    ) -> None:
        """Raises ValueError for settings outside their range."""
        if not ratio >= 1.0 or (density is not None and not 0.0 < density <= 1.0):
            raise ValueError(f"top-k of ratio {ratio}, density {density}; ratio >= 1, 0 < density <= 1")
        if rows and selection != "exact":
            raise ValueError(f"rows select exactly; give rows=False for selection={selection!r}")
        self.ratio, self.density = ratio, density
        self.selection, self.rows, self.values = selection, rows, values

    def init(self, meta: TensorMeta) -> State:
        return None

    # ---------------------------------------------------------------- with positions

    def compress(self, tensor: torch.Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        """Raises UsageError for a tensor that is not floating (``packing.require_floats``)."""
        meta = meta_of(tensor)
        require_floats(self.name, meta)
        bits = bits_of(tensor)
        positions, state = self._select(bits, meta, state)
        form = _Form(_WITH_POSITIONS, self.values, len(positions), self._groups(meta, len(positions)))
        payload = self._encoded(bits, positions, meta, form.groups)
        return Packet(
            self.name, meta, encode_positions(positions, meta.elements) + payload, form.pack()
        ), state

    def decompress(self, packet: Packet, state: State = None) -> torch.Tensor:
        if packet.zero:
            return zeros(packet.meta)
        form, positions, at = self._read(packet)
        values = decode_values(memoryview(packet.payload)[at:], form.kept, form.groups, form.values)
        return scatter(positions, values, packet.meta)

    def support(self, packet: Packet) -> Support:
        """No positions for a packet marked zero."""
        positions = np.empty(0, np.int64) if packet.zero else self._read(packet)[1]
        return Support(packet.meta, torch.from_numpy(positions))

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        rows, width, kept = self._sizes(meta)
        if self.selection != "exact":
            kept = min(width, _most(kept))
        return max_sparse_bytes(rows * kept, meta.elements, rows, self.values)

    def payload_bytes(self, meta: TensorMeta) -> float:
        rows, _, kept = self._sizes(meta)
        return sparse_bytes(rows * kept, meta.elements, rows, self.values)

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
        values = decode_values(packet.payload, form.kept, form.groups, form.values)
        return scatter(support.positions.numpy(), values, meta)

    def max_payload_bytes_on(self, meta: TensorMeta) -> int:
        rows, width, kept = self._sizes(meta)
        if self.selection != "exact":
            kept = min(width, _most(kept))
        return value_bytes(rows * kept, rows, self.values)

    def payload_bytes_on(self, meta: TensorMeta) -> float:
        rows, _, kept = self._sizes(meta)
        return float(value_bytes(rows * kept, rows, self.values))

    # ---------------------------------------------------------------- inside

    def _sizes(self, meta: TensorMeta) -> tuple[int, int, int]:
        """(groups, elements of each, kept of each)."""
        rows, width = rows_of(meta) if self.rows else (1, meta.elements)
        if self.density is not None:
            return rows, width, min(width, max(1, round(self.density * width)))
        return rows, width, kept_of_row(rows, width, meta.nbytes / self.ratio, self.values)

    def _groups(self, meta: TensorMeta, kept: int) -> int:
        rows = rows_of(meta)[0] if self.rows else 1
        return rows if kept and kept % rows == 0 else min(1, kept)

    def _select(self, bits: Keys, meta: TensorMeta, state: State) -> tuple[Ints, State]:
        rows, width, kept = self._sizes(meta)
        if self.selection == "exact":
            if kept >= width:
                return np.arange(meta.elements), None
            return largest_in_rows(magnitude(bits).reshape(rows, width), kept), None
        reused = state if self.selection == "reused" else None
        positions, threshold = _by_threshold(bits, kept, reused, _MANTISSA_BITS[meta.dtype])
        return positions, threshold if self.selection == "reused" else None

    def _encoded(self, bits: Keys, positions: Ints, meta: TensorMeta, groups: int) -> bytes:
        values = values_at(bits, positions, meta.dtype)
        return encode_values(values, groups, self.values, half=meta.dtype == "float16")

    def _read(self, packet: Packet) -> tuple[_Form, Ints, int]:
        """Params, positions, and where in the payload the values begin."""
        form = _Form.of(packet)
        at = len(packet.payload) - value_bytes(form.kept, form.groups, form.values)
        if form.form != _WITH_POSITIONS or at < 0:
            raise BadFrame(f"{form} in {len(packet.payload)} bytes is no packet with positions")
        elements = packet.meta.elements
        return form, decode_positions(memoryview(packet.payload)[:at], form.kept, elements), at


def _most(kept: int) -> int:
    """More elements than these are never sent by a threshold."""
    return kept + kept // 4


def _same_shape(meta: TensorMeta, support: Support) -> None:
    if meta.shape != support.meta.shape:
        raise BadFrame(f"positions in a tensor of {support.meta.shape}, values of {meta.shape}")


def _by_threshold(
    bits: Keys, kept: int, state: Threshold | None, mantissa_bits: int
) -> tuple[Ints, Threshold | None]:
    """Positions by the state's threshold or a sampled one, and the threshold for the next tensor."""
    if not len(bits):
        return np.empty(0, np.int64), state
    # Key 1 is the least that is not zero: zeros are never worth their positions.
    key = state.key if state else max(1, sampled_threshold(bits, kept))
    positions = above(bits, key)
    if state and not kept / 2 <= len(positions) <= 2 * kept:
        key = max(1, sampled_threshold(bits, kept))
        positions = above(bits, key)
    if 3 * len(positions) < 2 * kept and key > 1 and not state:
        keys = magnitude(bits)  # a sample that misled: small or oddly ordered tensors
        positions = largest(keys, kept)
        positions = positions[keys[positions] > 0]
        key = max(1, int(keys[positions].min(initial=np.iinfo(bits.dtype).max)))
    count, step = len(positions), round(0.0172 * 2**mantissa_bits)  # log2(1.012)
    if count > _most(kept):
        reached = magnitude(bits.take(positions))
        positions = positions[largest(reached, kept)]
        key += step
    elif 3 * count < 2 * kept:
        key = max(1, key - step)
    return positions, Threshold(key)
