"""Eight bits a value, linear within blocks of 256."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from compressors.blocks import BlockScaler, multiply
from compressors.fixed_rate import FixedRate
from compressors.packing import Bytes, read_floats, write_floats
from compressors.rates import INT8_BLOCK, int8_bytes

if TYPE_CHECKING:
    import torch

BLOCK = INT8_BLOCK
STEPS = 127


class Int8Block(FixedRate):
    """``q = round(x / s)``, ``s = m / 127``, m the largest magnitude of 256 row-major neighbours.

    Error of an element: at most ``m / 254`` (a rounding of float32 on top); blocks with m below
    2**-120 decode as zeros. A block with an infinity or NaN decodes as NaN. Bytes: 1 an element,
    4 a block: a float16 scale would save 0.8 % and underflow for gradients below 1e-5.
    Source: papers/compression.md section 4, int8 blockwise linear.
    """

    name = "int8_block"

    def length(self, elements: int) -> int:
        return int8_bytes(elements)

    def encode(self, tensor: torch.Tensor, payload: Bytes, seed: int) -> None:
        blocks = -(-tensor.numel() // BLOCK)
        all_scales, codes = payload[: 4 * blocks].view(np.float32), payload[4 * blocks :].view(np.int8)
        scaler = BlockScaler(BLOCK, STEPS)
        for part, chunk in read_floats(tensor):
            first = part.start // BLOCK
            scales = scaler.scales(chunk)
            all_scales[first : first + scales.size] = scales
            scaled = scaler.scaled(chunk, scales)
            np.rint(scaled, out=scaled)
            np.copyto(codes[part], scaled, casting="unsafe")

    def decode(self, payload: Bytes, target: torch.Tensor) -> None:
        blocks = -(-target.numel() // BLOCK)
        scales, codes = payload[: 4 * blocks].view(np.float32).copy(), payload[4 * blocks :].view(np.int8)
        for part, values in write_floats(target):
            np.copyto(values, codes[part])
            multiply(values, scales[part.start // BLOCK :], BLOCK, values)
