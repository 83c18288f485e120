"""The upper half of a float32: all of its range, 8 bits of its precision."""

from __future__ import annotations

import numpy as np
import torch

from compressors.fixed_rate import FixedRate
from compressors.packing import Bytes, read_floats, write_floats
from compressors.rates import CHUNK, bf16_bytes

_SIGN, _MAGNITUDE = 0x8000, 0x7FFF  # bits
_LARGEST = {torch.float32: 0x7F7F, torch.bfloat16: 0x7F7F, torch.float16: 0x477F}
"""Bits of the largest bfloat16 that is finite in the tensor's dtype: 3.3895e38 or 65280."""


class BrainFloat(FixedRate):
    """``x -> bfloat16(x)``, to the nearest, ties to even; bfloat16 tensors stay as they are.

    Error of an element: at most ``|x| * 2**-8``, and 2**-134 in the subnormal range. Infinities and
    NaN stay what they are; what would round to an infinity becomes the largest bfloat16 that is none:
    3.3895e38, in float16 tensors 65280.
    Bytes: 2 an element.
    Source: papers/compression.md section 4, fp16 row ("bf16: no overflow, 8-bit mantissa").
    """

    name = "bf16"

    def length(self, elements: int) -> int:
        return bf16_bytes(elements)

    def encode(self, tensor: torch.Tensor, payload: Bytes, seed: int) -> None:
        halves = torch.from_numpy(payload).view(torch.bfloat16)
        bits, largest = payload.view(np.uint16), _LARGEST[tensor.dtype]
        for part, chunk in read_floats(tensor):
            halves[part].copy_(torch.from_numpy(chunk))
            some = bits[part]
            # Positive values of the largest magnitude lead the signed order, negative the unsigned.
            if some.view(np.int16).max() > largest or some.max() > largest | _SIGN:
                beyond = ((some & _MAGNITUDE) > largest) & np.isfinite(chunk)
                some[beyond] = (some[beyond] & _SIGN) | largest

    def decode(self, payload: Bytes, target: torch.Tensor) -> None:
        halves = payload.view(np.int16)
        buffer = np.empty(min(CHUNK, target.numel()), np.int16)
        for part, values in write_floats(target):
            some = buffer[: values.size]
            np.copyto(some, halves[part])
            torch.from_numpy(values).copy_(torch.from_numpy(some).view(torch.bfloat16))
