"""Random-k: elements drawn by a seed that both ends know; no positions travel.

    v'[i] = v[i] * d/k for i in S(seed), 0 elsewhere (``unbiased``), or v[i] itself (for error feedback)

Every element is in S with probability p = k/d, independently: the gaps between chosen positions are
geometric, drawn from a counter generator, 25 times faster than a mask (papers/compression.md 1.1).
The logarithm is our own few IEEE operations: a library's differs in its last bit from machine to
machine, and one gap drawn differently would shift all positions behind it.

Linear: packets of one seed add up element by element, so secure aggregation may take them; values
therefore keep the tensor's own dtype. E[v'] = v and E||v' - v||**2 = (d/k - 1) ||v||**2 in the unbiased
form, (1 - k/d) ||v||**2 in the other. Source: papers/compression.md 3 (random-k), 2.2 (SAPS-PSGD's mask).
"""

from __future__ import annotations

import math
import struct

import numpy as np
import numpy.typing as npt
import torch

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors.base import Packet, State, Support, meta_of
from compressors.bits import Ints
from compressors.packing import TORCH_DTYPES, Floats, require_floats, zeros
from compressors.selection import all_finite, as_floats, bits_of, scatter
from compressors.sparse import Scattered
from compressors.sparse_sizes import random_k_most, random_k_of

_PARAMS = struct.Struct("<BQQ")  # form, seed, kept
_SEEDED, _VALUES_ONLY, _NOT_FINITE = range(3)
_BLOCK = 1 << 15  # gaps drawn at a time


def _log(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """ln x for 2**-60 < x < 2, to 1e-11, by operations that every machine rounds alike."""
    mantissa, exponent = np.frexp(x)
    s = (mantissa - 0.75) / (mantissa + 0.75)  # ln(m / 0.75) = 2 artanh(s), |s| <= 0.2
    square = s * s
    series = np.full_like(s, 1.0 / 15)
    for term in (13, 11, 9, 7, 5, 3, 1):
        series *= square
        series += 1.0 / term
    series *= s
    series *= 2.0
    series += -0.2876820724517809  # ln 0.75
    series += exponent * 0.6931471805599453  # ln 2
    return series


def draw_positions(total: int, kept: int, seed: int) -> Ints:
    """Ascending positions below ``total``, each with probability kept/total; the same on any machine.

    At most ``sparse_sizes.random_k_most(kept, total)``: a draw of more (8 standard deviations) is
    repeated.
    """
    if kept >= total:
        return np.arange(total)
    rate = float(_log(np.array([1.0 - kept / total]))[0])
    generator = np.random.Philox(key=seed % 2**64)
    block = min(_BLOCK, kept + 4 * math.isqrt(kept) + 16)
    while True:
        found, reached, count = [], -1, 0
        while reached < total:
            positions = _gaps(generator, block, rate, total)
            np.cumsum(positions, out=positions)
            positions += reached
            found.append(positions)
            reached, count = int(positions[-1]), count + len(positions)
        drawn = np.concatenate(found)
        drawn = drawn[: int(np.searchsorted(drawn, total))]
        if len(drawn) <= random_k_most(kept, total):
            return drawn


def _gaps(generator: np.random.Philox, count: int, rate: float, total: int) -> Ints:
    """1 + floor(ln u / ln(1 - p)), u uniform in (0, 1]; none above ``total`` + 1."""
    raw = generator.random_raw(count)
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53
    gaps = _log(uniform) / rate
    # u = 1 may come out a hair below 0 by the series' error.
    return np.clip(gaps, 0.0, float(total)).astype(np.int64) + 1


class RandomK(Scattered):
    """The codec above. ``ratio``: dense bytes / payload bytes; ``density``: k/d instead."""

    name = "random_k"

    def __init__(self, ratio: float = 100.0, *, density: float | None = None, unbiased: bool = True) -> None:
        """Raises ValueError for settings outside their range."""
        if not ratio >= 1.0 or (density is not None and not 0.0 < density <= 1.0):
            raise ValueError(f"random-k of ratio {ratio}, density {density}; ratio >= 1, 0 < density <= 1")
        self.ratio = ratio if density is None else 1.0 / density
        self.unbiased = unbiased

    def compress(self, tensor: torch.Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        """A tensor that is not finite travels as a mark and decodes to NaN: no draw may hide it."""
        meta = meta_of(tensor)
        require_floats(self.name, meta)
        if not all_finite(tensor):
            return self._not_finite(meta), None
        drawn = draw_positions(meta.elements, random_k_of(meta, self.ratio), seed)
        return self._packet(tensor, drawn, _SEEDED, seed % 2**64), None

    def kept_of(self, packet: Packet) -> tuple[Ints, Floats]:
        """Every element, as NaN, where a packet stands for that."""
        if self._read(packet)[0] == _NOT_FINITE:
            elements = packet.meta.elements
            return np.arange(elements), np.full(elements, np.nan, np.float32)
        values = self._values(packet)
        if self.unbiased and len(values):
            with np.errstate(over="ignore", invalid="ignore"):
                values = values * np.float32(packet.meta.elements / random_k_of(packet.meta, self.ratio))
        return self._positions(packet), values

    def support(self, packet: Packet) -> Support:
        """Not of the whole tensor where a packet stands for NaN: those have no positions."""
        empty = packet.zero or self._read(packet)[0] == _NOT_FINITE
        positions = np.empty(0, np.int64) if empty else self._positions(packet)
        return Support(packet.meta, torch.from_numpy(positions))

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        size = TORCH_DTYPES[meta.dtype].itemsize
        return size * random_k_most(random_k_of(meta, self.ratio), meta.elements)

    def compress_on(self, tensor: torch.Tensor, support: Support, *, seed: int = 0) -> Packet:
        """The values themselves, not times d/k: the gradient of what was masked, not an estimate."""
        meta = meta_of(tensor)
        require_floats(self.name, meta)
        if not all_finite(tensor):
            return self._not_finite(meta)
        return self._packet(tensor, support.positions.numpy(), _VALUES_ONLY, 0)

    def decompress_on(self, packet: Packet, support: Support) -> torch.Tensor:
        if packet.zero:
            return zeros(packet.meta)
        form, _, kept = self._read(packet)
        if form == _NOT_FINITE:
            return _nans(packet.meta)
        if form != _VALUES_ONLY or kept != len(support.positions) or packet.meta.shape != support.meta.shape:
            raise BadFrame(f"{kept} values of {packet.meta} for {len(support.positions)} agreed positions")
        return scatter(support.positions.numpy(), self._values(packet), packet.meta)

    def max_payload_bytes_on(self, meta: TensorMeta) -> int:
        return self.max_payload_bytes(meta)

    # ---------------------------------------------------------------- inside

    def _packet(self, tensor: torch.Tensor, positions: Ints, form: int, seed: int) -> Packet:
        payload = bits_of(tensor).take(positions).tobytes()
        return Packet(self.name, meta_of(tensor), payload, _PARAMS.pack(form, seed, len(positions)))

    def _not_finite(self, meta: TensorMeta) -> Packet:
        return Packet(self.name, meta, params=_PARAMS.pack(_NOT_FINITE, 0, 0))

    def _read(self, packet: Packet) -> tuple[int, int, int]:
        """Form, seed and count. Raises BadFrame unless the payload holds exactly ``count`` values."""
        if len(packet.params) != _PARAMS.size or packet.meta.dtype not in _SIZES:
            raise BadFrame(f"random-k packet of {packet.meta} with {len(packet.params)} bytes of parameters")
        form, seed, kept = _PARAMS.unpack(packet.params)
        if form > _NOT_FINITE or len(packet.payload) != kept * _SIZES[packet.meta.dtype]:
            raise BadFrame(
                f"random-k packet of form {form} with {len(packet.payload)} bytes for {kept} values"
            )
        if kept > (0 if form == _NOT_FINITE else packet.meta.elements):
            raise BadFrame(f"{kept} values of {packet.meta} in a packet of form {form}")
        return form, seed, kept

    def _positions(self, packet: Packet) -> Ints:
        form, seed, kept = self._read(packet)
        if form != _SEEDED or kept > random_k_most(
            random_k_of(packet.meta, self.ratio), packet.meta.elements
        ):
            raise BadFrame(f"random-k packet of form {form}, {kept} values")
        positions = draw_positions(packet.meta.elements, random_k_of(packet.meta, self.ratio), seed)
        if len(positions) != kept:
            raise BadFrame(f"{kept} values where the seed draws {len(positions)} positions")
        return positions

    def _values(self, packet: Packet) -> Floats:
        bits = np.frombuffer(packet.payload, "<i4" if _SIZES[packet.meta.dtype] == 4 else "<i2")
        return as_floats(bits.copy(), packet.meta.dtype)


_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _nans(meta: TensorMeta) -> torch.Tensor:
    return torch.full(meta.shape, math.nan, dtype=TORCH_DTYPES[meta.dtype])
