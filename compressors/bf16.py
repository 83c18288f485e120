"""The upper half of a float32: all of its range, 8 bits of its precision."""

from __future__ import annotations

import numpy as np
import torch

from compressors.fixed_rate import FixedRate
from compressors.packing import Bytes, read_floats, write_floats
from compressors.rates import CHUNK, bf16_bytes

_INFINITE = 0x7F80  # bits of bfloat16's infinity; above it NaN
_SIGN = 0x8000


class BrainFloat(FixedRate):
    """``x -> bfloat16(x)``, to the nearest, ties to even; bfloat16 tensors stay as they are.

    Error of an element: at most ``|x| * 2**-8``, and 2**-134 in the subnormal range. Infinities and
    NaN stay what they are; a finite float32 above bfloat16's largest, 3.3895e38, becomes that.
    Bytes: 2 an element.
    Source: papers/compression.md section 4, fp16 row ("bf16: no overflow, 8-bit mantissa").
    """

    name = "bf16"

    def length(self, elements: int) -> int:
        return bf16_bytes(elements)

    def encode(self, tensor: torch.Tensor, payload: Bytes, seed: int) -> None:
        halves = torch.from_numpy(payload).view(torch.bfloat16)
        bits = payload.view(np.uint16)
        for part, chunk in read_floats(tensor):
            halves[part].copy_(torch.from_numpy(chunk))
            # Positive infinities and NaN lead the signed order, negative ones the unsigned.
            if bits[part].view(np.int16).max() >= _INFINITE or bits[part].max() >= _INFINITE | _SIGN:
                overflown = ((bits[part] & (_SIGN - 1)) == _INFINITE) & np.isfinite(chunk)
                bits[part] -= overflown

    def decode(self, payload: Bytes, target: torch.Tensor) -> None:
        halves = payload.view(np.int16)
        buffer = np.empty(min(CHUNK, target.numel()), np.int16)
        for part, values in write_floats(target):
            some = buffer[: values.size]
            np.copyto(some, halves[part])
            torch.from_numpy(values).copy_(torch.from_numpy(some).view(torch.bfloat16))
