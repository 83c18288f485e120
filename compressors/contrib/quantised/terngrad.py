"""Three values a gradient: -s, 0, s; at random so that the mean stays."""

from __future__ import annotations

from math import frexp, isfinite, nan, sqrt
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import BadFrame
from compressors.contrib.quantised.planes import Planes
from compressors.contrib.quantised.stochastic import Rounder
from compressors.fixed_rate import FixedRate
from compressors.packing import Bytes, read_floats, write_floats
from compressors.rates import CHUNK, SCALE_BYTES, terngrad_bytes

if TYPE_CHECKING:
    import torch

CLIP = 2.5  # sigmas
_TRITS = Planes(3)
_LEAST = 2.0**-100  # a smaller scale's reciprocal, times 2**16, would overflow


class TernGrad(FixedRate):
    """``x' = s * sign(x) * Bernoulli(min(|x|, s) / s)``, s = min(max |x|, 2.5 sigma), sigma the
    root of the mean square (gradients have a mean near 0, and a constant one must not vanish).

    One s a tensor. Unbiased for what is within s, biased for what is clipped to it; |x - x'| is at
    most max(s, |x|). Any infinity or NaN makes the whole tensor NaN; s below 2**-100 all zeros.
    Bytes: 1/5 an element (five base-3 digits a byte, ``planes.py``), 4 a tensor.
    Source: papers/compression.md section 4, TernGrad (clip at 2.5 std; 1.6 bits in base 3).
    """

    name = "terngrad"

    def length(self, elements: int) -> int:
        return terngrad_bytes(elements)

    def encode(self, tensor: torch.Tensor, payload: Bytes, seed: int) -> None:
        scale = np.float32(_scale(tensor))
        payload[:SCALE_BYTES].view(np.float32)[0] = scale
        factor = np.float32(Rounder.scale) / scale if scale > 0.0 else np.float32(0.0)
        limit = np.float32(Rounder.scale)
        rounder, packed = Rounder(seed), payload[SCALE_BYTES:]
        scaled = np.empty(min(CHUNK, tensor.numel()), np.float32)
        trits = np.empty(scaled.size, np.uint8)
        for part, chunk in read_floats(tensor):
            values, digits = scaled[: chunk.size], trits[: chunk.size]
            np.multiply(chunk, factor, out=values)
            np.clip(values, -limit, limit, out=values)
            if not factor:
                values[:] = 0.0
            rounder.round(values, digits.view(np.int8))
            np.add(digits, np.uint8(1), out=digits)
            _TRITS.pack(digits, packed[_TRITS.part(part)])

    def decode(self, payload: Bytes, target: torch.Tensor) -> None:
        scale = payload[:SCALE_BYTES].view(np.float32)[0]
        packed = payload[SCALE_BYTES:]
        if packed.max() >= _TRITS.codes:
            raise BadFrame(
                f"terngrad: a byte of {packed.max()}; five digits of base 3 are below {_TRITS.codes}"
            )
        trits = np.empty(min(CHUNK, target.numel()), np.uint8)
        for part, values in write_floats(target):
            digits = trits[: values.size]
            _TRITS.unpack(packed[_TRITS.part(part)], digits)
            np.subtract(digits, np.uint8(1), out=digits)
            np.copyto(values, digits.view(np.int8))
            np.multiply(values, scale, out=values)


def _scale(tensor: torch.Tensor) -> float:
    """s of a tensor; NaN where it has an infinity or NaN, 0 where s would be too small."""
    squares, largest = 0.0, 0.0
    work = np.empty(min(CHUNK, tensor.numel()), np.float32)
    for _, chunk in read_floats(tensor):
        values = work[: chunk.size]
        peak = float(np.abs(chunk, out=values).max())
        if not isfinite(peak):
            return nan
        # A power of two near 1 / peak: the squares neither overflow nor vanish.
        power = min(-frexp(peak)[1], 126)
        np.multiply(values, np.float32(2.0**power), out=values)
        np.multiply(values, values, out=values)
        squares += float(values.sum()) * 4.0**-power
        largest = max(largest, peak)
    scale = min(largest, CLIP * sqrt(squares / tensor.numel()))
    return scale if scale >= _LEAST else 0.0
