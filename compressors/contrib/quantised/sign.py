"""Signs: one bit a value for its side of zero, and one magnitude for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from compressors.fixed_rate import FixedRate
from compressors.packing import Bytes, read_floats, write_floats
from compressors.rates import CHUNK, SCALE_BYTES, sign_bytes

if TYPE_CHECKING:
    import torch


class Sign(FixedRate):
    """``x -> mean(|x|) * sign(x)`` with sign(0) = 1: the compressor of EF-SignSGD.

    Biased: meant for gradients and deltas behind an error feedback. ``||x - x'||**2`` is exactly
    ``(1 - delta) ||x||**2`` with delta = ||x||_1**2 / (d ||x||_2**2). Any infinity or NaN makes
    the whole tensor NaN. Bytes: 1/8 an element, 4 a tensor.
    Source: papers/compression.md section 4, EF-SignSGD.
    """

    name = "sign"

    def length(self, elements: int) -> int:
        return sign_bytes(elements)

    def encode(self, tensor: torch.Tensor, payload: Bytes, seed: int) -> None:
        bits = payload[SCALE_BYTES:]
        total = 0.0
        magnitudes = np.empty(min(CHUNK, tensor.numel()), np.float32)
        negative = np.empty(magnitudes.size, np.bool_)
        for part, chunk in read_floats(tensor):
            size, first = chunk.size, part.start // 8
            total += _sum(np.abs(chunk, out=magnitudes[:size]))
            packed = np.packbits(np.less(chunk, 0.0, out=negative[:size]))
            bits[first : first + packed.size] = packed
        mean = total / tensor.numel()
        payload[:SCALE_BYTES].view(np.float32)[0] = mean if np.isfinite(mean) else np.nan

    def decode(self, payload: Bytes, target: torch.Tensor) -> None:
        scale = payload[:SCALE_BYTES].view(np.float32)[0]
        bits = payload[SCALE_BYTES:]
        octets = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
        table = np.where(octets, -scale, scale).astype(np.float32)
        for part, values in write_floats(target):
            whole = values.size // 8 * 8
            codes = bits[part.start // 8 :]
            np.take(table, codes[: whole // 8], axis=0, out=values[:whole].reshape(-1, 8), mode="clip")
            if whole < values.size:
                values[whole:] = table[codes[whole // 8], : values.size - whole]


def _sum(magnitudes: np.ndarray) -> float:
    """Their sum; in float64 where float32 is not enough."""
    total = float(magnitudes.sum())
    return total if np.isfinite(total) else float(magnitudes.sum(dtype=np.float64))
