"""Levels chosen at random so that the mean over seeds is the value itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from compressors.blocks import BlockScaler, multiply
from compressors.contrib.quantised.planes import Planes
from compressors.contrib.quantised.stochastic import Rounder
from compressors.fixed_rate import FixedRate
from compressors.packing import Bytes, read_floats, write_floats
from compressors.rates import CHUNK, MAX_RATIO_8_BIT, QSGD_BUCKET, qsgd_bytes

if TYPE_CHECKING:
    import torch

STEPS_8_BIT, STEPS_4_BIT = 127, 7
_NIBBLES = Planes(16)
_MIDDLE = 8
_MARGIN = 2.0**-20  # rounding must not lift the largest value over the last level


class Qsgd(FixedRate):
    """``q = sign(x) * floor(s |x| / n + u)``, u uniform in [0, 1); ``x' = n q / s``.

    n is the largest magnitude (max norm) of 512 row-major neighbours; s = 127 levels in a byte, or
    7 in half a byte for a ratio above 4. Unbiased to 2**-16 of a level; |x - x'| <= n / s always,
    its variance at most (n / 2s)**2. A bucket with an infinity or NaN decodes as NaN; one with n
    below 2**-120 as zeros. Bytes: 1 or 1/2 an element, 4 a bucket.
    Source: papers/compression.md section 4, QSGD(s); buckets of 512 and the max norm are usual
    practice, not verified against the paper.
    """

    name = "qsgd"

    def __init__(self, ratio: float = 1.0) -> None:
        self.steps = STEPS_8_BIT if ratio <= MAX_RATIO_8_BIT else STEPS_4_BIT

    def length(self, elements: int) -> int:
        return qsgd_bytes(elements, 8 if self.steps == STEPS_8_BIT else 4)

    def encode(self, tensor: torch.Tensor, payload: Bytes, seed: int) -> None:
        buckets = -(-tensor.numel() // QSGD_BUCKET)
        all_scales, packed = payload[: 4 * buckets].view(np.float32), payload[4 * buckets :]
        scaler, rounder = BlockScaler(QSGD_BUCKET, self.steps, margin=_MARGIN), Rounder(seed)
        codes = np.empty(min(CHUNK, tensor.numel()), np.uint8)
        for part, chunk in read_floats(tensor):
            first = part.start // QSGD_BUCKET
            scales = scaler.scales(chunk)
            all_scales[first : first + scales.size] = scales
            scaled = scaler.scaled(chunk, scales, Rounder.scale)
            if self.steps == STEPS_8_BIT:
                rounder.round(scaled, packed[part].view(np.int8))
                continue
            some = codes[: chunk.size]
            rounder.round(scaled, some.view(np.int8))
            np.add(some, np.uint8(_MIDDLE), out=some)
            _NIBBLES.pack(some, packed[_NIBBLES.part(part)])

    def decode(self, payload: Bytes, target: torch.Tensor) -> None:
        buckets = -(-target.numel() // QSGD_BUCKET)
        scales, packed = payload[: 4 * buckets].view(np.float32).copy(), payload[4 * buckets :]
        codes = np.empty(min(CHUNK, target.numel()), np.uint8)
        for part, values in write_floats(target):
            some = codes[: values.size]
            if self.steps == STEPS_8_BIT:
                np.copyto(values, packed[part].view(np.int8))
            else:
                _NIBBLES.unpack(packed[_NIBBLES.part(part)], some)
                np.subtract(some, np.uint8(_MIDDLE), out=some)
                np.copyto(values, some.view(np.int8))
            multiply(values, scales[part.start // QSGD_BUCKET :], QSGD_BUCKET, values)
