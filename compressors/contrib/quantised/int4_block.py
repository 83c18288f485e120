"""Four bits a value, linear within blocks of 64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from compressors.blocks import BlockScaler, multiply
from compressors.contrib.quantised.planes import Planes
from compressors.fixed_rate import FixedRate
from compressors.packing import Bytes, Floats, read_floats, write_floats
from compressors.rates import CHUNK, INT4_BLOCK, int4_bytes

if TYPE_CHECKING:
    import torch

BLOCK = INT4_BLOCK
STEPS = 7
_NIBBLES = Planes(16)
_MIDDLE = 8  # the code of 0


class Int4Block(FixedRate):
    """``q = round(x / s)``, ``s = m / 7`` cut to a bfloat16, m the largest magnitude of 64
    row-major neighbours; two q a byte (``planes.py``).

    Error of an element: at most ``m / 14``; blocks with m below 2**-120 decode as
    zeros. A block with an infinity or NaN decodes as NaN. Bytes: 1/2 an element, 2 a block.
    Source: papers/compression.md section 4, int8 blockwise linear, at 4 bits.
    """

    name = "int4_block"

    def length(self, elements: int) -> int:
        return int4_bytes(elements)

    def encode(self, tensor: torch.Tensor, payload: Bytes, seed: int) -> None:
        blocks = -(-tensor.numel() // BLOCK)
        all_scales, packed = payload[: 2 * blocks].view(np.uint16), payload[2 * blocks :]
        scaler = BlockScaler(BLOCK, STEPS)
        codes = np.empty(min(CHUNK, tensor.numel()), np.uint8)
        for part, chunk in read_floats(tensor):
            first = part.start // BLOCK
            upper = _upper_half(scaler.scales(chunk))
            all_scales[first : first + upper.size] = upper
            scaled = scaler.scaled(chunk, _widen(upper))
            # Positive throughout, so that the cast's cut is a floor.
            np.add(scaled, np.float32(_MIDDLE + 0.5), out=scaled)
            some = codes[: chunk.size]
            np.copyto(some, scaled, casting="unsafe")
            _NIBBLES.pack(some, packed[_NIBBLES.part(part)])

    def decode(self, payload: Bytes, target: torch.Tensor) -> None:
        blocks = -(-target.numel() // BLOCK)
        scales, packed = _widen(payload[: 2 * blocks].view(np.uint16)), payload[2 * blocks :]
        codes = np.empty(min(CHUNK, target.numel()), np.uint8)
        for part, values in write_floats(target):
            some = codes[: values.size]
            _NIBBLES.unpack(packed[_NIBBLES.part(part)], some)
            np.subtract(some, np.uint8(_MIDDLE), out=some)
            np.copyto(values, some.view(np.int8))
            multiply(values, scales[part.start // BLOCK :], BLOCK, values)


def _upper_half(scales: Floats) -> np.ndarray:
    """Bits of the next bfloat16 towards 0. A value over its scale then reaches 7.06, which still
    rounds to 7, and no decoded value exceeds the block's largest. NaN stays NaN."""
    upper: np.ndarray = (scales.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return upper


def _widen(upper: np.ndarray) -> Floats:
    wide: Floats = (upper.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide
