"""Half precision with a power of two a chunk: what is small in float32 stays above zero."""

from __future__ import annotations

from math import frexp, isfinite

import numpy as np
import torch

from atoll.errors import BadFrame
from compressors.fixed_rate import FixedRate
from compressors.packing import Bytes, Floats, read_floats, write_floats
from compressors.rates import CHUNK, fp16_bytes

MAX = np.float32(65504.0)  # largest finite float16
TOP = 15  # a chunk is scaled into (-2**15, 2**15), which rounds to no infinity
BELOW_TOP = np.float32(2.0**15 - 2.0**4)  # the half before 2**15
MIN_SHIFT, MAX_SHIFT = TOP - 128, 126  # both ways a normal float32


class HalfPrecision(FixedRate):
    """``x -> half(x * 2**k) * 2**-k`` with one k for each 65,536 elements, in row-major order.

    k brings the chunk's largest magnitude m to [2**14, 2**15): tiny gradients do not underflow,
    large values do not overflow. k = 0 where m is 0 or not finite, and for float16, which stays as
    it is. Bytes: 2 an element, 1 a chunk.

    Error of an element: at most ``|x| * 2**-11 + m * 2**-39``. Infinities and NaN stay what they
    are; finite values in the same chunk are clamped to +-65504 and round to 2**-25.
    Source: papers/compression.md section 4, fp16 ("underflow below 6e-8: scale first").
    """

    name = "fp16"

    def length(self, elements: int) -> int:
        return fp16_bytes(elements)

    def encode(self, tensor: torch.Tensor, payload: Bytes, seed: int) -> None:
        elements = tensor.numel()
        halves = torch.from_numpy(payload[: 2 * elements]).view(torch.float16)
        shifts = payload[2 * elements :].view(np.int8)
        exact = tensor.dtype == torch.float16
        buffer = np.empty(min(CHUNK, elements), np.float32)
        for index, (part, chunk) in enumerate(read_floats(tensor)):
            scaled = buffer[: chunk.size]
            shifts[index] = shift = 0 if exact else _shift(chunk)
            if exact:
                scaled = chunk
            elif shift:
                np.multiply(chunk, np.float32(2.0**shift), out=scaled)
                if shift == MIN_SHIFT:  # rounded to 2**15, a value would come back as 2**128
                    np.clip(scaled, -BELOW_TOP, BELOW_TOP, out=scaled)
            else:
                np.clip(chunk, -MAX, MAX, out=scaled)
                np.copyto(scaled, chunk, where=np.isinf(chunk))
            halves[part].copy_(torch.from_numpy(scaled))

    def decode(self, payload: Bytes, target: torch.Tensor) -> None:
        elements = target.numel()
        halves = payload[: 2 * elements].view(np.int16)
        shifts = payload[2 * elements :].view(np.int8)
        if shifts.min() < MIN_SHIFT or shifts.max() > MAX_SHIFT:
            raise BadFrame(f"fp16: a shift of {shifts.min()} or {shifts.max()}; {MIN_SHIFT} to {MAX_SHIFT}")
        # torch wants memory it could write, which a received payload may not be.
        buffer = np.empty(min(CHUNK, elements), np.int16)
        for shift, (part, values) in zip(shifts.tolist(), write_floats(target), strict=True):
            some = buffer[: values.size]
            np.copyto(some, halves[part])
            torch.from_numpy(values).copy_(torch.from_numpy(some).view(torch.float16))
            if shift:
                np.multiply(values, np.float32(2.0**-shift), out=values)


def _shift(chunk: Floats) -> int:
    """The power of two that brings the largest magnitude to [2**14, 2**15); 0 where there is none."""
    largest = max(float(chunk.max()), -float(chunk.min()))  # NaN comes through both
    if not isfinite(largest) or largest == 0.0:
        return 0
    return min(TOP - frexp(largest)[1], MAX_SHIFT)
